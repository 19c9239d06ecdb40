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
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dcvit.dcmha.backends.tpu.call import Blocked, Packed, vmem
from dcvit.dcmha.backends.tpu.config import LANES, Index, KernelConfig, Rows
from dcvit.dcmha.segments import Segments, blocks_in_common, first_and_last
from dcvit.dcmha.shapes import Array, Ref, not_none


class Strip(NamedTuple):
    """A run of neighboring keys of a tile: the unit of work of vector operations, and of one product per compose."""

    start: Index
    size: int
    may_pad: bool  # True if some rows of the strip may lie after the last key
    queries: slice  # of the tile: all for a product, those of `query_parts` for vector operations
    number: Index = 0  # index of the strip in the tile; the number of strips for a repetition of the last one

    @property
    def rows(self) -> Rows:
        return pl.ds(self.start, self.size)


# Operations of a stage on a strip. Matrix products run a few strips ahead of the vector operations and write their
# results to a buffer of two stacks of planes, (2, H·strip, Bq). The vector operations of that strip get both stacks.
Products: TypeAlias = Callable[[Strip, Ref], None]
Vectors: TypeAlias = Callable[[Strip, Sequence[Ref]], None]
Visible: TypeAlias = Callable[[Strip], "Array | None"]  # see `visible`


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


def query_parts(config: KernelConfig, strip: Strip) -> list[Strip]:
    """Return the parts of a strip that vector operations process: 128 queries, or all without composes."""
    size = LANES if config.pre or config.post or config.family == "interleaved" else config.block_q
    return [strip._replace(queries=slice(start, start + size)) for start in range(0, config.block_q, size)]


def planes(config: KernelConfig, ref: Ref, strip: Strip) -> StoredPlanes:
    """Return the planes of all heads of a strip from a tile (H, Bk, Bq)."""
    return StoredPlanes(lambda h: split(ref[h, strip.rows, strip.queries]), config.heads)


def stacked_planes(config: KernelConfig, buffer: Ref, queries: slice) -> StoredPlanes:
    """Return the planes of all heads from a buffer of stacked planes, (H·strip, Bq) or (strips, H·strip, Bq)."""
    if len(buffer.shape) == 2:
        return StoredPlanes(lambda h: split(buffer[strip_rows(config, h), queries]), config.heads)

    def load(h: int) -> Array:
        x = buffer[:, strip_rows(config, h), queries]
        return x.reshape(-1, 8, x.shape[2])

    return StoredPlanes(load, config.heads)


def save(heads: Iterable[Array], out: Ref, strip: Strip) -> None:
    """Write the planes of all heads of a strip to the tile `out`, (H, Bk, Bq)."""
    for h, x in enumerate(heads):
        out[h, strip.rows, strip.queries] = join(x).astype(out.dtype)


def save_operand(config: KernelConfig, heads: Iterable[Array], out: Ref, strip: Strip) -> None:
    """Write the planes of a strip for a later product: as `save`, or if interleaved to a buffer `operand_buffer`."""
    if config.family != "interleaved":
        save(heads, out, strip)
        return
    rows = stack(config, list(heads))
    for h in range(config.heads):
        out[h, strip.queries.start // LANES, strip.rows, :] = rows[strip_rows(config, h)]


def stack(config: KernelConfig, planes: Iterable[Array]) -> Array:
    """Return planes, (keys/8, 8, queries) each, stacked along keys, in `config.operand_dtype`."""
    return jnp.concatenate([join(x) for x in planes], axis=0).astype(config.operand_dtype)


def split(x: Array) -> Array:
    """Reshape (keys, Bq) to (keys/8, 8, Bq), which keeps the registers as they are."""
    return x.reshape(x.shape[0] // 8, 8, x.shape[1])


def join(x: Array) -> Array:
    """Reshape (keys/8, 8, Bq) to (keys, Bq), which keeps the registers as they are."""
    return x.reshape(x.shape[0] * 8, x.shape[2])


def broadcast_rows(rows: Ref, out: Ref) -> None:
    """Broadcast each row of (1, rows, Bq) over eight sublanes of `out`, (rows, 8, Bq)."""
    for c in range(out.shape[0]):
        out[c] = jnp.broadcast_to(rows[0, c : c + 1, :], out.shape[1:])


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Return the float32 product over axis `contract[0]` of `a` and `contract[1]` of `b`; float32 is not rounded."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def scores(config: KernelConfig, k: Ref, q: Ref, out: Ref) -> None:
    """Write the scores k_h·q_hᵀ of each head h to out[h]; with v and dO, the gradient of the composed weights."""
    for h in range(config.heads):
        out[h] = dot(k[0, : config.block_k, config.key_lanes(h)], q[0, config.query_lanes(h)], (1, 0))


def visible(config: KernelConfig, inputs: Packed[Ref], i: Index, j: Index) -> Visible:
    """Return the function from a strip of key block `j` and query block `i` to its mask, None if it is all True.

    The mask (keys/8, 8, queries) has the order of tokens, the last key, the mask of the call and the segment ids.
    """

    def of_strip(strip: Strip) -> Array | None:
        shape = _shape(strip)
        conditions: list[Array] = []
        if config.is_ordered or strip.may_pad:
            key = _key_positions(config, strip, j)
            if config.is_ordered:
                query = _query_positions(config, strip, i)
                conditions.append(key <= query)
                if config.window is not None:
                    conditions.append(key > query - config.window)
            if strip.may_pad:
                conditions.append(key < config.keys)
        if inputs.mask is not None:
            conditions.append(split(inputs.mask[0, strip.rows, strip.queries].astype(jnp.float32)) > 0.5)
        if inputs.ids_q is not None:
            ids = jnp.broadcast_to(inputs.ids_q[0, 0:1, strip.queries], shape[1:])[None]
            keys = not_none(inputs.ids_k)[0, strip.rows, :]
            conditions.append(split(jnp.concatenate([keys] * (shape[2] // LANES), axis=-1)) == ids)
        return functools.reduce(jnp.logical_and, conditions) if conditions else None

    return of_strip


def near(config: KernelConfig, i: Index, j: Index) -> Visible:
    """Return the function from a strip, as that of `visible`, to the mask of the pairs that are composed."""
    window = config.compose_window
    if window is None:
        return all_pairs

    def of_strip(strip: Strip) -> Array:
        return _key_positions(config, strip, j) > _query_positions(config, strip, i) - window

    return of_strip


def all_pairs(strip: Strip) -> None:
    """Return None: no pair of a strip is excluded, see `visible`."""


def _shape(strip: Strip) -> tuple[int, int, int]:
    return strip.size // 8, 8, strip.queries.stop - strip.queries.start


def _key_positions(config: KernelConfig, strip: Strip, j: Index) -> Array:
    """Return the position of the key of each pair of a strip of key block `j`."""
    shape = _shape(strip)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * 8 + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return row + (j * config.block_k + strip.start)


def _query_positions(config: KernelConfig, strip: Strip, i: Index) -> Array:
    """Return the position among the keys of the query of each pair of a strip of query block `i`."""
    first_query = i * config.block_q + (config.first_query + strip.queries.start)
    position: Array = jax.lax.broadcasted_iota(jnp.int32, _shape(strip), 2) + first_query
    return position


def needed_blocks(config: KernelConfig, inputs: Packed[Blocked], *, of_keys: bool = False) -> Array | None:
    """Return the first and the last key block that each query block needs, or None without segments.

    The array is flat: two numbers for each query block of each example. With `of_keys`, it has the first and the last
    query block that each key block needs.
    """
    if inputs.ids_q is None or inputs.ids_k is None:
        return None
    ids = Segments(jnp.asarray(inputs.ids_q.array)[:, 0], jnp.asarray(inputs.ids_k.array)[:, :, 0])
    needed = blocks_in_common(ids, config.block_q, config.block_k)
    found = first_and_last(needed.swapaxes(1, 2) if of_keys else needed)
    return jnp.stack(found, axis=-1).ravel()


def nearest_needed(needed: Sequence[Ref], place: Index, block: Index) -> Index:
    """Return `block`, or the nearest needed block, so that blocks that are not needed are never fetched.

    Args:
      needed: the reference to the array of `needed_blocks`; empty without segments.
      place: index of the block of the other side (queries for key blocks) among those of all examples.
      block: index of the block in its example.
    """
    return jnp.clip(block, needed[0][2 * place], needed[0][2 * place + 1]) if needed else block


def is_needed(needed: Ref | None, place: Index, block: Index) -> Array | bool:
    """Return True if a block is needed, see `nearest_needed` for `place` and `block`; True without segments."""
    return True if needed is None else (needed[2 * place] <= block) & (block <= needed[2 * place + 1])


# A schedule of the stages of a tile (`dcvit.dcmha.backends.tpu.stages`) for one example in tiles: a loop over strips.


def mixed_buffer(config: KernelConfig) -> pl.MemoryRef:
    """Return the buffers of `over_strips`: two planes of all heads for each strip of two steps."""
    return vmem((2, config.strips_per_step, 2, config.heads * config.strip, config.block_q))


def over_strips(
    config: KernelConfig, buffers: Ref, vectors: Vectors, products: Products,
    overlapped: Callable[[Array], None] | None = None,
) -> None:  # fmt: skip
    """Call products(strip, buffer) for the strips of a tile, one step ahead of vectors(strips of a step, buffers).

    The MXU thus mixes the heads of the next strips while the VPU works on the current ones. Two steps are unrolled,
    each with its own buffers, because the compiler assumes that buffers alias if a traced index selects them. After the
    last step, `products` runs once more for the strips of that step, and the result is not used: a tile of 16 strips in
    steps of two has 18 products.

    `overlapped` is called with the index of each step while its products are in flight; it must not read what the step
    writes.
    """
    steps = config.block_k // config.strip // config.strips_per_step

    def compute(i: Index, half: int) -> None:
        for n, strip in enumerate(_strips_of(config, i, steps)):
            products(strip, buffers.at[half, n])

    def two_steps(pair: Array, _: None) -> None:
        for half in range(2):
            i = 2 * pair + half
            compute(i + 1, 1 - half)
            if overlapped:
                overlapped(i)
            strips = _strips_of(config, i, steps)
            size = len(strips) * config.strip
            start = pl.multiple_of(jnp.asarray(strips[0].start), size)
            all_strips = Strip(start, size, any(strip.may_pad for strip in strips), strips[0].queries)
            vectors(all_strips, [buffers.at[half, :, plane] for plane in range(buffers.shape[2])])

    compute(0, 0)
    jax.lax.fori_loop(0, steps // 2, two_steps, None)


def _strips_of(config: KernelConfig, i: Index, steps: int) -> list[Strip]:
    """Return the strips of step `i`; a step after the last one has the strips of the last one."""
    last_block_keys = config.keys - (config.blocks_k - 1) * config.block_k
    unroll, last, found = config.strips_per_step, steps - 1, []
    for n in range(unroll):
        start = pl.multiple_of((jnp.minimum(i, last) * unroll + n) * config.strip, config.strip)
        may_pad = (last * unroll + n + 1) * config.strip > last_block_keys
        number = jnp.minimum(i * unroll + n, config.block_k // config.strip)
        found.append(Strip(start, config.strip, may_pad, slice(0, config.block_q), number))
    return found
