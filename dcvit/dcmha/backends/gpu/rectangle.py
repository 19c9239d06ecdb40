"""Conversion of a layer's arrays to operands of the GPU kernels, and the loop over rectangles of queries and keys.

Rectangles of equal shape are iterations of a loop with traced positions: the masks are data, so that the compiled
kernels do not depend on the positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from dcvit.dcmha.backends.gpu.block import Operands
from dcvit.dcmha.backends.gpu.config import QUERIES, Side, Which
from dcvit.dcmha.backends.gpu.tiling import make_config, spans
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.inputs import Inputs, Options
from dcvit.dcmha.numerics import LOG2_E, pad, round_up
from dcvit.dcmha.segments import Segments, segment_mask
from dcvit.dcmha.shapes import Array

Carry = TypeVar("Carry")
Results = TypeVar("Results")


class Tokens(NamedTuple):
    """Arrays of queries or of keys.

    Fields:
      arrays: q and dO, or k and v, each (B N H D) or (B N K D).
      padded: the same with D padded.
      weights: compose weights (B H channels N).
    """

    arrays: Sequence[Array]
    padded: Sequence[Array]
    weights: Array

    def slice(self, start: Array | int, size: int) -> Tokens:
        """Return the arrays of `size` tokens from `start` on."""
        arrays, padded = jax.tree.map(lambda x: cut(x, 1, start, size), (self.arrays, self.padded))
        return Tokens(arrays, padded, cut(self.weights, 3, start, size))


class Layer:
    """Arrays of a layer, padded to whole blocks of queries and of keys.

    Attributes:
      inputs: inputs of the layer.
      options: options of the layer.
      config: configuration of the kernels, without the number of keys.
      queries, keys: arrays of all queries and keys; weights of queries include the log-sum-exp in the backward pass.
    """

    def __init__(
        self, options: Options, rows: int, inputs: Inputs, d_out: Array | None = None, lse: Array | None = None
    ) -> None:
        self.inputs, self.options = inputs, options
        self.config = make_config(inputs, options, rows, backward=d_out is not None)
        q, k, v = inputs[:3]
        self.sizes = q.shape[1], k.shape[1]
        padded = round_up(self.sizes[0], rows), round_up(self.sizes[1], self.config.block_keys)
        lefts, rights = ([q], [k, v]) if d_out is None else ([q, d_out], [k, v])
        self.queries = self._tokens("q", lefts, padded[0], [] if lse is None else [lse])
        self.keys = self._tokens("k", rights, padded[1], [])
        self.mask = inputs.mask
        if self.mask is not None:
            for axis, size in enumerate(padded, 2):
                self.mask = self.mask if self.mask.shape[axis] == 1 else pad(self.mask, axis, size)
        self.segments = inputs.segments
        if self.segments is not None:
            self.segments = Segments(*(pad(x, 1, size) for x, size in zip(self.segments, padded, strict=True)))

    def _tokens(self, side: Side, arrays: Sequence[Array], size: int, statistics: Sequence[Array]) -> Tokens:
        """Return the padded arrays and the packed compose weights of one side, "q" or "k".

        The gates and down projections of the pre-compose include the factor scale·log2(e), which gives scores in units
        of log 2.
        """
        c, (batch, tokens) = self.config, arrays[0].shape[:2]
        channels = []
        for weights, factor in ((self.inputs.pre, self.options.scale * LOG2_E), (self.inputs.post, 1.0)):
            channels += side_channels(weights, side, factor, (batch, tokens, c.heads))
        packed = jnp.transpose(jnp.concatenate(channels, axis=2).astype(jnp.float32), (0, 3, 2, 1))
        packed = jnp.concatenate([packed, *(x[:, :, None] for x in statistics)], axis=2)
        arrays = [pad(x, 1, size) for x in arrays]
        return Tokens(arrays, [pad(x, 3, c.head_dim) for x in arrays], pad(packed, 3, size))

    def scan(self, body: Callable[[Rectangle, Carry], tuple[Carry, Results]], carry: Carry) -> tuple[Carry, Results]:
        """Return the last carry and the stacked results of carry, x = body(rectangle, carry) for all rectangles."""
        found = []
        for blocks, size in spans(*self.sizes, self.options, self.config):
            keys = self.keys if self.options.window is not None else self.keys.slice(0, size)

            def step(carry: Carry, block: Array, keys: Tokens = keys, size: int = size) -> tuple[Carry, Results]:
                return body(Rectangle(self, block, keys, size), carry)

            carry, results = lax.scan(step, carry, jnp.arange(blocks.start, blocks.stop, dtype=jnp.int32))
            found.append(results)
        return carry, jax.tree.map(lambda *x: jnp.concatenate(x), *found)

    def join(self, x: Array, axis: int) -> Array:
        """Convert stacked results, whose axis 1 + `axis` has the queries of a block, to an array of all queries."""
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return lax.slice_in_dim(x, 0, self.sizes[0], axis=axis)


class Rectangle:
    """One block of queries with its keys: the operands of the kernels, and the conversion of their outputs.

    Attributes:
      config: configuration of the kernels.
      queries, keys: arrays of these tokens.
      mask: (1 or B, T, S) int32, -1 (all bits set) where a query attends to a key, 0 elsewhere.
      visited: (1 or B, T/64, S/`block_keys`) int32, 1 for the blocks with an attended key.
    """

    def __init__(self, layer: Layer, block: Array, keys: Tokens, size: int) -> None:
        self.layer, self.config = layer, dataclasses.replace(layer.config, keys=size)
        c, self.first_query, self.first_key = self.config, block * layer.config.queries, jnp.int32(0)
        if layer.options.window is not None:
            last = self.first_query + (c.queries - size)
            self.first_key = jnp.clip(last, 0, keys.weights.shape[3] - size)
        self.queries = layer.queries.slice(self.first_query, c.queries)
        self.keys = keys.slice(self.first_key, size)
        attended = self._attended()
        blocks = attended.reshape(len(attended), -1, QUERIES, size // c.block_keys, c.block_keys)
        self.visited = jnp.any(blocks, axis=(2, 4)).astype(jnp.int32)
        self.mask = -attended.astype(jnp.int32)

    def _attended(self) -> Array:
        """Return the mask (1 or B, T, S): True where a query attends to a key."""
        c, layer = self.config, self.layer
        starts, sizes = (self.first_query, self.first_key), (c.queries, c.keys)
        query, key = (start + jnp.arange(size, dtype=jnp.int32) for start, size in zip(starts, sizes, strict=True))
        query, key = query[:, None], key[None]
        attended: Array = (query < layer.sizes[0]) & (key < layer.sizes[1])
        if layer.options.causal:
            attended &= key <= query
        if layer.options.window is not None:
            attended &= key > query - layer.options.window
        attended = attended[None]
        if layer.mask is not None:
            part = layer.mask[:, 0]
            for axis in (0, 1):
                if part.shape[axis + 1] > 1:
                    part = cut(part, axis + 1, starts[axis], sizes[axis])
            attended = attended & part
        if layer.segments is not None:
            ids = (cut(x, 1, *where) for x, *where in zip(layer.segments, starts, sizes, strict=True))
            attended = attended & segment_mask(Segments(*ids))[:, 0]
        return attended

    def operands(self, *statistics: Array, planes: Array | None = None) -> Operands:
        """Return the operands of a kernel; `statistics` (log-sum-exp or delta, B H T) are the last query channels."""
        weights = jnp.concatenate([self.queries.weights, *(x[:, :, None] for x in statistics)], axis=2)
        pairs = list(zip(self.queries.padded, self.keys.padded, strict=False))
        return Operands(pairs, weights, self.keys.weights, self.mask, self.visited, planes)

    def by_key_head(self, x: Array, axis: int) -> Array:
        """Return `x` with an axis of H query heads reshaped to two axes, K and H/K."""
        return x.reshape(*x.shape[:axis], -1, self.config.heads_per_key_head, *x.shape[axis + 1 :])

    def add_keys(self, total: Array, x: Array, axis: int) -> Array:
        """Return `total`, which has all keys on `axis`, with `x`, which has those of the rectangle, added."""
        x += cut(total, axis, self.first_key, self.config.keys)
        return lax.dynamic_update_slice_in_dim(total, x, self.first_key, axis)

    def weight_gradients(
        self, which: Which, rows: Array, cols: Array | None, gate_and_down: float, up: float
    ) -> tuple[Array, Array]:
        """Return the gradients of one compose's weights, (B H channels T) and (B H channels S).

        Args:
          which: the compose.
          rows: sums for query-wise weights (B H channels T).
          cols: `Results.col_sums`: sums for key-wise weights of each tile of queries. On the axis of 64, row j belongs
            to head j of a group. None without key-wise weights.
          gate_and_down: factor of the gradients of gates and down projections.
          up: factor of the gradients of up projections.
        """
        c, ranks = self.config, self.config.ranks(which)
        if cols is None:
            cols = jnp.zeros((c.batch, c.heads, ranks.channels("k"), c.keys), jnp.float32)
        else:
            cols = jnp.sum(cols[:, :, :, : c.group_heads], axis=2)
            cols = jnp.swapaxes(cols.reshape(c.batch, c.heads, c.key_tiles, -1, c.tile_keys), 2, 3)
            cols = cols.reshape(c.batch, c.heads, -1, c.keys)
        q, k = (jnp.asarray([gate_and_down] * (1 + r) + [up] * r, jnp.float32)[:, None] for r in (ranks.q, ranks.k))
        return rows * q[None, None], cols * k[None, None]


def compose_gradients(weights: ComposeWeights | None, rows: Array, cols: Array) -> ComposeWeights | None:
    """Return gradients (B H channels T) and (B H channels S) as the fields of `weights`, in their dtypes."""
    if weights is None:
        return None
    w, found = weights, []
    for total, like in ((rows, (w.qg, w.q1, w.q2)), (cols, (w.kg, w.k1, w.k2))):
        total = jnp.transpose(total, (0, 3, 2, 1))  # B N C H
        rank = total.shape[2] // 2
        parts = [total[:, :, 0], total[:, :, 1 : 1 + rank], total[:, :, 1 + rank :]]
        found += [None if x is None else part.astype(x.dtype) for x, part in zip(like, parts, strict=True)]
    qg, q1, q2, kg, k1, k2 = found
    return ComposeWeights(q1, q2, qg, k1, k2, kg)


def side_channels(
    weights: ComposeWeights | None, side: Side, factor: float, shape: tuple[int, int, int]
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
        gates += gate.astype(jnp.float32)
    found = [gates[:, :, None] * factor]
    if down is not None and up is not None:
        found += [down.astype(jnp.float32) * factor, up.astype(jnp.float32)]
    return found


def cut(x: Array, axis: int, start: Array | int, size: int) -> Array:
    """Return `size` elements of an axis from `start` on."""
    return x if x.shape[axis] == size else lax.dynamic_slice_in_dim(x, start, size, axis)
