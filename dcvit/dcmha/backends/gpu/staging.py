"""Staging of a GPU kernel's outputs in shared memory, and their copies to global memory.

The threads of a warpgroup only write its staging buffers; only the copy engine and the tensor cores read them. `reuse`
and `commit` contain all barriers that the buffers require; the kernels are compiled without automatic barriers.

A sum over the 64 queries would cross all lanes and warps of a warpgroup. It is computed as a matrix product with a
one-hot matrix in registers instead, which adds the sums of head j to row j of an accumulator that all heads share. This
product runs during the arithmetic of the next head, up to `reuse`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dcvit.dcmha.backends.gpu.block import Block
from dcvit.dcmha.backends.gpu.config import DEPTH, QUERIES
from dcvit.dcmha.backends.gpu.ring import Ring
from dcvit.dcmha.shapes import Array, Ref, not_none
from dcvit.versions import store_any


class Staging:
    """Buffers in shared memory for the outputs of one warpgroup, and their copies to global memory."""

    def __init__(self, block: Block, in_flight: int) -> None:
        """`in_flight` is the number of matrix products that the last sweep starts for a head."""
        self.in_flight = in_flight
        self.block, self.config, self.scratch, self.out = block, block.config, block.scratch, block.out

    def reuse(self) -> None:
        """Wait until the staging buffers may be written again.

        Only the matrix products of the next head, which `Ring.sweep` starts later, may be in flight.
        """
        if self.scratch.products is not None:
            plgpu.wgmma_wait(self.in_flight)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # also a barrier: all warps have waited for their products

    def stage_rows(self, vectors: Sequence[Array]) -> None:
        """Write sums over keys to a buffer, one vector of 64 queries for each channel of `Results.row_sums`."""
        for channel, x in enumerate(vectors):
            not_none(self.scratch.row_sums)[self.block.warpgroup, channel] = x

    def stage_tile(self, x: Array) -> None:
        """Write a tile of W or dS to its buffer."""
        not_none(self.scratch.tile)[self.block.warpgroup] = x.astype(jnp.bfloat16)

    def stage_products(self, tiles: Sequence[Array]) -> None:
        """Write products to the buffer from which `add_products` sums them over queries."""
        c, w = self.config, self.block.warpgroup
        for channel, x in enumerate(tiles):
            columns = pl.ds(channel * c.tile_keys, c.tile_keys)
            not_none(self.scratch.products)[w, :, columns] = x.astype(jnp.bfloat16)

    def commit(self, head: Array, *, tile: bool = False, row_sums: bool = False) -> None:
        """Make the staged values visible to the copy engine, and start the copies of the selected outputs."""
        b = self.block
        copies: list[tuple[Ref, Ref]] = []
        if tile:
            target = not_none(self.out.tile).at[b.example, b.head(head), b.query_span, b.key_span]
            copies.append((not_none(self.scratch.tile).at[b.warpgroup], target))
        if row_sums:
            target = not_none(self.out.row_sums).at[b.example, b.head(head), b.key_tile, :, b.query_span]
            copies.append((not_none(self.scratch.row_sums).at[b.warpgroup], target))
        plgpu.commit_smem()
        for source, target in copies:
            plgpu.copy_smem_to_gmem(source, target)  # type: ignore[arg-type]

    def save_col_sums(self, x: Array) -> None:
        """Store the sums over queries of this tile, (64, channels·keys), in global memory; row j is head j."""
        b, ref = self.block, not_none(self.out.col_sums)
        columns = ref.shape[-1] // self.config.key_tiles
        where = ref.at[b.example, b.group, b.i, pl.ds(0, QUERIES), pl.ds(b.key_tile * columns, columns)]
        store_any(where, x)

    def sweep_with_col_sums(self, ring: Ring, body: Callable[[Array, Array, list[Array]], None]) -> None:
        """Run the last sweep, and store the sums over queries of the products that `body` stages, if there are any."""

        def step(head: Array, slot: Array, products: list[Array], carry: tuple[()]) -> tuple[()]:
            body(head, slot, products)
            return carry

        if self.out.col_sums is None:
            ring.sweep(step, ())
            return
        shape = (QUERIES, self.out.col_sums.shape[-1] // self.config.key_tiles)

        def accumulate(accumulator: Ref) -> Array:
            ring.sweep(step, (), then=lambda head: self.add_products(accumulator, head))
            return accumulator[...]

        sums = pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))
        self.save_col_sums(sums)

    def add_products(self, accumulator: Ref, head: Array) -> None:
        """Start the matrix product that adds the sums over queries of the staged products to the accumulator."""
        rows = plgpu.broadcasted_iota(jnp.int32, (QUERIES, DEPTH), 0, layout=plgpu.Layout.WGMMA)
        onehot = jnp.where(rows == head, 1.0, 0.0).astype(jnp.bfloat16)
        for first in range(0, QUERIES, DEPTH):  # one instruction each, so that all read the same registers
            products = not_none(self.scratch.products).at[self.block.warpgroup, pl.ds(first, DEPTH)]
            plgpu.wgmma(accumulator, onehot, products)  # type: ignore[arg-type]
