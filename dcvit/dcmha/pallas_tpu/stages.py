"""Unrolled strips of a tile: the schedule of the stages in the TPU kernels for blocks of interleaved examples.

A stage visits the strips of keys of one example. The products of a strip are issued some strips ahead of the vector
operations that need them, so that both units work at the same time. Other work, of this or a neighboring example, is
spread over the strips of a stage. Strips are unrolled: all addresses are static, and the compiler sees that the buffers
of two strips are different.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.pallas_tpu.call import Refs
from dcvit.dcmha.pallas_tpu.config import Index, KernelConfig
from dcvit.dcmha.pallas_tpu.tile import Products, Strip, Vectors
from dcvit.dcmha.shapes import Ref

Task: TypeAlias = Callable[[], None]

AHEAD = 2  # strips between a matrix product and the vector operations that need it
GROUP = 4  # strips whose sums are computed together


def run_all(tasks: Sequence[Task]) -> None:
    """Run tasks one after the other."""
    for task in tasks:
        task()


def run_stage(
    config: KernelConfig, mixed: Ref, products: Products, vectors: Vectors, tasks: Sequence[Task] = (),
    sums: Callable[[slice], None] | None = None,
) -> None:  # fmt: skip
    """Visit all strips of keys.

    Args:
      config: the sizes of strips.
      mixed: buffer of the results of `products`, see `ring`.
      products: matrix products of a strip, issued `AHEAD` strips ahead of its vector operations.
      vectors: vector operations of a strip.
      tasks: operations that are independent of the vector operations, and spread over the strips.
      sums: called with the keys of each group of strips.
    """
    count = config.block_k // config.strip
    done, spread = 0, max(count - AHEAD, 1)
    for n in range(-AHEAD, count):
        if n + AHEAD < count:
            products(strip(config, n + AHEAD), mixed.at[slot(n + AHEAD)])
        if n < 0:
            continue
        due = len(tasks) * min(n + 1, spread) // spread
        run_all(tasks[done:due])
        done = due
        vectors(strip(config, n), [mixed.at[slot(n), part] for part in range(2)])
        if sums and (n % GROUP == GROUP - 1 or n == count - 1):
            sums(slice((n - n % GROUP) * config.strip, (n + 1) * config.strip))


def strip(config: KernelConfig, n: int) -> Strip:
    """Return strip number `n`."""
    return Strip(n * config.strip, config.strip, (n + 1) * config.strip > config.keys, n)


def ring(config: KernelConfig) -> pl.MemoryRef:
    """Return a buffer for what products write for the strips in work, (slots, 2, heads·keys, Bq)."""
    shape = (AHEAD + 1, 2, config.heads * config.strip, config.block_q)
    found: pl.MemoryRef = pltpu.VMEM(shape, jnp.float32)
    return found


def slot(n: int) -> int:
    """Return the slot of a strip in a ring."""
    return n % (AHEAD + 1)


def mask_of(refs: Refs, e: Index) -> Ref | None:
    """Return the mask of example `e` of a block; one of several examples may be that of all."""
    mask = refs.get("mask")
    return mask if mask is None or mask.shape[0] == 1 else mask.at[pl.ds(e, 1)]
