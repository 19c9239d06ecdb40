"""Schedules of the stages of a tile, strip by strip; a strip is a run of neighboring keys.

The stages are in `forward_stages` and `backward_stages`. Kernels for one example run them in loops (`over_strips`).

Kernels for blocks of interleaved examples unroll the strips of an example (`run_stage`): all addresses are static, and
the compiler sees that the buffers of two strips are different. The products of a strip are issued `AHEAD` strips before
the vector operations that need them, so that MXU and VPU work at the same time. Other work, of this or a neighboring
example, is spread over the strips of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.backends.tpu import mixing
from dcvit.dcmha.backends.tpu.call import Refs
from dcvit.dcmha.backends.tpu.config import Index, KernelConfig
from dcvit.dcmha.backends.tpu.tile import Products, Strip, Vectors
from dcvit.dcmha.shapes import Array, Ref

Task: TypeAlias = Callable[[], None]

AHEAD = 2  # strips between a matrix product and the vector operations that need it
GROUP = 4  # strips whose sums are computed together


def steps(config: KernelConfig) -> int:
    """Return the number of steps, of `config.strips_per_step` strips each, in which a loop processes a tile."""
    return config.block_k // config.strip // config.strips_per_step


def strips_of(config: KernelConfig, i: Index) -> list[Strip]:
    """Return the strips of step `i`; a step after the last one has the strips of the last one."""
    last_block_keys = config.keys - (config.blocks_k - 1) * config.block_k
    unroll, last, found = config.strips_per_step, steps(config) - 1, []
    for n in range(unroll):
        start = pl.multiple_of((jnp.minimum(i, last) * unroll + n) * config.strip, config.strip)
        may_pad = (last * unroll + n + 1) * config.strip > last_block_keys
        number = jnp.minimum(i * unroll + n, config.block_k // config.strip)
        found.append(Strip(start, config.strip, may_pad, number))
    return found


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

    def compute(i: Index, half: int) -> None:
        for n, strip in enumerate(strips_of(config, i)):
            products(strip, buffers.at[half, n])

    def two_steps(pair: Array, _: None) -> None:
        for half in range(2):
            i = 2 * pair + half
            compute(i + 1, 1 - half)
            if overlapped:
                overlapped(i)
            strips = strips_of(config, i)
            size = len(strips) * config.strip
            start = pl.multiple_of(jnp.asarray(strips[0].start), size)
            strips_of_step = Strip(start, size, any(strip.may_pad for strip in strips))
            vectors(strips_of_step, [buffers.at[half, :, plane] for plane in range(buffers.shape[2])])

    compute(0, 0)
    jax.lax.fori_loop(0, steps(config) // 2, two_steps, None)


def mixed_scratch(config: KernelConfig) -> dict[str, pl.MemoryRef]:
    """Return the buffers of `over_strips` by name: two planes of all heads for each strip of two steps."""
    shape = (2, config.strips_per_step, 2, config.heads * config.strip, config.block_q)
    return {"mixed": pltpu.VMEM(shape, jnp.float32), "diagonal": mixing.diagonal_scratch()}


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
      mixed: buffer of the results of `products`, see `ring`.
      products: matrix products of a strip, issued `AHEAD` strips ahead of its vector operations.
      vectors: vector operations of a strip.
      tasks: operations that are independent of the vector operations, spread evenly over the strips.
      sums: called after every `GROUP` strips, with the slice of their keys.
    """
    count = config.block_k // config.strip
    done, spread = 0, max(count - AHEAD, 1)
    for n in range(-AHEAD, count):
        if n + AHEAD < count:
            products(unrolled_strip(config, n + AHEAD), mixed.at[slot(n + AHEAD)])
        if n < 0:
            continue
        due = len(tasks) * min(n + 1, spread) // spread
        run_all(tasks[done:due])
        done = due
        vectors(unrolled_strip(config, n), [mixed.at[slot(n), part] for part in range(2)])
        if sums and (n % GROUP == GROUP - 1 or n == count - 1):
            sums(slice((n - n % GROUP) * config.strip, (n + 1) * config.strip))


def unrolled_strip(config: KernelConfig, n: int) -> Strip:
    """Return strip number `n` of a tile that holds all keys, with a static start."""
    return Strip(n * config.strip, config.strip, (n + 1) * config.strip > config.keys, n)


def ring(config: KernelConfig) -> pl.MemoryRef:
    """Return a ring buffer for the results of `run_stage`'s products, (AHEAD + 1, 2, heads·keys, Bq)."""
    shape = (AHEAD + 1, 2, config.heads * config.strip, config.block_q)
    found: pl.MemoryRef = pltpu.VMEM(shape, jnp.float32)
    return found


def slot(n: int) -> int:
    """Return the index of strip `n` in the buffer of `ring`."""
    return n % (AHEAD + 1)


def mask_of(refs: Refs, e: Index) -> Ref | None:
    """Return the mask of example `e` of a block, or the only mask if all examples share it; None without masks."""
    mask = refs.get("mask")
    return mask if mask is None or mask.shape[0] == 1 else mask.at[pl.ds(e, 1)]
