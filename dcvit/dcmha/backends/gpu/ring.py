"""Ring of shared-memory slots through which the heads of a group stream to the tensor cores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dcvit.dcmha.backends.gpu.block import Block
from dcvit.dcmha.backends.gpu.config import Side, Which
from dcvit.dcmha.shapes import Array, Ref

Carry = TypeVar("Carry")
Result = TypeVar("Result")
Copy = tuple[Ref, Ref] | None  # source and target; None for one that this sweep does not need


def ignore(head: Array) -> None:
    """Do nothing: the default of the argument `then` of `Ring.sweep`."""


class Reads(NamedTuple):
    """Inputs of a head that one sweep (loop over the heads) reads; only these are copied to shared memory.

    Fields:
      pairs: indices in `Operands.pairs` of the arrays whose matrix products it uses.
      composes: composes whose weights it uses; the log-sum-exp and delta come with those of the post-compose.
    """

    pairs: Sequence[int]
    composes: Sequence[Which] = ("pre", "post")


class Ring:
    """Ring of at least three slots, each with the inputs of one head. A sweep is a loop over the heads of a group.

    Step s, counted through all sweeps, has head s % heads in slot s % stages. At its start, the matrix products of step
    s + 1 are started. After that, the slot of step s - 1 is filled again, so that products
    do not wait for the other warpgroup. The warpgroups that compute also copy: with another warpgroup for copies, each
    thread would have fewer registers, because `setmaxnreg` has no effect in the code that XLA links.

    A phase of `full` ends with the last copy into its slot; one of `empty`, with the last warpgroup that has finished
    reading a slot which will be filled again. Each warpgroup waits once for each phase: for `full` before it reads the
    slot, for `empty` before its share of the copies. The next phase cannot end before, since it needs what follows that
    wait: this warpgroup's release of the slot, or its next one.
    """

    def __init__(self, block: Block, reads: Sequence[Reads]) -> None:
        if block.config.stages < 3:
            raise ValueError(f"a ring needs three slots, found {block.config.stages}")
        self.block, self.config, self.scratch = block, block.config, block.scratch
        self.reads, self.steps = reads, len(reads) * block.config.group_heads
        self.number = 0  # of the next sweep
        self.ahead: dict[int, Array] = {}  # products of its first step by pair

    def copies(self, head: Array, slot: Array, reads: Reads) -> tuple[list[Copy], list[Copy]]:
        """Return the copies to a slot for one head, of query-wise and key-wise inputs; None for one not in `reads`."""
        b, c, scratch = self.block, self.config, self.scratch
        h = b.head(head)
        key_head = lax.div(h, jnp.int32(c.heads_per_key_head))
        keys = pl.ds(b.j * c.block_keys, c.block_keys)

        def channels(side: Side, source: Ref, target: Ref, span: object) -> Copy:
            used = c.channels(side, reads.composes, target.shape[1])
            where = pl.ds(used.start, len(used))
            return (source.at[b.example, h, where, span], target.at[slot, where]) if used else None

        rows = [channels("q", b.operands.rows, scratch.rows, b.query_span)]
        cols = [channels("k", b.operands.cols, scratch.cols, keys)]
        for pair, ((left, right), (lefts, rights)) in enumerate(zip(b.operands.pairs, scratch.scores, strict=True)):
            used = pair in reads.pairs
            rows.append((left.at[b.example, b.query_span, h], lefts.at[slot]) if used else None)
            cols.append((right.at[b.example, keys, key_head], rights.at[slot]) if used else None)
        return rows, cols

    def fill(self, step: Array, slot: Array, sweep: int) -> None:
        """Start to copy the inputs of a step's head to `slot`; the step is in sweep number `sweep` or a later sweep."""
        starts = [n for n in range(sweep, len(self.reads)) if n == sweep or self.reads[n] != self.reads[n - 1]]
        for n, stop in zip(starts, [*starts[1:], len(self.reads)], strict=True):
            fill = functools.partial(self.fill_as, step, slot, self.reads[n])
            if len(starts) == 1:
                fill()
            else:
                heads = self.config.group_heads
                pl.when(jnp.logical_and(step >= n * heads, step < stop * heads))(fill)

    def fill_as(self, step: Array, slot: Array, reads: Reads) -> None:
        """Start to copy the inputs `reads` of one step; for each omitted copy, arrive at the barrier instead."""
        c = self.config

        def start(copies: list[Copy]) -> None:
            for copy in copies:
                if copy is None:
                    plgpu.barrier_arrive(self.scratch.full.at[slot])
                else:
                    plgpu.copy_gmem_to_smem(*copy, self.scratch.full.at[slot])  # type: ignore[arg-type]

        for number, copies in enumerate(self.copies(lax.rem(step, jnp.int32(c.group_heads)), slot, reads)):
            pl.when(self.block.warpgroup == number % c.warpgroups)(functools.partial(start, copies))

    def start(self) -> None:
        """Start to fill all slots, with the inputs of the first steps."""
        count = jnp.int32(min(self.config.stages, self.steps))
        lax.fori_loop(jnp.int32(0), count, lambda step, _: self.fill(step, step, 0), None)

    def refill(self, step: Array, slot: Array, sweep: int) -> None:
        """Start to fill the slot of the step before again, when all warpgroups have finished reading it."""
        following = step - 1 + self.config.stages
        slot = jnp.where(slot == 0, self.config.stages, slot) - 1

        @pl.when(jnp.logical_and(step > 0, following < self.steps))
        def _() -> None:
            plgpu.barrier_wait(self.scratch.empty.at[slot])
            self.fill(following, slot, sweep)

    def release(self, step: Array, slot: Array) -> None:
        """Allow the slot of a step to be filled again, if there is a step for it."""

        @pl.when(step + self.config.stages < self.steps)
        def _() -> None:
            plgpu.barrier_arrive(self.scratch.empty.at[slot])

    def sweep(self, body: Callable[..., Carry], carry: Carry, then: Callable[[Array], None] = ignore) -> Carry:
        """Run the next sweep, carry = body(head, slot, products, carry) for all heads; return the last carry.

        The products of the next head are started before `body` and read after it, because a read waits for all matrix
        products.

        Args:
          body: called with the number of the head, its slot and its products.
          carry: initial value.
          then: called after `body` and after the products of the next head, without a wait for its own products.
        """
        c, number, pairs = self.config, self.number, self.reads[self.number].pairs
        self.number += 1
        first = number * c.group_heads
        if number == 0:
            plgpu.barrier_wait(self.scratch.full.at[0])
        ahead = []
        for pair in pairs:
            held = self.ahead.get(pair)
            ahead.append(product(self.block, jnp.int32(first % c.stages), pair) if held is None else held)

        def step(head: Array, state: tuple[list[Array], Carry, Array]) -> tuple[list[Array], Carry, Array]:
            products, carry, slot = state  # a remainder for the slot would take more instructions
            now = first + head
            following = jnp.where(slot == c.stages - 1, 0, slot + 1)

            def work() -> Carry:
                self.refill(now, slot, number)
                return body(head, slot, products, carry)

            # The last step has no next one: it computes products of any slot, which nothing uses.
            pl.when(now + 1 < self.steps)(lambda: plgpu.barrier_wait(self.scratch.full.at[following]))
            products, carry = products_during(self.block, following, pairs, work)
            then(head)
            if number < len(self.reads) - 1:  # the last sweep does so when it commits its outputs
                plgpu.commit_smem()  # the reads must be complete, not only issued, before the slot is filled again
            self.release(now, slot)
            return products, carry, following

        state = ahead, carry, jnp.int32(first % c.stages)
        ahead, carry, _ = lax.fori_loop(jnp.int32(0), jnp.int32(c.group_heads), step, state)
        self.ahead = dict(zip(pairs, ahead, strict=True))
        return carry


def product(block: Block, slot: Array, pair: int) -> Array:
    """Return q·k (pair 0) or dO·v (pair 1) of the head in `slot`: 64 queries × keys, float32."""

    def multiply(accumulator: Ref) -> Array:
        start_product(block, accumulator, slot, pair)
        return accumulator[...]

    out: Array = pl.run_scoped(multiply, plgpu.ACC(block.config.tile, jnp.float32))
    return out


def start_product(block: Block, accumulator: Ref, slot: Array, pair: int) -> None:
    """Start to add q·k (pair 0) or dO·v (pair 1) of the head in `slot` to `accumulator`; reading it waits."""
    left, right = block.scratch.scores[pair]
    keys = right.at[slot, block.own_keys].transpose((1, 0))
    plgpu.wgmma(accumulator, left.at[slot], keys)  # type: ignore[arg-type]


def products_during(
    block: Block, slot: Array, pairs: Sequence[int], work: Callable[[], Result]
) -> tuple[list[Array], Result]:
    """Return the products `pairs` (see `product`) of the head in `slot`, and the result of work(), run meanwhile."""

    def both(*accumulators: Ref) -> tuple[list[Array], Result]:
        for pair, accumulator in zip(pairs, accumulators, strict=True):
            start_product(block, accumulator, slot, pair)
        out = work()
        return [accumulator[...] for accumulator in accumulators], out

    out: tuple[list[Array], Result] = pl.run_scoped(both, *[plgpu.ACC(block.config.tile, jnp.float32)] * len(pairs))
    return out
