"""Stages of the TPU kernels that keep all scores of an example in VMEM, and their operations on a block of keys.

A stage visits the blocks of `strip` keys. The matrix product that mixes the heads of a block
(`dcvit.dcmha.pallas_tpu.mixing`) is issued some blocks ahead of the vector operations that need it, so that both units
work at the same time. Other matrix products, of this or a neighboring example, are spread over the blocks of a stage.
Blocks are unrolled: all addresses are static, and the compiler sees that the buffers of two blocks are different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.pallas_tpu import mixing
from dcvit.dcmha.pallas_tpu.call import Refs
from dcvit.dcmha.pallas_tpu.config import LANES, ComposeName, KernelConfig
from dcvit.dcmha.pallas_tpu.strips import Strip, stack, visible
from dcvit.dcmha.pallas_tpu.tile import StoredPlanes, StripCompose, dot, join, split
from dcvit.dcmha.shapes import Array, Ref

Task: TypeAlias = Callable[[], None]
OnBlock: TypeAlias = Callable[[int], None]

AHEAD = 2  # blocks of keys between a matrix product and the vector operations that need it
GROUP = 4  # blocks of keys whose sums are computed together


def run_all(work: Sequence[Task]) -> None:
    """Perform all work, one after the other."""
    for some in work:
        some()


def run_stage(
    config: KernelConfig, products: OnBlock, vectors: OnBlock, work: Sequence[Task] = (),
    sums: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
    """Visit all blocks of keys.

    Args:
      config: the sizes of blocks.
      products: matrix products of block b, issued `AHEAD` blocks ahead of its vector operations.
      vectors: vector operations of block b.
      work: operations that are independent of the vector operations, and spread over the blocks.
      sums: called as sums(b, n) after each group of n blocks from b.
    """
    blocks = config.block_k // config.strip
    done, spread = 0, max(blocks - AHEAD, 1)
    for b in range(-AHEAD, blocks):
        if b + AHEAD < blocks:
            products(b + AHEAD)
        if b < 0:
            continue
        due = len(work) * min(b + 1, spread) // spread
        run_all(work[done:due])
        done = due
        vectors(b)
        if sums and (b % GROUP == GROUP - 1 or b == blocks - 1):
            sums(b - b % GROUP, b % GROUP + 1)


def ring(config: KernelConfig) -> pl.MemoryRef:
    """Return a buffer for the planes of all heads of the blocks in work, (slots, heads·keys, Bq)."""
    shape = (AHEAD + 1, config.heads * config.strip, config.block_q)
    found: pl.MemoryRef = pltpu.VMEM(shape, jnp.float32)
    return found


def slot(b: int) -> int:
    """Return the slot of a block in a ring."""
    return b % (AHEAD + 1)


def keys_of(config: KernelConfig, b: int, count: int = 1) -> slice:
    """Return the keys of `count` blocks."""
    return slice(b * config.strip, (b + count) * config.strip)


def queries_of(config: KernelConfig) -> list[slice]:
    """Return the queries of each register along lanes."""
    return [slice(start, start + LANES) for start in range(0, config.block_q, LANES)]


def planes(config: KernelConfig, ref: Ref, b: int, queries: slice) -> StoredPlanes:
    """Return the planes of all heads in a block of keys."""
    return StoredPlanes(lambda h: split(ref[h, keys_of(config, b), queries]), config.heads)


def ring_planes(config: KernelConfig, ref: Ref, b: int, queries: slice) -> StoredPlanes:
    """Return the planes of all heads from a ring."""
    return StoredPlanes(lambda h: split(ref[slot(b), keys_of(config, h), queries]), config.heads)


def operand_scratch(config: KernelConfig) -> pl.MemoryRef:
    """Return a buffer for planes as operands of products, (H, Bq/128, Bk, 128), in complete registers."""
    shape = (config.heads, config.block_q // LANES, config.block_k, LANES)
    found: pl.MemoryRef = pltpu.VMEM(shape, config.operand_dtype)
    return found


def save_operand(config: KernelConfig, some: Sequence[Array], out: Ref, b: int, queries: slice) -> None:
    """Write the planes of a block, rounded together, to such a buffer."""
    rows = stack(config, some)
    for h in range(config.heads):
        out[h, queries.start // LANES, keys_of(config, b), :] = rows[keys_of(config, h)]


def save(config: KernelConfig, some: Sequence[Array], out: Ref, b: int, queries: slice) -> None:
    """Write the planes of a block."""
    for h, x in enumerate(some):
        out[h, keys_of(config, b), queries] = join(x)


def key_wise_product(
    config: KernelConfig, refs: Refs, matrices: Ref | None, some: Sequence[Array], out: Ref, b: int, queries: slice
) -> None:
    """Write the key-wise part of a compose of `some` planes to a ring, if there is one."""
    if matrices is not None:
        matrix = mixing.block(config, matrices, refs["diagonal"], b)
        out[slot(b), :, queries] = dot(matrix, stack(config, some), (1, 0))


def query_compose(
    config: KernelConfig, refs: Refs, compose_name: ComposeName, wq: Ref | None, queries: slice
) -> StripCompose | None:
    """Return the query-wise branch and the skip connection of a compose for some queries; None without a compose."""
    layout = config.pre if compose_name == "pre" else config.post
    if layout is None:
        return None
    n = queries.start // LANES
    return StripCompose(config, layout.query_only(), None if wq is None else wq.at[:, n : n + 1])


def add_mixed(
    config: KernelConfig, matrices: Ref | None, some: Iterable[Array], mixed: Ref, b: int, queries: slice
) -> list[Array]:
    """Return planes with their key-wise part, if there is one."""
    if matrices is None:
        return list(some)
    return [x + y for x, y in zip(some, ring_planes(config, mixed, b, queries), strict=True)]


def visible_keys(config: KernelConfig, mask: Ref | None, b: int, queries: slice) -> Array | None:
    """Return which keys of a block some queries attend to, see `visible`."""
    keys = keys_of(config, b)
    return visible(config, 0, 0, Strip(keys.start, config.strip, keys.stop > config.keys), mask, queries)
