"""Bodies of the forward GPU kernels. A sweep is a loop over all heads of a group.

    statistics   sweep 1: planes of the pre-compose;  sweep 2: maximum and sum of 2^L over the tile's keys
    weights      sweep 1: planes of the post-compose; sweep 2: composed weights W

L are the composed and masked scores in units of log 2. "Planes" are the hidden planes of a compose: its down projection
of the heads, queries × keys for each rank. `statistics` stores those of the pre-compose in global memory as float32,
and `weights` loads them. Without dynamic projections, there is no sweep for planes.
"""

from __future__ import annotations

import jax.numpy as jnp

from dcvit.dcmha.backends.gpu.block import Block, Planes
from dcvit.dcmha.backends.gpu.config import MIN_ROW_MAX
from dcvit.dcmha.backends.gpu.ring import Ring
from dcvit.dcmha.backends.gpu.staging import Staging
from dcvit.dcmha.backends.gpu.tile import Tile
from dcvit.dcmha.shapes import Array


def statistics(block: Block, ring: Ring, tile: Tile, staging: Staging) -> None:
    """Compute the maximum of the composed scores L, and the sum of 2^(L - maximum), for each query of a tile."""
    planes = block.zeros(block.config.pre.planes)
    if planes:
        planes = ring.sweep(lambda _, slot, x, planes: tile.down(slot, "pre", planes, x[0]), planes)
        block.save_planes(planes)

    def body(head: Array, slot: Array, products: list[Array], carry: tuple[()]) -> tuple[()]:
        logits = tile.logits(slot, planes, products[0])
        largest = jnp.maximum(jnp.max(logits, axis=1), MIN_ROW_MAX)
        total = jnp.sum(jnp.exp2(logits - block.broadcast(largest, 0)), axis=1)
        staging.reuse()
        staging.stage_rows([largest, total])
        staging.commit(head, row_sums=True)
        return carry

    ring.sweep(body, ())


def weights(block: Block, ring: Ring, tile: Tile, staging: Staging) -> None:
    """Compute the composed weights W of a tile."""
    pre = block.load_planes(0, block.config.pre.planes)
    post = block.zeros(block.config.post.planes)
    if post:

        def hidden(head: Array, slot: Array, products: list[Array], planes: Planes) -> Planes:
            return tile.down(slot, "post", planes, tile.probabilities(slot, pre, products[0]))

        post = ring.sweep(hidden, post)

    def body(head: Array, slot: Array, products: list[Array], carry: tuple[()]) -> tuple[()]:
        p = tile.probabilities(slot, pre, products[0])
        w = tile.up(slot, "post", post, p)
        staging.reuse()
        staging.stage_tile(w)
        staging.commit(head, tile=True)
        return carry

    ring.sweep(body, ())
