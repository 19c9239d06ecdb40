"""Key-wise branch of a compose as a matrix product.

For one key, the key-wise branch and the static projection map the H heads of a score to H others with the matrix
N[n, h] = Σ_r w_k2[r, n]·w_k1[r, h] + δ_nh·w_kg[h] + W_b[h, n], zero between groups (Eqn 7 without the query-wise branch
and the skip connection). A strip of keys makes them one product for the MXU: a matrix of diagonals,
with N[n, h] of key s at row (n, s) and column (h, s), times the planes of all heads, stacked to (heads·keys, Bq). A
block of 16 keys of 8 heads, or of 8 keys of 16 heads, has 128 columns; one of 8 keys of 32 heads has 256. The vector
units add the skip connection, in float32, so that a product of bfloat16 rounds only the corrections to a score.

The matrices are kept as rows n of columns (h, s); `block` repeats each row for all its keys, and keeps the diagonals.

A block of keys of a kernel with several tiles meets several blocks of queries, so that a small kernel computes its
matrices (`with_matrices`) once in the forward pass, and once in the backward pass, with their transposes. They are in
HBM in between: 4·H² bytes for each key and matrix, if H·keys is a complete register.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.backends.tpu.call import Blocked, KernelCall, Refs
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, ComposeLayout, ComposeName, Index, Interpret, KernelConfig
from dcvit.dcmha.backends.tpu.weights import key_rows_scratch, transpose_key_weights
from dcvit.dcmha.numerics import cdiv, round_up
from dcvit.dcmha.shapes import Array, Ref, not_none

MATRICES = ("mix_pre", "mix_post", "mix_pre_back", "mix_post_back")  # of each compose, and of its transpose


def rows_shape(config: KernelConfig) -> jax.ShapeDtypeStruct:
    """Return the type of the matrices of one compose for a block of keys of a tile, see `build`."""
    shape = (config.block_k // config.strip, round_up(config.heads, SUBLANES), width(config))
    return jax.ShapeDtypeStruct(shape, jnp.int32 if config.rounded else jnp.float32)


def width(config: KernelConfig) -> int:
    """Return the columns of a matrix, in complete registers."""
    return round_up(config.heads * config.strip, LANES)


def scratch(config: KernelConfig) -> pl.MemoryRef:
    """Return the buffer of all matrices of one compose."""
    found: pl.MemoryRef = pltpu.VMEM(rows_shape(config).shape, rows_shape(config).dtype)
    return found


def diagonal_scratch() -> pl.MemoryRef:
    """Return the buffer of `write_diagonal`."""
    found: pl.MemoryRef = pltpu.VMEM((SUBLANES, LANES), jnp.int32)
    return found


def write_diagonal(config: KernelConfig, out: Ref) -> None:
    """Write the bits of the diagonals of matrices of bfloat16, in which a word has two rows."""
    row, lane = _iota(0), _iota(1) % config.strip
    lower, upper = (jnp.where(lane == (2 * row + n) % config.strip, m, 0) for n, m in ((0, 0xFFFF), (1, -65536)))
    out[...] = lower | upper


def build(
    config: KernelConfig,
    compose_name: ComposeName,
    wk: Ref | None,
    static: Ref | None,
    out: Ref,
    *,
    transposed: bool = False,
) -> None:
    """Write the matrices of one compose.

    Args:
      config: the layout of the weights.
      compose_name: the compose.
      wk: key-wise weights without the factor of the pre-compose, (columns + 8, keys), keys in complete registers.
      static: W_b with that factor, (H, H/G), in SMEM.
      out: the result, (blocks, heads, heads·keys), both of the last in complete registers; rounded weights are written
        twice, to both halves of a 32-bit word.
      transposed: build the matrices of the transposed compose.
    """
    layout = not_none(config.pre if compose_name == "pre" else config.post)
    weights = MatrixWeights(layout, wk, static, transposed)
    keys, heads = config.strip, config.heads
    per_register, blocks = LANES // keys, out.shape[0]
    for first in range(0, heads, SUBLANES):
        for start in range(cdiv(blocks, per_register)):
            columns = slice(start * LANES, (start + 1) * LANES)
            planes = _planes(config, weights, first, columns)
            by_block = [transpose_blocks(config, planes[n : n + per_register]) for n in range(0, heads, per_register)]
            for b in range(start * per_register, min((start + 1) * per_register, blocks)):
                for n in range(0, heads, per_register):
                    x, lanes = by_block[n // per_register][b % per_register], slice(n * keys, n * keys + LANES)
                    out[b, first : first + SUBLANES, lanes] = pack_bf16_twice(x) if config.rounded else x


class MatrixWeights(NamedTuple):
    """Weights of which the matrices of one compose, or of its transpose, are made."""

    layout: ComposeLayout
    wk: Ref | None
    static: Ref | None
    transposed: bool


def transpose_blocks(config: KernelConfig, some: Sequence[Array]) -> list[Array]:
    """Return registers whose block c of `strip` lanes, in register r, is block r of register c of `some`.

    Missing registers are zeros. Registers of 16 blocks are swapped in pairs whose numbers differ in one bit, which
    takes a quarter of the operations; those of 8 blocks one by one, which the compiler schedules in fewer bundles.
    """
    keys, count = config.strip, LANES // config.strip
    block, zeros = jax.lax.div(_iota(1), keys), jnp.zeros((SUBLANES, LANES), jnp.float32)
    if keys > SUBLANES:
        found = []
        for r in range(count):
            out = zeros if len(some) < count else some[0]
            for c, x in enumerate(some):
                out = jnp.where(block == c, pltpu.roll(x, (c - r) * keys % LANES, axis=1), out)
            found.append(out)
        return found
    found = [*some, *[zeros] * (count - len(some))]
    for bit in (1 << n for n in range(count.bit_length() - 1)):
        upper, shift = block & bit != 0, bit * keys
        for r in (r for r in range(count) if not r & bit):
            x, y = found[r], found[r + bit]
            found[r] = jnp.where(upper, pltpu.roll(y, shift, axis=1), x)
            found[r + bit] = jnp.where(upper, y, pltpu.roll(x, LANES - shift, axis=1))
    return found


def _planes(config: KernelConfig, weights: MatrixWeights, first: int, columns: slice) -> list[Array]:
    """Return N[n, h] of the eight heads n from `first` for 128 keys, (8, 128), for each head h."""
    layout, wk, static, transposed = weights
    heads, per_group = config.heads, config.heads // config.groups
    head = _iota(0) + first
    down, up, gate = layout.key
    found = [jnp.zeros((SUBLANES, LANES), jnp.float32)] * heads
    if down is not None and up is not None:
        ours, theirs = (down, up) if transposed else (up, down)
        for r in range(layout.key_rank):
            start = ours + r * heads + first
            rows = not_none(wk)[start : start + SUBLANES, columns]
            for h in range(heads):
                one = theirs + r * heads + h
                found[h] = found[h] + rows * not_none(wk)[one : one + 1, columns]
    if gate is not None:
        for h in range(first, min(first + SUBLANES, heads)):
            found[h] = jnp.where(head == h, found[h] + not_none(wk)[gate + h : gate + h + 1, columns], found[h])
    found = [x * layout.skip_factor for x in found] if layout.skip_factor != 1 else found
    for h in range(heads) if layout.has_static else ():
        for n in range(h - h % per_group, h - h % per_group + per_group):
            weight = not_none(static)[(n, h % per_group) if transposed else (h, n % per_group)]
            found[h] = jnp.where(head == n, found[h] + weight, found[h])
    if config.groups == 1:
        return found
    return [jnp.where(jax.lax.div(head, per_group) == h // per_group, x, 0.0) for h, x in enumerate(found)]


def pack_bf16_twice(x: Array) -> Array:
    """Round to bfloat16 and return words with the result in both halves."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32)
    return bits | jax.lax.shift_right_logical(bits, 16)


def block(config: KernelConfig, rows: Ref, diagonal: Ref, b: Index) -> Array:
    """Return the matrix of block `b` of keys, (heads·keys, heads·keys), in the dtype of operands.

    `diagonal` is the result of `write_diagonal`.
    """
    keys, heads = config.strip, config.heads
    registers = [slice(start, start + LANES) for start in range(0, rows.shape[2], LANES)]
    parts = []
    if config.rounded:
        heads_per_tile, bits = 2 * SUBLANES // keys, diagonal[...]
        for h in range(0, heads, heads_per_tile):
            parts.append([pltpu.bitcast(_words(rows, b, h, heads_per_tile, n) & bits, jnp.bfloat16) for n in registers])
    else:
        row, lane = _iota(0), _iota(1) % keys
        for h in range(heads):
            for start in range(0, keys, SUBLANES):
                parts.append([jnp.where(lane == row + start, _repeated(rows, b, h, n), 0.0) for n in registers])
    return jnp.concatenate([jnp.concatenate(x, axis=1) for x in parts], axis=0)[:, : heads * keys]


def _words(rows: Ref, b: Index, h: int, heads_per_tile: int, lanes: slice) -> Array:
    """Return words of 16 rows of a matrix of bfloat16: those of a head, or of two."""
    words = _repeated(rows, b, h, lanes)
    return (
        words if heads_per_tile == 1 else jnp.where(_iota(0) < SUBLANES // 2, words, _repeated(rows, b, h + 1, lanes))
    )


def _repeated(rows: Ref, b: Index, h: int, lanes: slice) -> Array:
    """Return a row, repeated over the sublanes of a register."""
    return jnp.broadcast_to(rows[b, h : h + 1, lanes], (SUBLANES, LANES))


def _iota(axis: int) -> Array:
    """Return the number of the row (axis 0) or lane (axis 1) of each element of a register."""
    return jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), axis)


def matrices_kernel(config: KernelConfig, refs: Refs) -> None:
    """Compute the matrices of a block of keys; grid index (b, j)."""
    if "wk" in refs:
        transpose_key_weights(refs["wk"], refs["wk_cur"])
    composes: tuple[ComposeName, ...] = ("pre", "post")
    for compose_name in composes:
        for suffix in ("", "_back"):
            if f"mix_{compose_name}{suffix}" in refs:
                static, out = refs.get(f"static_{compose_name}"), refs[f"mix_{compose_name}{suffix}"].at[0]
                build(config, compose_name, refs.get("wk_cur"), static, out, transposed=bool(suffix))


def with_matrices(
    config: KernelConfig, inputs: dict[str, Blocked], names: Sequence[str], interpret: Interpret
) -> dict[str, Blocked]:
    """Return the inputs of a kernel with some matrices, (B, S/keys, H, H·keys), instead of key-wise and static weights.

    Args:
      config: the sizes; nothing changes where the VPU mixes heads.
      inputs: arrays from `dcvit.dcmha.backends.tpu.packing.pack`, by name.
      names: some of `MATRICES`.
      interpret: the argument of `pallas_call`.
    """
    if config.family != "matrix":
        return inputs
    kept = {name: x for name, x in inputs.items() if name != "wk" and not name.startswith("static")}
    return kept | matrices(config, inputs, names, interpret)


def matrices(
    config: KernelConfig, inputs: dict[str, Blocked], names: Sequence[str], interpret: Interpret
) -> dict[str, Blocked]:
    """Return the matrices of all composes that mix heads, by name."""
    layouts, batch = {"pre": config.pre, "post": config.post}, len(inputs["q"].array)
    names = [name for name in names if (layout := layouts[name.split("_")[1]]) is not None and layout.mixes]
    inputs = {name: inputs[name] for name in ("wk", "static_pre", "static_post") if name in inputs}
    block = rows_shape(config)
    shape = (batch, config.blocks_k * block.shape[0], *block.shape[1:])
    out = Blocked(jax.ShapeDtypeStruct(shape, block.dtype), (1, *block.shape), "BS..")
    call = KernelCall(
        name="dcmha_gradient_matrices" if any(name.endswith("_back") for name in names) else "dcmha_matrices",
        grid=(batch, config.blocks_k),
        index_maps={"B": lambda b, j: b, "S": lambda b, j: j},
        inputs=inputs,
        outputs=dict.fromkeys(names, out),
        scratch={"wk_cur": key_rows_scratch(inputs["wk"].array.shape[2])} if "wk" in inputs else {},
        vmem_bytes=config.vmem_bytes,
    )
    results = call.run(functools.partial(matrices_kernel, config), interpret)
    return {name: out._replace(array=x) for name, x in results.items()}
