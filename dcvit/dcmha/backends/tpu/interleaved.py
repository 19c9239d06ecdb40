"""Blocks of eight interleaved examples for the TPU kernels whose tile holds all scores of an example.

XLA keeps the activations of a Vision Transformer with the batch along sublanes, because the number of patches is
rarely a multiple of eight. These kernels read and write arrays in this layout, (T, B, C), without padding: any other
layout would cost a copy of every array, one row of a token at a time. The kernels get a view of such an array in the
order of its bytes, (T, B/8, C/128, 8, 128), so that a load with a stride fills a register with eight tokens of one
example.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, Index, IndexMap, KernelConfig
from dcvit.dcmha.backends.tpu.tile import dot
from dcvit.dcmha.numerics import total
from dcvit.dcmha.shapes import Array, Ref

TILE_ROWS = 16  # rows of a register of bfloat16
# The grid runs over blocks of examples; a block has all queries (T) and keys (S).
INDEX_MAPS: dict[str, IndexMap] = {"B": lambda b: b, "T": lambda b: 0, "S": lambda b: 0}


def view(x: Array) -> Array:
    """Return (T, B, C) as (T, B/8, C/128, 8, 128), which is the order of its bytes on a TPU, so that nothing moves."""
    tokens, batch, columns = x.shape
    return x.reshape(tokens, batch // SUBLANES, SUBLANES, columns // LANES, LANES).swapaxes(2, 3)


def unview(x: Array) -> Array:
    """Return (T, B, C) from (T, B/8, C/128, 8, 128): the inverse of `view`."""
    tokens, blocks, registers = x.shape[:3]
    return x.swapaxes(2, 3).reshape(tokens, blocks * SUBLANES, registers * LANES)


def tile(rows: int, columns: int, dtype: DTypeLike) -> pl.MemoryRef:
    """Return a VMEM buffer for the tokens of one example, (C/128, rows, 128)."""
    found: pl.MemoryRef = pltpu.VMEM((columns // LANES, rows, LANES), jnp.dtype(dtype))
    return found


def clear_rest(tile: Ref, tokens: int) -> None:
    """Fill the rows of a tile after its last token with zeros."""
    start = tokens // TILE_ROWS * TILE_ROWS
    if start < tile.shape[1]:
        tile[:, start:] = jnp.zeros((tile.shape[0], tile.shape[1] - start, LANES), tile.dtype)


def columns(tile: Ref, lanes: slice) -> Array:
    """Return the columns `lanes` of a `tile`, (rows, columns)."""
    parts = []
    for start in range(lanes.start - lanes.start % LANES, lanes.stop, LANES):
        some = slice(max(lanes.start - start, 0), min(lanes.stop - start, LANES))
        parts.append(tile[start // LANES, :, some])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def read(ref: Ref, e: Index, tile: Ref) -> None:
    """Copy the tokens of example `e` of a block to the first rows of a `tile`."""
    tokens, _, registers = ref.shape[:3]
    for n in range(registers):
        tile[n, :tokens] = _rows(ref)[_row(ref, n, e), :].astype(tile.dtype)


def write(ref: Ref, e: Index, lanes: slice, x: Array) -> None:
    """Copy the rows of `x`, without padding, to the columns `lanes` (multiples of 128) of example `e` of a block."""
    for start in range(lanes.start, lanes.stop, LANES):
        part = x[: ref.shape[0], start - lanes.start : start - lanes.start + LANES].astype(ref.dtype)
        _rows(ref)[_row(ref, start // LANES, e), :] = part


def query_products(
    config: KernelConfig, out: Ref, e: Index, tokens: Ref, planes: Ref, factor: float = 1.0
) -> list[Callable[[], None]]:
    """Return tasks that write Σ_s planes[s, t]·tokens[s] for each head and query t of example `e` to `out`.

    Args:
      config: the sizes.
      out: output or gradients of the queries.
      e: number of the example in the block.
      tokens: a tile of keys or values.
      planes: attention weights or gradients of the scores, see `dcvit.dcmha.backends.tpu.tile.operand_scratch`.
      factor: multiplies the result.
    """

    def part(heads: range) -> None:
        start = config.key_lanes(heads[0]).start
        rows = columns(tokens, slice(start, config.key_lanes(heads[-1]).stop)).T
        found = []
        for h in heads:
            lanes = config.key_lanes(h)
            x = rows[lanes.start - start : lanes.stop - start]
            found.append(dot(x, operand(planes, h), (1, 0)))
        lanes = slice(config.query_lanes(heads[0]).start, config.query_lanes(heads[-1]).stop)
        write(out, e, lanes, _scaled(jnp.concatenate(found, axis=0), factor).T)

    return [functools.partial(part, heads) for heads in _heads_of_registers(config, config.heads)]


def key_products(
    config: KernelConfig, out: Ref, e: Index, tokens: Ref, planes: Ref, factor: float = 1.0
) -> list[Callable[[], None]]:
    """Return tasks that write Σ_t planes[s, t]·tokens[t], also summed over the query heads of each key head, to `out`.

    The arguments are those of `query_products`, with a tile of queries or of output gradients as `tokens`.
    """
    shared = config.heads // config.key_heads

    def part(key_heads: range) -> None:
        start = config.query_lanes(key_heads[0] * shared).start
        rows = columns(tokens, slice(start, config.query_lanes((key_heads[-1] + 1) * shared - 1).stop)).T
        found = []
        for n in key_heads:
            terms = []
            for h in range(n * shared, (n + 1) * shared):
                lanes = config.query_lanes(h)
                x = rows[lanes.start - start : lanes.stop - start]
                terms.append(dot(x, operand(planes, h), (1, 1)))
            found.append(total(terms))
        lanes = slice(key_heads[0] * config.head_dim, (key_heads[-1] + 1) * config.head_dim)
        write(out, e, lanes, _scaled(jnp.concatenate(found, axis=0), factor).T)

    return [functools.partial(part, key_heads) for key_heads in _heads_of_registers(config, config.key_heads)]


def operand(planes: Ref, h: int) -> Array:
    """Return the plane of head `h`, (Bk, Bq), with all queries, so that a product fills an MXU of 256×256."""
    return jnp.concatenate([planes[h, n] for n in range(planes.shape[1])], axis=1)


def _heads_of_registers(config: KernelConfig, heads: int) -> list[range]:
    """Return the shortest runs of heads whose columns fill complete registers of 128 lanes."""
    heads_per_tile = math.lcm(config.head_dim, LANES) // config.head_dim
    return [range(first, min(first + heads_per_tile, heads)) for first in range(0, heads, heads_per_tile)]


def _scaled(x: Array, factor: float) -> Array:
    return x if factor == 1 else x * factor


def _rows(ref: Ref) -> Ref:
    """Return a block in the layout of `view` as rows of 128 lanes."""
    tokens, _, registers = ref.shape[:3]
    rows: Ref = ref.at[:, 0].reshape(tokens * registers * SUBLANES, LANES)
    return rows


def _row(ref: Ref, register: int, e: Index) -> slice | pl.Slice:
    """Return the rows in `_rows` of all tokens of example `e`, for the 128 columns of register number `register`."""
    tokens, _, registers = ref.shape[:3]
    return pl.ds(register * SUBLANES + e, tokens, stride=SUBLANES * registers)
