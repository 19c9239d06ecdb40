"""Arithmetic of the GPU kernels on one tile: 64 queries by `tile_keys` keys, for all heads of a group.

A block of a kernel handles one example, one group of heads, 64 queries and `warpgroups`·`tile_keys` keys. Each
warpgroup computes a tile of all 64 queries and `tile_keys` keys. Heads stream through a ring of slots in shared memory
once per sweep. The hidden planes of a compose, which combine the heads, stay in float32 registers. Each sweep computes
the scores of a head again, because the tensor cores have time left and registers are scarce. Blocks exchange no values:
a sum over queries or keys is written as one partial sum for each tile, and XLA adds the partial sums in a fixed order,
so that the results are deterministic.

Scores are in units of log 2, so that 2^L is a single instruction. A `mask` of bits represents all masks and the
padding: one instruction selects the score or MASKED_SCORE. An addition would take as many, but keep a masked NaN.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from dcvit.dcmha.backends.gpu.block import Block, Planes
from dcvit.dcmha.backends.gpu.config import Which
from dcvit.dcmha.numerics import MASKED_SCORE
from dcvit.dcmha.shapes import Array

MASKED_BITS = int(np.float32(MASKED_SCORE).view(np.int32))  # of a masked score


class Tile:
    """Arithmetic of one warpgroup. `slot` is the ring slot of a head; a channel numbers the weights in that slot."""

    def __init__(self, block: Block) -> None:
        self.block, self.config, self.scratch = block, block.config, block.scratch
        mask = block.operands.mask
        self.mask = block.load(mask, lax.rem(block.example, jnp.int32(mask.shape[0])))

    def row(self, slot: Array, channel: int) -> Array:
        """Return the query-wise weight number `channel` of the head in `slot`, broadcast to a tile."""
        return self.block.broadcast(self.scratch.rows[slot, channel], 0)

    def col(self, slot: Array, channel: int) -> Array:
        """Return the key-wise weight number `channel` of the head in `slot`, broadcast to a tile."""
        return self.block.broadcast(self.scratch.cols[slot, channel, self.block.own_keys], 1)

    def weights(self, slot: Array, which: Which, up: bool) -> list[Array]:
        """Return the up or down projection weights of one head for each hidden plane of a compose."""
        ranks = self.config.ranks(which)
        q, k = self.config.channel("q", which) + 1, self.config.channel("k", which) + 1
        rows = [self.row(slot, q + up * ranks.q + r) for r in range(ranks.q)]
        return rows + [self.col(slot, k + up * ranks.k + r) for r in range(ranks.k)]

    def down(self, slot: Array, which: Which, planes: Planes, x: Array, transposed: bool = False) -> Planes:
        """Return the hidden planes with the tile `x` of one head added: hq_r + x·q1_r and hk_r + x·k1_r.

        `transposed` computes the planes of the transposed compose, with q2 and k2.
        """
        weights = self.weights(slot, which, up=transposed)
        return tuple(plane + x * weight for plane, weight in zip(planes, weights, strict=True))

    def up(self, slot: Array, which: Which, planes: Planes, x: Array, transposed: bool = False) -> Array:
        """Return the composed tile of one head: x·gates + Σ_r (hq_r·q2_r + hk_r·k2_r).

        `transposed` computes the transposed compose, with q1 and k1.
        """
        q, k = self.config.channel("q", which), self.config.channel("k", which)
        gate = self.row(slot, q)
        if self.config.ranks(which).key_wise:
            gate = gate + self.col(slot, k)
        out = x * gate
        for plane, weight in zip(planes, self.weights(slot, which, up=not transposed), strict=True):
            out = out + plane * weight
        return out

    def logits(self, slot: Array, planes: Planes, scores: Array) -> Array:
        """Return the composed and masked scores of one head."""
        bits = lax.bitcast_convert_type(self.up(slot, "pre", planes, scores), jnp.int32)
        return lax.bitcast_convert_type((bits & self.mask) | (~self.mask & MASKED_BITS), jnp.float32)

    def probabilities(self, slot: Array, planes: Planes, scores: Array) -> Array:
        """Return the attention weights P = 2^(logits - log-sum-exp) of one head; exactly 0 for masked keys."""
        return jnp.exp2(self.logits(slot, planes, scores) - self.row(slot, self.config.lse_channel))

    def gradient_products(
        self, which: Which, a: Array, g: Array, hidden: Planes, back: Planes
    ) -> tuple[list[Array], list[Array]]:
        """Return products of one head whose sums are the gradients of the compose's weights, one for each channel.

        Summed over keys, those of the first list are the gradients of query-wise weights; summed over queries, those of
        the second list are the gradients of key-wise weights.

        Args:
          which: the compose.
          a: its input.
          g: gradient of its output.
          hidden: its hidden planes.
          back: hidden planes of the transposed compose of `g`.
        """
        q, gate = self.config.ranks(which).q, a * g
        rows = [gate] + [a * x for x in back[:q]] + [g * x for x in hidden[:q]]
        cols = [gate] + [a * x for x in back[q:]] + [g * x for x in hidden[q:]]
        return rows, cols if self.config.ranks(which).key_wise else []
