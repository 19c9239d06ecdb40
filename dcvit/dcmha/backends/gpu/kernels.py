"""Bodies of the GPU kernels. A sweep is a loop over all heads of a group.

    statistics   sweep 1: planes of the pre-compose
                 sweep 2: maximum and sum of 2^L over the tile's keys
    weights      sweep 1: planes of the post-compose
                 sweep 2: composed weights W
    post_grad    sweep 1: planes of the pre-compose
                 sweep 2: planes of the post-compose and of its transpose
                 sweep 3: W, sums of P∘dP (partial sums of delta), gradients of the post-compose's weights
    pre_grad     sweep 1: planes of the transposed pre-compose
                 sweep 2: dS, gradients of the pre-compose's weights

L are the composed and masked scores in units of log 2, P the attention weights before the post-compose, W those after
it. "Planes" are the hidden planes of a compose: its down projection of the heads, queries × keys for each rank. The
first kernel of a pass, `statistics` or `post_grad`, stores planes in global memory as float32, and the second loads
them: those of the pre-compose, in gradients also those of the transposed post-compose. A compose without dynamic
projections has no planes, and the sweep for them is skipped.
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


def post_grad(block: Block, ring: Ring, tile: Tile, staging: Staging) -> None:
    """Compute a tile's composed weights W, sums of P∘dP over its keys, and gradients of the post-compose's weights."""
    count = block.config.post.planes
    pre = block.zeros(block.config.pre.planes)
    if pre:
        pre = ring.sweep(lambda _, slot, x, planes: tile.down(slot, "pre", planes, x[0]), pre)
    both = block.zeros(2 * count)
    if both:

        def hidden(head: Array, slot: Array, products: list[Array], both: Planes) -> Planes:
            p = tile.probabilities(slot, pre, products[0])
            post = tile.down(slot, "post", both[:count], p)
            return post + tile.down(slot, "post", both[count:], products[1], transposed=True)

        both = ring.sweep(hidden, both)
    post, back = both[:count], both[count:]
    block.save_planes(pre + back)

    def body(head: Array, slot: Array, products: list[Array]) -> None:
        p, dw = tile.probabilities(slot, pre, products[0]), products[1]
        staging.reuse()
        staging.stage_tile(tile.up(slot, "post", post, p))
        rows, cols = tile.gradient_products("post", p, dw, post, back)
        delta = p * tile.up(slot, "post", back, dw, transposed=True)
        staging.stage_rows([jnp.sum(x, axis=1) for x in [*rows, delta]])
        staging.stage_products(cols)
        staging.commit(head, tile=True, row_sums=True)

    staging.sweep_with_col_sums(ring, body)


def pre_grad(block: Block, ring: Ring, tile: Tile, staging: Staging) -> None:
    """Compute the gradient dS of a tile's scores, and the gradients of the pre-compose's weights."""
    pre_planes = block.config.pre.planes
    pre = block.load_planes(0, pre_planes)
    back_post = block.load_planes(pre_planes, block.config.post.planes)

    def logit_gradient(slot: Array, products: list[Array]) -> Array:
        p = tile.probabilities(slot, pre, products[0])
        dp = tile.up(slot, "post", back_post, products[1], transposed=True)
        return p * (dp - tile.row(slot, block.config.delta_channel))

    back = block.zeros(pre_planes)
    if back:

        def hidden(head: Array, slot: Array, products: list[Array], planes: Planes) -> Planes:
            return tile.down(slot, "pre", planes, logit_gradient(slot, products), transposed=True)

        back = ring.sweep(hidden, back)

    def body(head: Array, slot: Array, products: list[Array]) -> None:
        dl = logit_gradient(slot, products)
        staging.reuse()
        staging.stage_tile(tile.up(slot, "pre", back, dl, transposed=True))
        rows, cols = tile.gradient_products("pre", products[0], dl, pre, back)
        staging.stage_rows([jnp.sum(x, axis=1) for x in rows])
        staging.stage_products(cols)
        staging.commit(head, tile=True, row_sums=True)

    staging.sweep_with_col_sums(ring, body)
