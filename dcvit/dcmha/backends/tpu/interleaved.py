"""Layout and schedule of blocks of eight interleaved examples, for kernels whose tile holds all scores of an example.

XLA keeps the activations of a Vision Transformer with the batch along sublanes, because the number of patches is
rarely a multiple of eight. These kernels read and write arrays in this layout, (T, B, C), without padding: any other
layout would cost a copy of every array, one row of a token at a time. The kernels get a view of such an array in the
order of its bytes, (T, B/8, C/128, 8, 128), so that a load with a stride fills a register with eight tokens of one
example.

The strips of an example are unrolled (`run_stage`): all addresses are static, and the compiler sees that the buffers of
two strips are different. The products of a strip are issued `AHEAD` strips before the vector operations that need them,
so that MXU and VPU work at the same time. Other work, of this or a neighboring example, is spread over the strips.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from dcvit.dcmha.backends.tpu.call import Packed, vmem
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, Index, IndexMap, KernelConfig
from dcvit.dcmha.backends.tpu.tile import Products, Strip, Vectors, dot
from dcvit.dcmha.numerics import round_up, total
from dcvit.dcmha.shapes import Array, Ref

Task: TypeAlias = Callable[[], None]

TILE_ROWS = 16  # rows of a register of bfloat16
AHEAD = 2  # strips between a matrix product and the vector operations that need it
GROUP = 4  # strips whose sums are computed together
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
    return vmem((columns // LANES, rows, LANES), dtype)


def operand_buffer(config: KernelConfig) -> pl.MemoryRef:
    """Return a buffer for the planes of an example, (H, Bq/128, Bk, 128), that matrix products read."""
    return vmem((config.heads, config.block_q // LANES, config.block_k, LANES), config.operand_dtype)


def mixed_buffer(config: KernelConfig) -> pl.MemoryRef:
    """Return a ring buffer for the results of `run_stage`'s products, (AHEAD + 1, 2, heads·keys, Bq)."""
    return vmem((AHEAD + 1, 2, config.heads * config.strip, config.block_q))


def tile_buffers(config: KernelConfig, columns: int, *, backward: bool = False) -> Packed[pl.MemoryRef]:
    """Return buffers for the tokens of one example and for its `columns` of weights."""
    queries = tile(config.block_q, config.heads * config.head_dim, config.operand_dtype)
    keys = tile(config.block_k, config.key_heads * config.head_dim, config.operand_dtype)
    rows = max(config.block_q, round_up(config.block_k, LANES))
    weights = tile(rows, columns, jnp.float32) if columns else None
    return Packed(queries, keys, keys, weights=weights, d_out=queries if backward else None)


def clear_rest(tiles: Packed[Ref], inputs: Packed[Ref]) -> None:
    """Fill the rows of each tile after its last token with zeros."""
    for tile, block in (
        (tiles.q, inputs.q), (tiles.k, inputs.k), (tiles.v, inputs.v), (tiles.d_out, inputs.d_out),
        (tiles.weights, inputs.weights),
    ):  # fmt: skip
        if tile is not None and block is not None:
            start = block.shape[0] // TILE_ROWS * TILE_ROWS
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
) -> list[Task]:
    """Return tasks that write Σ_s planes[s, t]·tokens[s] for each head and query t of example `e` to `out`.

    Args:
      config: the sizes.
      out: output or gradients of the queries.
      e: number of the example in the block.
      tokens: a tile of keys or values.
      planes: attention weights or gradients of the scores, see `operand_buffer`.
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


def key_products(config: KernelConfig, out: Ref, e: Index, tokens: Ref, planes: Ref, factor: float = 1.0) -> list[Task]:
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


def score_tasks(config: KernelConfig, out: Ref, keys: Ref, queries: Ref) -> list[Task]:
    """Return tasks that write the products of the tiles of tokens `keys` and `queries`, (Bk, Bq), of each head."""

    def product(h: int) -> None:
        out[h] = dot(columns(keys, config.key_lanes(h)), columns(queries, config.query_lanes(h)), (1, 1))

    return [functools.partial(product, h) for h in range(config.heads)]


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


def run_all(tasks: Sequence[Task]) -> None:
    """Call each task, in order."""
    for task in tasks:
        task()


def run_stage(
    config: KernelConfig, mixed: Ref, products: Products, vectors: Vectors, tasks: Sequence[Task] = (),
    sums: Callable[[slice], None] | None = None,
) -> None:  # fmt: skip
    """Run one stage of an interleaved example, with its strips of keys unrolled.

    Args:
      config: the sizes of strips.
      mixed: buffer of the results of `products`, see `mixed_buffer`.
      products: matrix products of a strip, issued `AHEAD` strips ahead of its vector operations.
      vectors: vector operations of a strip.
      tasks: operations that are independent of the vector operations, spread evenly over the strips.
      sums: called after every `GROUP` strips, with the slice of their keys.
    """
    count = config.block_k // config.strip
    done, spread = 0, max(count - AHEAD, 1)
    for n in range(-AHEAD, count):
        if n + AHEAD < count:
            products(_strip(config, n + AHEAD), mixed.at[(n + AHEAD) % (AHEAD + 1)])
        if n < 0:
            continue
        due = len(tasks) * min(n + 1, spread) // spread
        run_all(tasks[done:due])
        done = due
        vectors(_strip(config, n), [mixed.at[n % (AHEAD + 1), part] for part in range(2)])
        if sums and (n % GROUP == GROUP - 1 or n == count - 1):
            sums(slice((n - n % GROUP) * config.strip, (n + 1) * config.strip))


def _strip(config: KernelConfig, n: int) -> Strip:
    """Return strip number `n` of a tile that holds all keys, with a static start."""
    may_pad = (n + 1) * config.strip > config.keys
    return Strip(n * config.strip, config.strip, may_pad, slice(0, config.block_q), n)


def inputs_of(inputs: Packed[Ref], e: Index) -> Packed[Ref]:
    """Return the inputs with the mask of example `e` of a block; examples may share one mask."""
    mask = inputs.mask
    return inputs if mask is None or mask.shape[0] == 1 else dataclasses.replace(inputs, mask=mask.at[pl.ds(e, 1)])
