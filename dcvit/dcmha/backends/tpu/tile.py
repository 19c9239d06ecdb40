"""Operations of the TPU kernels on one tile of scores: H planes of Bk keys by Bq queries in VMEM.

Keys lie along sublanes and queries along lanes. With this layout a query-wise weight is a row, and a load broadcasts a
row over sublanes at no cost. Row statistics are sums of complete registers. Matrix products use the planes of a tile
without a transposition; tokens, which are far smaller than planes, are transposed instead. Key-wise weights would have
to be broadcast over lanes; the MXU multiplies by them instead (`dcvit.dcmha.backends.tpu.mixing`).

Vector operations run over strips of a few keys, so that the H planes of a strip stay close to the registers. A plane of
a strip has the shape (keys/8, 8, Bq). Loops over heads, ranks and groups are unrolled.

The segment ids of queries are a row, those of keys are repeated over the lanes of a register, so that both are compared
without a broadcast over lanes. A kernel also gets, for each block of one side, the first and the last block of the
other side that may have an id in common with it (`needed_blocks`). It neither fetches nor computes the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.backends.tpu.call import Blocked, Refs
from dcvit.dcmha.backends.tpu.config import LANES, Index, KernelConfig, Rows
from dcvit.dcmha.segments import Segments, blocks_in_common, first_and_last
from dcvit.dcmha.shapes import Array, Ref

NEEDED = "needed"  # the name of the numbers of `needed_blocks`


class Strip(NamedTuple):
    """A run of neighboring keys of a tile: the unit of work of vector operations, and of one product per compose."""

    start: Index
    size: int
    may_pad: bool  # True if some rows of the strip may lie after the last key
    number: Index = 0  # index of the strip in the tile; the number of strips for a repetition of the last one

    @property
    def rows(self) -> Rows:
        return pl.ds(self.start, self.size)


# Operations of a stage on a strip. Matrix products run a few strips ahead of the vector operations and write their
# results to a buffer of two stacks of planes, (2, H·strip, Bq). The vector operations of that strip get both stacks.
Products: TypeAlias = Callable[[Strip, Ref], None]
Vectors: TypeAlias = Callable[[Strip, Sequence[Ref]], None]
Visible: TypeAlias = Callable[[Strip, slice], "Array | None"]  # see `visible`; from a strip and a slice of queries


class StoredPlanes(Sequence[Array]):
    """Planes (keys × queries) of all heads, each loaded from VMEM when it is indexed, which takes fewer registers."""

    def __init__(self, load: Callable[[int], Array], heads: int):
        self.load, self.heads = load, heads

    def __getitem__(self, h: int) -> Array:  # type: ignore[override]
        if h >= self.heads:
            raise IndexError
        return self.load(h)

    def __len__(self) -> int:
        return self.heads


def strip_rows(config: KernelConfig, h: int) -> slice:
    """Return the rows of head `h` in the planes of a strip, stacked to (H·strip, Bq)."""
    return slice(h * config.strip, (h + 1) * config.strip)


def query_slices(config: KernelConfig) -> list[slice]:
    """Return slices of the queries of a tile, in which vector operations process them: 128, or all without composes."""
    size = LANES if config.pre or config.post or config.family == "interleaved" else config.block_q
    return [slice(start, start + size) for start in range(0, config.block_q, size)]


def planes(config: KernelConfig, ref: Ref, strip: Strip, queries: slice) -> StoredPlanes:
    """Return the planes of all heads, for a strip and a slice of queries, from a tile (H, Bk, Bq)."""
    return StoredPlanes(lambda h: split(ref[h, strip.rows, queries]), config.heads)


def planes_of_all_queries(config: KernelConfig, ref: Ref, strip: Strip) -> StoredPlanes:
    """Return the planes of all heads, for a strip and all queries of the tile."""
    return planes(config, ref, strip, slice(0, config.block_q))


def save(heads: Iterable[Array], out: Ref, strip: Strip, queries: slice) -> None:
    """Write the planes of all heads, for a strip and a slice of queries, to the tile `out`, (H, Bk, Bq)."""
    for h, x in enumerate(heads):
        out[h, strip.rows, queries] = join(x).astype(out.dtype)


def save_operand(config: KernelConfig, heads: Iterable[Array], out: Ref, strip: Strip, queries: slice) -> None:
    """Write the planes of all heads for a later product: as `save`, or if interleaved to a buffer `operand_scratch`."""
    if config.family != "interleaved":
        save(heads, out, strip, queries)
        return
    rows = stack(config, list(heads))
    for h in range(config.heads):
        out[h, queries.start // LANES, strip.rows, :] = rows[strip_rows(config, h)]


def operand_scratch(config: KernelConfig) -> pl.MemoryRef:
    """Return a buffer for the planes of an example, (H, Bq/128, Bk, 128), that matrix products read."""
    shape = (config.heads, config.block_q // LANES, config.block_k, LANES)
    found: pl.MemoryRef = pltpu.VMEM(shape, config.operand_dtype)
    return found


def stack(config: KernelConfig, planes: Sequence[Array]) -> Array:
    """Return planes, (keys/8, 8, queries) each, stacked along keys, in `config.operand_dtype`."""
    return jnp.concatenate([join(x) for x in planes], axis=0).astype(config.operand_dtype)


def split(x: Array) -> Array:
    """Reshape (keys, Bq) to (keys/8, 8, Bq), which keeps the registers as they are."""
    return x.reshape(x.shape[0] // 8, 8, x.shape[1])


def join(x: Array) -> Array:
    """Reshape (keys/8, 8, Bq) to (keys, Bq), which keeps the registers as they are."""
    return x.reshape(x.shape[0] * 8, x.shape[2])


def broadcast_rows(rows: Ref, out: Ref, count: int, block: int) -> None:
    """Broadcast each row of (1, `count`, `block`) over eight sublanes of `out`."""
    for c in range(count):
        out[c] = jnp.broadcast_to(rows[0, c : c + 1, :], (8, block))


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Return the float32 product over axis `contract[0]` of `a` and `contract[1]` of `b`; float32 is not rounded."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def scores(config: KernelConfig, k: Ref, q: Ref, out: Ref) -> None:
    """Write the scores k_h·q_hᵀ of each head h to out[h]; with v and dO, the gradient of the composed weights."""
    for h in range(config.heads):
        out[h] = dot(k[0, : config.block_k, config.key_lanes(h)], q[0, config.query_lanes(h)], (1, 0))


def visible(config: KernelConfig, i: Index, j: Index, mask: Ref | None, strip: Strip, queries: slice) -> Array | None:
    """Return the mask of a strip of key block `j` and queries of block `i`, (keys/8, 8, queries); None if all True."""
    shape = (strip.size // 8, 8, queries.stop - queries.start)
    conditions: list[Array] = []
    if config.is_ordered or strip.may_pad:
        row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * 8 + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        key = row + (j * config.block_k + strip.start)
        if config.is_ordered:
            first_query = i * config.block_q + (config.first_query + queries.start)
            query = jax.lax.broadcasted_iota(jnp.int32, shape, 2) + first_query
            conditions.append(key <= query)
            if config.window is not None:
                conditions.append(key > query - config.window)
        if strip.may_pad:
            conditions.append(key < config.keys)
    if mask is not None:
        conditions.append(split(mask[0, strip.rows, queries].astype(jnp.float32)) > 0.5)
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def needed_blocks(config: KernelConfig, inputs: Mapping[str, Blocked], *, of_keys: bool = False) -> dict[str, Array]:
    """Return, by the name `NEEDED`, the first and the last key block that each query block needs.

    The array is flat: two numbers for each query block of each example. With `of_keys`, it has the first and the last
    query block that each key block needs. Without segments, the result is empty.
    """
    if "ids_q" not in inputs:
        return {}
    ids = Segments(jnp.asarray(inputs["ids_q"].array)[:, 0], jnp.asarray(inputs["ids_k"].array)[:, :, 0])
    needed = blocks_in_common(ids, config.block_q, config.block_k)
    found = first_and_last(needed.swapaxes(1, 2) if of_keys else needed)
    return {NEEDED: jnp.stack(found, axis=-1).ravel()}


def nearest_needed(needed: Sequence[Ref], place: Index, block: Index) -> Index:
    """Return `block`, or the nearest needed block, so that blocks that are not needed are never fetched.

    Args:
      needed: the reference to the array of `needed_blocks`; empty without segments.
      place: index of the block of the other side (queries for key blocks) among those of all examples.
      block: index of the block in its example.
    """
    return jnp.clip(block, needed[0][2 * place], needed[0][2 * place + 1]) if needed else block


def is_needed(refs: Refs, place: Index, block: Index) -> Array | bool:
    """Return True if a block is needed, see `nearest_needed` for `place` and `block`; True without segments."""
    if NEEDED not in refs:
        return True
    needed = refs[NEEDED]
    return (needed[2 * place] <= block) & (block <= needed[2 * place + 1])


def visible_with_segments(config: KernelConfig, refs: Refs, i: Index, j: Index) -> Visible:
    """Return the function from a strip and a slice of queries to their mask: that of `visible`, and equal ids."""

    def of_strip(strip: Strip, queries: slice) -> Array | None:
        found = visible(config, i, j, refs.get("mask"), strip, queries)
        if "ids_q" not in refs:
            return found
        same = have_same_ids(refs, strip, queries)
        return same if found is None else found & same

    return of_strip


def have_same_ids(refs: Refs, strip: Strip, queries: slice) -> Array:
    """Return the mask (keys/8, 8, queries) that is True where a key of a strip and a query have the same id."""
    width = queries.stop - queries.start
    row = jnp.broadcast_to(refs["ids_q"][0, 0:1, queries], (8, width))[None]
    keys = refs["ids_k"][0, strip.rows, :]
    return split(jnp.concatenate([keys] * (width // LANES), axis=-1)) == row
