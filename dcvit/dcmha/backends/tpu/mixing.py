"""Key-wise branch of a compose as a matrix product.

For one key, the key-wise branch and the static projection multiply the scores of the H heads by the matrix
N[n, h] = Σ_r w_k2[r, n]·w_k1[r, h] + δ_nh·w_kg[h] + W_b[h, n], zero between groups (Eqn 7 without the query-wise branch
and the skip connection). For a strip of keys, the MXU computes these products as one: a matrix of diagonals, with
N[n, h] of key s at row (n, s) and column (h, s), times the planes of all heads, stacked to (heads·keys, Bq). The matrix
of 16 keys of 8 heads, or of 8 keys of 16 heads, has 128 columns; that of 8 keys of 32 heads has 256. The VPU adds the
skip connection, in float32, so that a product of bfloat16 rounds only the corrections to a score.

In memory, a matrix has one row for each head n, with columns (h, s); `block` repeats each row for all keys of the
strip, and sets the elements outside the diagonals to zero.

With one example in tiles, several query blocks use the matrices of one key block. A small kernel computes them
beforehand (`with_matrices`), once in the forward pass, and once in the backward pass, with their transposes. They are
stored in HBM: 4·H² bytes for each key and matrix, if H·keys is a multiple of 128.
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

MATRICES = ("mix_pre", "mix_post", "mix_pre_back", "mix_post_back")  # of both composes, and of their transposes


def rows_shape(config: KernelConfig) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of the matrices of one compose for one key block, see the argument `out` of `build`."""
    shape = (config.block_k // config.strip, round_up(config.heads, SUBLANES), width(config))
    return jax.ShapeDtypeStruct(shape, jnp.int32 if config.rounded else jnp.float32)


def width(config: KernelConfig) -> int:
    """Return the number of columns of a matrix, rounded up to a multiple of 128."""
    return round_up(config.heads * config.strip, LANES)


def scratch(config: KernelConfig) -> pl.MemoryRef:
    """Return a VMEM buffer for the matrices of one compose for one key block."""
    found: pl.MemoryRef = pltpu.VMEM(rows_shape(config).shape, rows_shape(config).dtype)
    return found


def diagonal_scratch() -> pl.MemoryRef:
    """Return a VMEM buffer for the result of `write_diagonal`."""
    found: pl.MemoryRef = pltpu.VMEM((SUBLANES, LANES), jnp.int32)
    return found


def write_diagonal(config: KernelConfig, out: Ref) -> None:
    """Write the bit mask that keeps the diagonals of a bfloat16 matrix, of which a 32-bit word holds two rows."""
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
    """Write the matrices of one compose, one for each strip of keys.

    Args:
      config: the layout of the weights.
      compose_name: the compose.
      wk: key-wise weights without the factor scale·log2(e) of the pre-compose, (columns + 8, keys), with the keys
        padded to a multiple of 128.
      static: W_b with that factor, (H, H/G), in SMEM.
      out: the result, (strips, heads, heads·keys), with heads and columns padded to complete registers; weights that
        are rounded to bfloat16 are written twice, to both halves of a 32-bit word.
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
    """Weights from which `build` makes the matrices of one compose, or of its transpose; see its arguments."""

    layout: ComposeLayout
    wk: Ref | None
    static: Ref | None
    transposed: bool


def transpose_blocks(config: KernelConfig, registers: Sequence[Array]) -> list[Array]:
    """Swap registers and blocks of lanes: block c of register r of the result is block r of `registers[c]`.

    A block has `config.strip` lanes, and there are as many registers as blocks in one; missing registers are zeros.
    With 16 blocks, registers are exchanged in pairs whose indices differ in one bit, which takes a quarter of the
    operations; with 8 blocks each is moved alone, which the compiler schedules in fewer bundles.
    """
    keys, count = config.strip, LANES // config.strip
    block, zeros = jax.lax.div(_iota(1), keys), jnp.zeros((SUBLANES, LANES), jnp.float32)
    if keys > SUBLANES:
        found = []
        for r in range(count):
            out = zeros if len(registers) < count else registers[0]
            for c, x in enumerate(registers):
                out = jnp.where(block == c, pltpu.roll(x, (c - r) * keys % LANES, axis=1), out)
            found.append(out)
        return found
    found = [*registers, *[zeros] * (count - len(registers))]
    for bit in (1 << n for n in range(count.bit_length() - 1)):
        upper, shift = block & bit != 0, bit * keys
        for r in (r for r in range(count) if not r & bit):
            x, y = found[r], found[r + bit]
            found[r] = jnp.where(upper, pltpu.roll(y, shift, axis=1), x)
            found[r + bit] = jnp.where(upper, y, pltpu.roll(x, LANES - shift, axis=1))
    return found


def _planes(config: KernelConfig, weights: MatrixWeights, first: int, columns: slice) -> list[Array]:
    """Return, for each head h, the matrix entries N[n, h] of the eight heads n from `first` (sublanes) and 128 keys."""
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
    """Return 32-bit words that have `x`, rounded to bfloat16, in both halves."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32)
    return bits | jax.lax.shift_right_logical(bits, 16)


def block(config: KernelConfig, rows: Ref, diagonal: Ref, b: Index) -> Array:
    """Return the matrix of strip `b`, (heads·keys, heads·keys), in the dtype of operands.

    `rows` is the result of `build`, `diagonal` that of `write_diagonal`.
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
    """Return 32-bit words with 16 rows of a bfloat16 matrix: 16 rows of head `h`, or 8 each of `h` and the next."""
    words = _repeated(rows, b, h, lanes)
    return (
        words if heads_per_tile == 1 else jnp.where(_iota(0) < SUBLANES // 2, words, _repeated(rows, b, h + 1, lanes))
    )


def _repeated(rows: Ref, b: Index, h: int, lanes: slice) -> Array:
    """Return the stored row of head `h` of strip `b`, repeated over the sublanes of a register."""
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
    """Return a kernel's inputs with matrices, (B, strips, H, H·keys), instead of key-wise and static weights.

    Args:
      config: the sizes.
      inputs: arrays from `dcvit.dcmha.backends.tpu.packing.pack`, by name.
      names: the matrices that the kernel reads, of `MATRICES`.
      interpret: the argument of `pallas_call`.
    """
    kept = {name: x for name, x in inputs.items() if name != "wk" and not name.startswith("static")}
    return kept | matrices(config, inputs, names, interpret)


def matrices(
    config: KernelConfig, inputs: dict[str, Blocked], names: Sequence[str], interpret: Interpret
) -> dict[str, Blocked]:
    """Return the matrices `names` of the composes that mix heads, by name; see `with_matrices`."""
    layouts, batch = {"pre": config.pre, "post": config.post}, len(inputs["q"].array)
    names = [name for name in names if (layout := layouts[name.split("_")[1]]) is not None and layout.mixes]
    if not names:
        return {}
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
