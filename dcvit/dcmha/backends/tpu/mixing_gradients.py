"""Gradients of key-wise and static weights from products of heads on the MXU.

The gradient of the matrix N of key s (`dcvit.dcmha.backends.tpu.mixing`) is dN_s[n, h] = Σ_t g_n[s, t]·a_h[s, t], for
output gradients g and inputs a. For a strip of Bs keys, the MXU computes g·aᵀ of the planes of all heads, stacked to
(heads·Bs, Bq); dN is on the diagonals of its Bs×Bs squares (n, h). `diagonals` packs them into registers: sublane
(n + s) mod 8, lane h·Bs + s. `matrix_gradients` moves them to planes with keys along lanes, rotated in this way, and
differentiates N = Σ_r k1[r, h]·k2[r, n] + δ_nh·kg[h] + static[h, n].
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, ComposeLayout, KernelConfig
from dcvit.dcmha.backends.tpu.mixing import transpose_blocks, width
from dcvit.dcmha.numerics import cdiv
from dcvit.dcmha.shapes import Array, Ref, not_none


def positions() -> tuple[Array, Array]:
    """Return the sublane and the lane of each element of a register."""
    shape = (SUBLANES, LANES)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def scratch(config: KernelConfig, blocks: int) -> pl.MemoryRef:
    """Return the buffer of the gradients of the matrices of one compose: the result of `diagonals` for each strip."""
    shape = (blocks, cdiv(config.heads, SUBLANES), SUBLANES, width(config))
    found: pl.MemoryRef = pltpu.VMEM(shape, jnp.float32)
    return found


def diagonals(config: KernelConfig, product: Array, out: Ref, *, add: bool = False) -> None:
    """Write, or `add`, the diagonals of Bs×Bs squares of `product`, (heads·Bs, heads·Bs), to `out`, (H/8, 8, H·Bs)."""
    keys, missing = config.strip, -product.shape[1] % LANES
    sublane, lane = positions()
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
    keys, per_group, (sublane, lane) = config.strip, config.heads // config.groups, positions()
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
                by_output = rotate_sublanes(plane, positions()[1], inverse=True)
                register = h * halves + half
                static[register] = static[register] + by_output if add_static else by_output


def _key_wise(config: KernelConfig, tensors: MatrixTensors, planes: list[Array], half: int, tile: int) -> None:
    """Write gradients of key-wise weights from `head_planes` of `half`; those of down projections sum over `half`."""
    layout, weights, out = tensors.layout, not_none(tensors.weights), not_none(tensors.out)
    heads, (sublane, lane) = config.heads, positions()
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


def static_gradients(config: KernelConfig, x: Array) -> Array:
    """Return the gradients of static weights, (1, H·H/G, 1, 1), from `MatrixTensors.static` of all examples."""
    heads, groups = config.heads, config.groups
    by_input = jnp.sum(x, axis=(0, 3)).reshape(heads, -1)[:, :heads]
    grouped = by_input.reshape(groups, heads // groups, groups, heads // groups)
    return jnp.stack([grouped[g, :, g] for g in range(groups)]).reshape(1, -1, 1, 1)
