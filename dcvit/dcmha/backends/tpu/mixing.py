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
beforehand (`matrices`), once in the forward pass, and once in the backward pass, with their transposes. They are
stored in HBM: 4·H² bytes for each key and matrix, if H·keys is a multiple of 128.

The gradient of the matrix N of key s is dN_s[n, h] = Σ_t g_n[s, t]·a_h[s, t], for output gradients g and inputs a. For
a strip of Bs keys, the MXU computes g·aᵀ of the planes of all heads, stacked to (heads·Bs, Bq); dN is on the diagonals
of its Bs×Bs squares (n, h). `diagonals` packs them into registers: sublane (n + s) mod 8, lane h·Bs + s.
`matrix_gradients` moves them to planes with keys along lanes, rotated in this way, and differentiates
N = Σ_r k1[r, h]·k2[r, n] + δ_nh·kg[h] + static[h, n].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.backends.tpu.call import Blocked, ComposePair, ComposeRefs, KernelCall, Memory, Packed, Pair, vmem
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, ComposeLayout, Index, Interpret, KernelConfig
from dcvit.dcmha.backends.tpu.packing import key_rows_buffer, transpose_key_weights
from dcvit.dcmha.numerics import cdiv, round_up
from dcvit.dcmha.shapes import Array, Ref, not_none


def rows_buffer(config: KernelConfig) -> pl.MemoryRef:
    """Return a buffer for the matrices of one compose for one key block, see the argument `out` of `build`."""
    shape = (config.block_k // config.strip, round_up(config.heads, SUBLANES), width(config))
    return vmem(shape, jnp.int32 if config.rounded else jnp.float32)


def width(config: KernelConfig) -> int:
    """Return the number of columns of a matrix, rounded up to a multiple of 128."""
    return round_up(config.heads * config.strip, LANES)


def diagonal_buffer() -> pl.MemoryRef:
    """Return a buffer for the result of `write_diagonal`."""
    return vmem((SUBLANES, LANES), jnp.int32)


def write_diagonal(config: KernelConfig, out: Ref) -> None:
    """Write the bit mask that keeps the diagonals of a bfloat16 matrix, of which a 32-bit word holds two rows."""
    row, lane = _iota(0), _iota(1) % config.strip
    lower, upper = (jnp.where(lane == (2 * row + n) % config.strip, m, 0) for n, m in ((0, 0xFFFF), (1, -65536)))
    out[...] = lower | upper


class MatrixWeights(NamedTuple):
    """Weights from which `build` makes the matrices of one compose, or of the transposed compose.

    Fields:
      layout: the columns of the weights.
      wk: key-wise weights without the factor scale·log2(e) of the pre-compose, (columns + 8, keys), with the keys
        padded to a multiple of 128.
      static: W_b with that factor, (H, H/G), in SMEM.
      transposed: True for the transposed compose.
    """

    layout: ComposeLayout
    wk: Ref | None
    static: Ref | None
    transposed: bool = False


def build(config: KernelConfig, weights: MatrixWeights, out: Ref) -> None:
    """Write the matrices of one compose to `out`, one for each strip of keys: (strips, heads, heads·keys).

    Heads and columns are padded to complete registers. Weights that are rounded to bfloat16 are written twice, to both
    halves of a 32-bit word.
    """
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MatrixRefs(Generic[Memory]):
    """References of the kernel that computes the matrices of key blocks."""

    wk: Memory | None
    static: Pair[Memory]
    composes: ComposePair[Memory]  # outputs
    wk_rows: Memory | None  # transposed `wk`


def matrices_kernel(config: KernelConfig, refs: MatrixRefs[Ref]) -> None:
    """Compute the matrices of a block of keys; grid index (b, j)."""
    if refs.wk is not None:
        transpose_key_weights(refs.wk, not_none(refs.wk_rows))
    for layout, static, out in zip(config.layouts, refs.static, refs.composes, strict=True):
        for rows, transposed in ((out.matrices, False), (out.transposed, True)):
            if layout is not None and rows is not None:
                build(config, MatrixWeights(layout, refs.wk_rows, static, transposed), rows.at[0])


def matrices(
    config: KernelConfig, inputs: Packed[Blocked], interpret: Interpret, *, transposed: bool
) -> ComposePair[Blocked]:  # fmt: skip
    """Return the matrices, (B, strips, H, H·keys), of the composes that mix heads, and those of `transposed` ones."""
    batch, block = len(inputs.q.array), rows_buffer(config)
    shape = (batch, config.blocks_k * block.shape[0], *block.shape[1:])
    out = Blocked(jax.ShapeDtypeStruct(shape, block.dtype), (1, *block.shape), "BS..")
    one: ComposeRefs[Blocked] = ComposeRefs(out, out if transposed else None)
    pre, post = (one if mixes else ComposeRefs() for mixes in config.mixes)
    if not any(config.mixes):
        return pre, post
    wk_rows = None if inputs.wk is None else key_rows_buffer(inputs.wk.array.shape[2])
    call = KernelCall(
        name="dcmha_gradient_matrices" if transposed else "dcmha_matrices",
        grid=(batch, config.blocks_k),
        index_maps={"B": lambda b, j: b, "S": lambda b, j: j},
        refs=MatrixRefs(inputs.wk, inputs.static, (pre, post), wk_rows),
        vmem_bytes=config.vmem_bytes,
    )
    found: MatrixRefs[Array] = call.run(functools.partial(matrices_kernel, config), interpret)
    pair: ComposePair[Blocked] = jax.tree.map(lambda x: out._replace(array=x), found.composes)
    return pair


def gradient_buffer(config: KernelConfig, blocks: int) -> pl.MemoryRef:
    """Return a buffer of the gradients of the matrices of one compose: the result of `diagonals` for each strip."""
    return vmem((blocks, cdiv(config.heads, SUBLANES), SUBLANES, width(config)))


def diagonals(config: KernelConfig, product: Array, out: Ref, *, add: bool = False) -> None:
    """Write, or `add`, the diagonals of Bs×Bs squares of `product`, (heads·Bs, heads·Bs), to `out`, (H/8, 8, H·Bs)."""
    keys, missing = config.strip, -product.shape[1] % LANES
    sublane, lane = _iota(0), _iota(1)
    if missing:
        product = jnp.concatenate([product, jnp.zeros((len(product), missing), jnp.float32)], axis=1)
    for half in range(out.shape[0]):
        for start in range(0, product.shape[1], LANES):
            lanes = slice(start, start + LANES)
            packed = jnp.zeros((SUBLANES, LANES), jnp.float32)
            for n in range(half * SUBLANES, min((half + 1) * SUBLANES, config.heads)):
                rows = [product[n * keys + i : n * keys + i + SUBLANES, lanes] for i in range(0, keys, SUBLANES)]
                square = rows[0] if len(rows) == 1 else jnp.where(lane & SUBLANES == 0, rows[0], rows[1])
                turn = n % SUBLANES
                turned = pltpu.roll(square, turn, axis=0) if turn else square
                packed = jnp.where((sublane - turn - lane) & (SUBLANES - 1) == 0, turned, packed)
            out[half, :, lanes] = out[half, :, lanes] + packed if add else packed


def rotate_sublanes(x: Array, lane: Array, *, inverse: bool = False) -> Array:
    """Return `x` with sublane n of each lane s moved to sublane (n + s) mod 8; `inverse` moves it back."""
    for bit in (1, 2, 4):
        x = jnp.where(lane & bit != 0, pltpu.roll(x, SUBLANES - bit if inverse else bit, axis=0), x)
    return x


def head_planes(config: KernelConfig, packed: Ref, half: int, tile: int) -> list[Array]:
    """Return, for each input head h, a register with dN[n, h] of eight output heads n (sublanes) and 128 keys (lanes).

    `half` is the index of these output heads, `tile` that of these keys; `packed` has the results of `diagonals`. The
    sublanes are rotated as by `rotate_sublanes`. Elements whose heads are in different groups are zero.
    """
    keys, per_group, sublane, lane = config.strip, config.heads // config.groups, _iota(0), _iota(1)
    per_tile = LANES // keys
    blocks = range(tile * per_tile, min((tile + 1) * per_tile, packed.shape[0]))
    group = jax.lax.div(half * SUBLANES + ((sublane - lane) & (SUBLANES - 1)), per_group)
    planes = []
    for start in range(0, packed.shape[3], LANES):
        planes += transpose_blocks(config, [packed[b, half, :, start : start + LANES] for b in blocks])
    planes = planes[: config.heads]
    if config.groups == 1:
        return planes
    return [jnp.where(group == h // per_group, plane, 0.0) for h, plane in enumerate(planes)]


class MatrixTensors(NamedTuple):
    """Inputs and outputs of `matrix_gradients` for one compose; None for absent weights."""

    layout: ComposeLayout  # columns of the weights
    packed: Ref  # results of `diagonals`, (strips, H/8, 8, H·Bs)
    weights: Ref | None  # unscaled key-wise weights, (columns, keys)
    out: Ref | None  # gradients of the scaled packed key-wise weights, (columns, keys)
    static: Ref | None  # (H·H/8, 8, 128); sums over lanes are dN[n, h] of input h, eight outputs n in a register


def matrix_gradients(config: KernelConfig, tensors: MatrixTensors, tile: int, *, add_static: bool) -> None:
    """Compute the gradients of the key-wise and static weights of one compose for 128 keys.

    Args:
      config: the numbers of heads and keys.
      tensors: the gradients of the matrices, and the outputs.
      tile: index of the 128 keys.
      add_static: add to the static gradients instead of replacing them.
    """
    static, halves = tensors.static, tensors.packed.shape[1]
    for half in range(halves):
        planes = head_planes(config, tensors.packed, half, tile)
        if tensors.layout.key_rank or tensors.layout.key.gate is not None:
            _key_wise(config, tensors, planes, half, tile)
        if static is not None:
            for h, plane in enumerate(planes):
                by_output = rotate_sublanes(plane, _iota(1), inverse=True)
                register = h * halves + half
                static[register] = static[register] + by_output if add_static else by_output


def _key_wise(config: KernelConfig, tensors: MatrixTensors, planes: list[Array], half: int, tile: int) -> None:
    """Write gradients of key-wise weights from `head_planes` of `half`; those of down projections sum over `half`."""
    layout, weights, out = tensors.layout, not_none(tensors.weights), not_none(tensors.out)
    heads, sublane, lane = config.heads, _iota(0), _iota(1)
    columns = slice(tile * LANES, (tile + 1) * LANES)
    first, count = half * SUBLANES, min(heads - half * SUBLANES, SUBLANES)

    def some_rows(start: int) -> slice:
        return slice(start + first, start + first + count)

    for r in range(layout.key_rank):
        down, up = not_none(layout.key.down) + r * heads, not_none(layout.key.up) + r * heads
        k2 = weights[some_rows(up), columns]
        if count < SUBLANES:
            k2 = jnp.concatenate([k2, jnp.zeros((SUBLANES - count, LANES), jnp.float32)])
        k2, dk2 = rotate_sublanes(k2, lane), jnp.zeros((SUBLANES, LANES), jnp.float32)
        for h, plane in enumerate(planes):
            dk1 = jnp.sum(plane * k2, axis=0, keepdims=True) * layout.skip_factor
            row = slice(down + h, down + h + 1)
            out[row, columns] = out[row, columns] + dk1 if half else dk1
            dk2 = dk2 + plane * weights[row, columns]
        out[some_rows(up), columns] = rotate_sublanes(dk2, lane, inverse=True)[:count]
    if layout.key.gate is not None:
        gate = jnp.zeros((SUBLANES, LANES), jnp.float32)
        for h in range(first, first + count):
            gate = jnp.where((sublane - h - lane) & (SUBLANES - 1) == 0, planes[h], gate)
        out[some_rows(layout.key.gate), columns] = rotate_sublanes(gate, lane, inverse=True)[:count]


def static_gradients(config: KernelConfig, sums: Pair[Array]) -> Pair[Array]:
    """Return the gradients of static weights, (1, H·H/G, 1, 1), from `MatrixTensors.static` of all examples."""
    heads, groups = config.heads, config.groups

    def of_compose(x: Array) -> Array:
        by_input = jnp.sum(x, axis=(0, 3)).reshape(heads, -1)[:, :heads]
        grouped = by_input.reshape(groups, heads // groups, groups, heads // groups)
        return jnp.stack([grouped[g, :, g] for g in range(groups)]).reshape(1, -1, 1, 1)

    found: Pair[Array] = jax.tree.map(of_compose, sums)
    return found
