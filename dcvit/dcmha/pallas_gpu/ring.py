"""Ring of shared-memory slots through which the heads of a group stream to the tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dcvit.dcmha.pallas_gpu.block import Block
from dcvit.dcmha.pallas_gpu.config import PRODUCER_REGISTERS
from dcvit.dcmha.shapes import Array, Ref

Carry = TypeVar("Carry")


class Ring:
    """Ring of `stages` slots. Step s of all sweeps processes head s % heads in slot s % stages."""

    def __init__(self, block: Block, sweeps: int) -> None:
        self.block, self.config, self.scratch, self.sweeps = block, block.config, block.scratch, sweeps

    def copies(self, head: Array, slot: Array) -> list[tuple[Ref, Ref]]:
        """Return the source and the target of each copy of one step."""
        b, c, scratch = self.block, self.config, self.scratch
        h = b.head(head)
        key_head = lax.div(h, jnp.int32(c.heads_per_key_head))
        keys = pl.ds(b.j * c.block_keys, c.block_keys)
        found = [
            (b.operands.rows.at[b.example, h, :, b.query_span], scratch.rows.at[slot]),
            (b.operands.cols.at[b.example, h, :, keys], scratch.cols.at[slot]),
        ]
        for (left, right), (lefts, rights) in zip(b.operands.pairs, scratch.scores, strict=True):
            for part in range(c.parts):
                found.append((left[part].at[b.example, b.query_span, h], lefts.at[slot, part]))
                found.append((right[part].at[b.example, keys, key_head], rights.at[slot, part]))
        return found

    def fill(self, step: Array) -> None:
        """Start the copies of one step."""
        slot = lax.rem(step, jnp.int32(self.config.stages))
        for source, target in self.copies(lax.rem(step, jnp.int32(self.config.group_heads)), slot):
            plgpu.copy_gmem_to_smem(source, target, self.scratch.full.at[slot])  # type: ignore[arg-type]

    def produce(self) -> None:
        """Run the last warpgroup, which fills each slot as soon as the other warpgroups have finished reading it."""
        c = self.config
        if not c.without_layouts:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def step(now: Array, carry: tuple[()]) -> tuple[()]:
            @pl.when(now >= c.stages)
            def _() -> None:
                plgpu.barrier_wait(self.scratch.empty.at[lax.rem(now, jnp.int32(c.stages))])

            self.fill(now)
            return carry

        total = self.sweeps * c.group_heads
        lax.fori_loop(jnp.int32(0), jnp.int32(total), step, ())
        for last in range(max(0, total - c.stages), total):  # every phase of a barrier must be waited for
            plgpu.barrier_wait(self.scratch.empty.at[last % c.stages])

    def sweep(self, number: int, body: Callable[[Array, Array, Carry], Carry], carry: Carry) -> Carry:
        """Return carry = body(head, slot, carry), repeated for all heads of the group; `number` counts sweeps."""
        c = self.config

        def step(head: Array, carry: Carry) -> Carry:
            slot = lax.rem(number * c.group_heads + head, jnp.int32(c.stages))
            plgpu.barrier_wait(self.scratch.full.at[slot])
            carry = body(head, slot, carry)
            if number < self.sweeps - 1:  # the last sweep does so when it commits its outputs
                plgpu.commit_smem()  # the reads must be complete, not only issued, before the slot is filled again
            plgpu.barrier_arrive(self.scratch.empty.at[slot])
            return carry

        out: Carry = lax.fori_loop(jnp.int32(0), jnp.int32(c.group_heads), step, carry)
        return out
