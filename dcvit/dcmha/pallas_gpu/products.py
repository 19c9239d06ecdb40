"""Matrix products of the two sides of a pair on the tensor cores: q·k and dO·v of one head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dcvit.dcmha.pallas_gpu.block import Block
from dcvit.dcmha.shapes import Array, Ref

Result = TypeVar("Result")


def product(block: Block, slot: Array, pair: int) -> Array:
    """Return q·k (pair 0) or dO·v (pair 1) of one head: 64 queries × keys, float32."""
    if block.config.without_layouts:
        left, right = (side.at[slot] for side in block.scratch.scores[pair])
        own = [
            (left[a].astype(jnp.float32), right[b, block.own_keys].astype(jnp.float32)) for a, b in block.config.terms
        ]
        return sum((jnp.dot(a, b.T) for a, b in own), jnp.zeros(block.config.tile, jnp.float32))

    def multiply(accumulator: Ref) -> Array:
        start_product(block, accumulator, slot, pair)
        return accumulator[...]

    out: Array = pl.run_scoped(multiply, plgpu.ACC(block.config.tile, jnp.float32))
    return out


def start_product(block: Block, accumulator: Ref, slot: Array, pair: int) -> None:
    """Start the computation of `product`."""
    left, right = (side.at[slot] for side in block.scratch.scores[pair])
    for a, b in block.config.terms:
        keys = right.at[b, block.own_keys].transpose((1, 0))
        plgpu.wgmma(accumulator, left.at[a], keys)  # type: ignore[arg-type]


def products_during(
    block: Block, slot: Array, pairs: Sequence[int], work: Callable[[], Result]
) -> tuple[list[Array], Result]:
    """Return the products of some pairs of one head, and work(), which runs at the same time."""
    if block.config.without_layouts or not pairs:
        return [product(block, slot, pair) for pair in pairs], work()

    def both(*accumulators: Ref) -> tuple[list[Array], Result]:
        for pair, accumulator in zip(pairs, accumulators, strict=True):
            start_product(block, accumulator, slot, pair)
        out = work()
        return [accumulator[...] for accumulator in accumulators], out

    out: tuple[list[Array], Result] = pl.run_scoped(both, *[plgpu.ACC(block.config.tile, jnp.float32)] * len(pairs))
    return out
