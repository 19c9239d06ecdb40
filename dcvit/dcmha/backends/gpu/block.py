"""One thread block of a GPU kernel: its position in the grid, its references, and its accesses to memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dcvit.dcmha.backends.gpu.config import QUERIES, KernelConfig
from dcvit.dcmha.shapes import Array, Ref, not_none
from dcvit.versions import load_any, store_any

Planes: TypeAlias = tuple[Array, ...]


class Operands(NamedTuple):
    """Inputs of a kernel: arrays, or their references in global memory.

    Compose weights and hidden planes are float32, `mask` and `visited` are int32.

    Fields:
      pairs: (q, k), and (dO, v) for gradients; bfloat16, (B T H D) and (B S K D).
      rows: query-wise weights (B H channels T), see `KernelConfig.channel`.
      cols: key-wise weights (B H channels S).
      mask: -1 where a query attends to a key, or else 0; (1 or B, T, S).
      visited: 1 if a query of a block attends to one of its keys, or else 0; (1 or B, T/64, S/`block_keys`).
      planes: hidden planes that an earlier kernel has computed (B G planes T S).
    """

    pairs: Sequence[tuple[Ref, Ref]]
    rows: Ref
    cols: Ref
    mask: Ref
    visited: Ref
    planes: Ref | None = None


class Results(NamedTuple):
    """Outputs of a kernel: arrays, or their references in global memory; None for those that it does not have.

    Fields, where brackets enclose factors of one axis:
      col_sums: (B G tiles 64 [tiles channels keys]), to be added over tiles of queries; None without key-wise weights.
      planes: (B G planes T S), for `Operands.planes` of a later kernel.
      row_sums: (B H tiles channels T), to be added over tiles of keys.
      tile: (B H T S), W or dS.
    """

    col_sums: Ref | None = None
    planes: Ref | None = None
    row_sums: Ref | None = None
    tile: Ref | None = None


class Scratch(NamedTuple):
    """Shared memory and barriers of a block. The buffers of absent outputs are None."""

    cols: Ref  # ring slots of key-wise weights
    empty: Ref  # barrier of each slot: its readers have finished
    full: Ref  # barrier of each slot: its copies have arrived
    products: Ref | None  # products to be summed over queries
    row_sums: Ref | None  # staging buffers of the outputs
    rows: Ref  # ring slots of query-wise weights
    scores: Sequence[tuple[Ref, Ref]]  # ring slots of both sides of each pair
    tile: Ref | None


class Block:
    """A thread block's position and references, and its accesses to memory."""

    def __init__(self, config: KernelConfig, operands: Operands, out: Results, scratch: Scratch) -> None:
        self.config, self.operands, self.out, self.scratch = config, operands, out, scratch
        self.example, self.group, self.i, self.j, self.warpgroup = (lax.axis_index(name) for name in "bgijw")
        self.key_tile = self.j * config.warpgroups + self.warpgroup
        self.query_span = pl.ds(self.i * QUERIES, QUERIES)
        self.key_span = pl.ds(self.key_tile * config.tile_keys, config.tile_keys)
        self.own_keys = pl.ds(self.warpgroup * config.tile_keys, config.tile_keys)  # among those of the block

    def head(self, index: Array) -> Array:
        """Return the index among all heads of head number `index` of this block's group."""
        return self.group * self.config.group_heads + index

    def is_attended(self) -> Array:
        """Return True if any query of this block attends to any of its keys."""
        visited = self.operands.visited
        example = lax.rem(self.example, jnp.int32(visited.shape[0]))
        found: Array = visited[example, self.i, self.j] != 0
        return found

    # Layouts annotate registers.

    def as_tile(self, x: Array) -> Array:
        """Return a matrix of a tile's shape in the register layout of a matrix product's result."""
        found: Array = plgpu.layout_cast(x, plgpu.Layout.WGMMA)
        return found

    def as_vector(self, x: Array, axis: int) -> Array:
        """Return a vector in the register layout of one axis of a tile: 0 for queries, 1 for keys."""
        found: Array = plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(1 - axis))
        return found

    def broadcast(self, x: Array, axis: int) -> Array:
        """Return a vector of the tile's queries (axis 0) or keys (axis 1), broadcast to a tile."""
        return self.as_tile(lax.broadcast_in_dim(self.as_vector(x, axis), self.config.tile, (axis,)))

    def zeros(self, count: int) -> Planes:
        """Return `count` tiles of zeros."""
        return tuple(self.as_tile(jnp.zeros(self.config.tile, jnp.float32)) for _ in range(count))

    def load(self, ref: Ref, *index: Array | int) -> Array:
        """Return this tile of `ref[index]`, an array in global memory whose axes are queries and keys."""
        return load_any(ref.at[(*index, self.query_span, self.key_span)])

    def save_planes(self, planes: Planes) -> None:
        """Store the hidden planes of this tile for a later kernel."""
        for number, plane in enumerate(planes):
            where = not_none(self.out.planes).at[self.example, self.group, number, self.query_span, self.key_span]
            store_any(where, plane)

    def load_planes(self, first: int, count: int) -> Planes:
        """Return `count` hidden planes of this tile, from number `first` on, that an earlier kernel has stored."""
        numbers = range(first, first + count)
        return tuple(self.load(not_none(self.operands.planes), self.example, self.group, n) for n in numbers)
