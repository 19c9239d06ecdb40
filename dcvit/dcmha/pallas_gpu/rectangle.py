"""Slices, padding and packed weights of one rectangle of queries and keys, and sums of gradients over rectangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jax import lax

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.inputs import Inputs
from dcvit.dcmha.numerics import LOG2_E, MASKED_SCORE
from dcvit.dcmha.pallas_gpu.config import Side
from dcvit.dcmha.pallas_gpu.tiling import Rectangle, Static, make_config, ranks
from dcvit.dcmha.segments import Segments, segment_mask
from dcvit.dcmha.shapes import Array

Pair: TypeAlias = tuple[Sequence[Array], Sequence[Array]]  # both operands of a product, each as its bfloat16 parts


class RectangleInputs:
    """Inputs of the kernels for one rectangle, and the way back from their outputs.

    Attributes:
      layer: the inputs of the layer, of all queries and keys.
      rectangle: the queries and keys of the rectangle.
      scale: factor of q·k.
      config: configuration of the kernels.
      bias: (1 or B, T, S) float32, 0 where a query attends to a key, MASKED_SCORE elsewhere.
    """

    def __init__(self, static: Static, rectangle: Rectangle, layer: Inputs, *, backward: bool) -> None:
        self.layer, self.rectangle, self.scale = layer, rectangle, static.options.scale
        self.config = make_config(layer, static, rectangle, backward=backward)
        self.bias = self._bias(layer)

    def _bias(self, layer: Inputs) -> Array:
        """Return (1 or B, T, S) float32: 0 where a query attends to a key, MASKED_SCORE elsewhere."""
        c, (rows, cols) = self.config, self.rectangle
        query = rows[0] + jnp.arange(c.queries)[:, None]
        key = cols[0] + jnp.arange(c.keys)[None]
        attended = (query < rows[1]) & (key < cols[1])
        if c.causal:
            attended &= key <= query
        if c.window is not None:
            attended &= key > query - c.window
        attended = attended[None]
        if layer.mask is not None:
            part = layer.mask[:, 0]
            part = part[:, slice(*rows)] if part.shape[1] > 1 else part
            part = part[:, :, slice(*cols)] if part.shape[2] > 1 else part
            part = jnp.broadcast_to(part, (part.shape[0], *self.rectangle.size))
            attended &= pad(pad(part, 1, c.queries), 2, c.keys)
        if layer.segments is not None:
            part = segment_mask(Segments(layer.segments.queries[:, slice(*rows)], layer.segments.keys[:, slice(*cols)]))
            attended &= pad(pad(part[:, 0], 1, c.queries), 2, c.keys)
        return jnp.where(attended, 0.0, MASKED_SCORE).astype(jnp.float32)

    def queries(self, x: Array) -> Array:
        """Slice (B T H D) of all queries to (B T K H/K D) of the rectangle, with padding."""
        x = pad(x[:, slice(*self.rectangle.rows)], 1, self.config.queries)
        return x.reshape(*x.shape[:2], -1, self.config.heads_per_key_head, x.shape[3])

    def keys(self, x: Array) -> Array:
        """Slice (B S K D) of all keys to those of the rectangle, with padding."""
        return pad(x[:, slice(*self.rectangle.cols)], 1, self.config.keys)

    def without_padding(self, x: Array) -> Array:
        """Convert (B T K H/K D) of the rectangle to (B T H D) without padding."""
        queries = self.rectangle.size[0]
        return x[:, :queries].reshape(x.shape[0], queries, -1, x.shape[4])

    def add_keys(self, total: Array, x: Array) -> Array:
        """Add values of the rectangle's keys to (B S K D) of all keys."""
        return total.at[:, slice(*self.rectangle.cols)].add(x[:, : self.rectangle.size[1]])

    def by_key_head(self, x: Array) -> Array:
        """Reshape (B H T S) to (B K H/K T S)."""
        return x.reshape(x.shape[0], -1, self.config.heads_per_key_head, *x.shape[2:])

    def pair(self, left: Array, right: Array) -> Pair:
        """Return the operands of a product over D, with padding."""
        c = self.config
        left = self.queries(left).reshape(c.batch, c.queries, -1, left.shape[3])
        sides: list[Sequence[Array]] = []
        for x in (left, self.keys(right)):
            x = pad(x, 3, c.head_dim)
            if c.parts == 1:
                sides.append([x])
            else:
                # XLA may remove a cast to bfloat16 and back, but not reduce_precision.
                high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
                sides.append([high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)])
        return sides[0], sides[1]

    def weights(self, *statistics: Array) -> tuple[Array, Array]:
        """Return the query-wise and the key-wise weights of the kernels.

        The statistics are appended to the query-wise weights. The gates and down projections of the pre-compose include
        the factor scale·log2(e), which gives scores in units of log 2.
        """
        c = self.config
        found = []
        sides: tuple[Side, ...] = ("q", "k")
        for axis, side in enumerate(sides):
            length, span = (c.queries, c.keys)[axis], slice(*self.rectangle[axis])
            channels = []
            for weights, factor in ((self.layer.pre, self.scale * LOG2_E), (self.layer.post, 1.0)):
                shape = (c.batch, self.rectangle.size[axis], c.heads)
                channels += side_channels(weights, side, factor, shape, span)
            packed = jnp.concatenate(channels, axis=2).astype(jnp.float32)  # B N C H
            found.append(pad(jnp.transpose(packed, (0, 3, 2, 1)), 3, length))
        return jnp.concatenate([found[0], *(x[:, :, None] for x in statistics)], axis=2), found[1]


class WeightGradients:
    """Gradients of one compose's weights, added over rectangles."""

    def __init__(self, weights: ComposeWeights | None, keys: int) -> None:
        self.weights, self.keys, self.ranks = weights, keys, ranks(weights)
        self.rows: list[Array] = []
        self.cols: Array | None = None  # None until a query attends to a key

    def add(self, inputs: RectangleInputs, rows: Array, cols: Array, gate_and_down: float, up: float) -> None:
        """Add the gradients of one rectangle.

        Args:
          inputs: the rectangle.
          rows: gradients of query-wise weights, (B H channels T).
          cols: gradients of key-wise weights, (B G 64 [tiles channels keys]); row j belongs to head j of a group.
          gate_and_down: factor of the gradients of gates and down projections.
          up: factor of the gradients of up projections.
        """
        if self.weights is None:
            return
        c, (queries, keys) = inputs.config, inputs.rectangle.size
        cols = cols[:, :, : c.group_heads].reshape(c.batch, c.heads, c.key_tiles, -1, c.tile_keys)
        cols = jnp.swapaxes(cols, 2, 3).reshape(c.batch, c.heads, -1, c.keys)
        ranks = self.ranks.q, self.ranks.k
        factors = [jnp.asarray([gate_and_down] * (1 + r) + [up] * r, jnp.float32)[None, None, :, None] for r in ranks]
        self.rows.append((rows * factors[0])[..., :queries])
        start, stop = inputs.rectangle.cols
        cols = jnp.pad((cols * factors[1])[..., :keys], [(0, 0)] * 3 + [(start, self.keys - stop)])
        self.cols = cols if self.cols is None else self.cols + cols

    def add_zeros(self, queries: int) -> None:
        """Add the gradients of queries that attend to no key."""
        if self.weights is not None:
            example = next(x for x in self.weights if x is not None)
            shape = (example.shape[0], example.shape[-1], self.ranks.channels("q"), queries)
            self.rows.append(jnp.zeros(shape, jnp.float32))

    def result(self) -> ComposeWeights | None:
        """Return the gradients in the weights' dtypes, or None without this compose."""
        w = self.weights
        if w is None:
            return None
        qg, q1, q2 = split_channels(jnp.concatenate(self.rows, axis=3), self.ranks.q, (w.qg, w.q1, w.q2))
        kg, k1, k2 = split_channels(self.cols, self.ranks.k, (w.kg, w.k1, w.k2))
        return ComposeWeights(q1, q2, qg, k1, k2, kg)


def split_channels(
    total: Array | None, rank: int, like: tuple[Array | None, Array | None, Array | None]
) -> list[Array | None]:
    """Split gradients (B H channels N) of one side into those of gate, down and up, for the weights that exist.

    Args:
      total: the gradients; None for zeros.
      rank: rank of the projections.
      like: the weights.
    """
    if total is None:
        return [None if x is None else jnp.zeros_like(x) for x in like]
    total = jnp.transpose(total, (0, 3, 2, 1))  # B N C H
    parts = [total[:, :, 0], total[:, :, 1 : 1 + rank], total[:, :, 1 + rank :]]
    return [None if x is None else part.astype(x.dtype) for x, part in zip(like, parts, strict=True)]


def side_channels(
    weights: ComposeWeights | None, side: Side, factor: float, shape: tuple[int, int, int], span: slice
) -> list[Array]:
    """Return the gate, down and up weights of one side, each (B N channels H).

    The query-wise gate includes the skip connection. `factor` multiplies the gate and the down projection.
    """
    gate = down = up = None
    if weights is not None and side == "q":
        gate, down, up = weights.qg, weights.q1, weights.q2
    elif weights is not None:
        gate, down, up = weights.kg, weights.k1, weights.k2
    gates = jnp.full(shape, 1.0 if side == "q" else 0.0, jnp.float32)
    if gate is not None:
        gates += gate[:, span].astype(jnp.float32)
    found = [gates[:, :, None] * factor]
    if down is not None and up is not None:
        found += [down[:, span].astype(jnp.float32) * factor, up[:, span].astype(jnp.float32)]
    return found


def pad(x: Array, axis: int, size: int) -> Array:
    """Append zeros to an axis up to `size`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
