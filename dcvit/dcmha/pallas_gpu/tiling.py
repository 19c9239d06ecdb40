"""Mosaic GPU (Hopper) kernels of DCMHA on one tile: 64 queries and a few keys, all heads of a group. See pallas_gpu.

A kernel's block is (example, group, 64 queries, `warpgroups`·`keys` keys); each warpgroup takes all 64 queries and
`keys` keys, and one more only copies. Heads stream through a ring of `stages` slots in shared memory, several times
over: what couples the heads of a compose, the 2R hidden planes `hq_r`, `hk_r`, stays in float32 registers, and each
head's scores are multiplied anew in each sweep, because tensor cores idle and registers are scarce. No value passes
between blocks: sums over queries or keys leave as one partial sum for each tile, which XLA adds in a fixed order, so
the same inputs give the same bits.

Scores are in units of log 2, so that 2^L is the hardware's own exponential. A float32 `bias`, 0 where a query sees a
key and INVISIBLE elsewhere, carries every mask and padding. Sums over the 64 queries, which would cross all lanes and
warps, are a matmul with a one-hot matrix that leaves head j's sums in row j of an accumulator shared by all heads.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dcvit.dcmha.shapes import Array

QUERIES = 64  # rows of the one matmul shape that Hopper's tensor cores have
INVISIBLE = -1e30  # added to the score of a key that is not seen
PRODUCER_REGISTERS = 24  # of each thread of the warpgroup that only copies
FLOOR = -1e20  # no maximum is below it, so that a row that sees nothing sums to 0

Planes = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Branch:
    """Ranks of one compose's query-wise and key-wise projections, 0 where absent; its planes are in this order."""

    q: int = 0
    k: int = 0

    @property
    def planes(self) -> int:
        return self.q + self.k


@dataclasses.dataclass(frozen=True)
class Tiling:
    """All that a kernel's code depends on. Sizes in elements; B, T, S, D as padded."""

    batch: int
    groups: int
    heads: int  # of one group
    shared: int  # query heads of one key head
    queries: int
    key_count: int
    width: int
    parts: int  # bfloat16 terms of a float32 operand: 1 or 2
    pre: Branch
    post: Branch
    offset: int  # the first query's position less the first key's
    causal: bool
    window: int | None
    keys: int  # of one warpgroup's tile
    warpgroups: int
    stages: int
    dtype: Any  # of W and dS
    interpret: bool

    @property
    def tile(self) -> tuple[int, int]:
        return QUERIES, self.keys

    @property
    def registers(self) -> int:  # of each thread of a warpgroup that computes: all that the producer leaves
        return min(240, (65536 // 128 - PRODUCER_REGISTERS) // self.warpgroups // 8 * 8)

    @property
    def columns(self) -> int:  # tiles along the keys
        return self.key_count // self.keys

    def channel(self, side: str, which: str) -> int:
        """Where pre's or post's weights start among the channels of `rows` (side "q") or `cols` ("k").

        Channels are gate, R down, R up for each compose; then, in `rows`, the log-sum-exp and δ.
        """
        names = ["pre", "post", "lse", "delta"]
        sizes = [1 + 2 * getattr(branch, side) for branch in (self.pre, self.post)] + [1]
        return sum(sizes[: names.index(which)])


def swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The layout in shared memory in which the tensor cores and the copy engine take a matrix."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


def _load(ref: Any) -> Array:
    """From global memory into the layout of the matmul's results, by whatever accesses that takes."""
    parameter = inspect.signature(plgpu.load).parameters.get("idx")
    index = [] if parameter is None or parameter.default is not parameter.empty else [()]  # required until JAX 0.11
    return plgpu.load(ref, *index, layout=plgpu.Layout.WGMMA, optimized=False)


class Tile:
    """What the kernels' bodies share: this block's indices, its ring of slots, and the algebra of one tile."""

    def __init__(self, t: Tiling, operands: Sequence[Any], scratch: dict[str, Any], sweeps: int) -> None:
        self.t, self.scratch, self.sweeps = t, scratch, sweeps
        self.scores = scratch["scores"]  # (left, right) slots: q·k, and dO·v where there are gradients
        self.pairs, self.rows, self.cols, self.bias = operands
        self.b, self.g, self.i, self.j, self.w = (lax.axis_index(name) for name in ("b", "g", "i", "j", "w"))
        self.column = self.j * t.warpgroups + self.w
        self.at_rows = pl.ds(self.i * QUERIES, QUERIES)
        self.at_keys = pl.ds(self.column * t.keys, t.keys)
        self.seen: Array = jnp.float32(0)  # the tile of `bias`, once loaded

    # Registers: layouts are annotations only, which the interpreter does not know.

    def cast(self, x: Array, layout: Any) -> Array:
        return x if self.t.interpret else plgpu.layout_cast(x, layout)

    def spread(self, x: Array, axis: int) -> Array:
        """A vector of 64 rows (axis 0) or of this tile's keys (axis 1) as a tile."""
        vector = self.cast(x, plgpu.Layout.WGMMA.reduce(1 - axis))
        return self.cast(lax.broadcast_in_dim(vector, self.t.tile, (axis,)), plgpu.Layout.WGMMA)

    def zeros(self, count: int) -> Planes:
        return tuple(self.cast(jnp.zeros(self.t.tile, jnp.float32), plgpu.Layout.WGMMA) for _ in range(count))

    def load(self, ref: Any, *index: Any) -> Array:
        """This tile of a float32 array in global memory whose last axes are queries and keys."""
        where = ref.at[(*index, self.at_rows, self.at_keys)]
        return where[...] if self.t.interpret else _load(where)

    def save(self, ref: Any, planes: Planes) -> None:
        for number, plane in enumerate(planes):
            self.store(ref.at[self.b, self.g, number, self.at_rows, self.at_keys], plane)

    def store(self, where: Any, x: Array) -> None:
        if self.t.interpret or not hasattr(plgpu, "store"):
            where[...] = x
        else:  # JAX 0.12 and newer refuse partly filled cache lines unless told so
            plgpu.store(where, x, optimized=False)

    def restore(self, ref: Any, first: int, count: int) -> Planes:
        return tuple(self.load(ref, self.b, self.g, number) for number in range(first, first + count))

    # The ring: step s of all sweeps is head s % heads, in slot s % stages.

    def copies(self, head: Any, slot: Any) -> list[tuple[Any, Any]]:
        t, h = self.t, self.g * self.t.heads + head
        key_head = lax.div(h, jnp.int32(t.shared))
        found = [(self.rows.at[self.b, h, :, self.at_rows], self.scratch["rows"].at[slot])]
        for (left, right), (lefts, rights) in zip(self.pairs, self.scores, strict=True):
            for part in range(t.parts):
                found.append((left[part].at[self.b, self.at_rows, h], lefts.at[slot, part]))
                for w in range(t.warpgroups):
                    keys = pl.ds((self.j * t.warpgroups + w) * t.keys, t.keys)
                    found.append((right[part].at[self.b, keys, key_head], rights.at[slot, part, w]))
        for w in range(t.warpgroups):
            keys = pl.ds((self.j * t.warpgroups + w) * t.keys, t.keys)
            found.append((self.cols.at[self.b, h, :, keys], self.scratch["cols"].at[slot, w]))
        return found

    def fill(self, step: Any) -> None:
        slot = lax.rem(step, jnp.int32(self.t.stages))
        for source, target in self.copies(lax.rem(step, jnp.int32(self.t.heads)), slot):
            plgpu.copy_gmem_to_smem(source, target, self.scratch["full"].at[slot])

    def produce(self) -> None:
        """What the last warpgroup does: it fills slots as soon as the others are through with them."""
        t = self.t
        if not t.interpret:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def step(now: Any, carry: Any) -> Any:
            @pl.when(now >= t.stages)
            def _() -> None:
                plgpu.barrier_wait(self.scratch["empty"].at[lax.rem(now, jnp.int32(t.stages))])

            self.fill(now)
            return carry

        total = self.sweeps * t.heads
        lax.fori_loop(jnp.int32(0), jnp.int32(total), step, ())
        for last in range(max(0, total - t.stages), total):  # no phase of a barrier may end unseen
            plgpu.barrier_wait(self.scratch["empty"].at[last % t.stages])

    def sweep(self, number: int, body: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """carry = body(head, slot, carry) for each head of the group."""
        t = self.t

        def step(head: Any, carry: Any) -> Any:
            slot = lax.rem(number * t.heads + head, jnp.int32(t.stages))
            plgpu.barrier_wait(self.scratch["full"].at[slot])
            carry = body(head, slot, carry)
            plgpu.barrier_arrive(self.scratch["empty"].at[slot])
            return carry

        return lax.fori_loop(jnp.int32(0), jnp.int32(t.heads), step, carry)

    # The algebra. Channels are numbers into `rows` and `cols`.

    def product(self, slot: Any, which: int = 0) -> Array:
        """q·k (0) or dO·v (1) of one head: 64 queries × keys, float32."""
        left, right = (side.at[slot] for side in self.scores[which])
        terms = [(0, 0), (0, 1), (1, 0)][: 1 if self.t.parts == 1 else 3]  # low·low is below float32's rounding
        if self.t.interpret:  # which cannot transpose a reference
            mine = [(left[a].astype(jnp.float32), right[b, self.w].astype(jnp.float32)) for a, b in terms]
            return sum((jnp.dot(a, b.T) for a, b in mine), jnp.zeros(self.t.tile, jnp.float32))

        def multiply(accumulator: Any) -> Array:
            for a, b in terms:
                plgpu.wgmma(accumulator, left.at[a], plgpu.transpose_ref(right.at[b, self.w], (1, 0)))
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.ACC(self.t.tile, jnp.float32))

    def row(self, slot: Any, channel: int) -> Array:
        return self.spread(self.scratch["rows"][slot, channel], 0)

    def col(self, slot: Any, channel: int) -> Array:
        return self.spread(self.scratch["cols"][slot, self.w, channel], 1)

    def weights(self, slot: Any, which: str, up: bool) -> list[Array]:
        """The up or down weights of one head that belong to each plane of pre or post."""
        branch: Branch = getattr(self.t, which)
        q, k = (self.t.channel(side, which) + 1 for side in ("q", "k"))
        rows = [self.row(slot, q + up * branch.q + r) for r in range(branch.q)]
        return rows + [self.col(slot, k + up * branch.k + r) for r in range(branch.k)]

    def down(self, slot: Any, which: str, planes: Planes, x: Array, transposed: bool = False) -> Planes:
        """One head's share in the hidden planes: hq_r += x·q1_r, hk_r += x·k1_r; transposed, with q2 and k2."""
        found = self.weights(slot, which, up=transposed)
        return tuple(plane + x * weight for plane, weight in zip(planes, found, strict=True))

    def up(self, slot: Any, which: str, planes: Planes, x: Array, transposed: bool = False) -> Array:
        """One head of the compose of all x: x·(gates) + Σ_r hq_r·q2_r + hk_r·k2_r; transposed, with q1 and k1."""
        q, k = (self.t.channel(side, which) for side in ("q", "k"))
        out = x * (self.row(slot, q) + self.col(slot, k))
        for plane, weight in zip(planes, self.weights(slot, which, up=not transposed), strict=True):
            out = out + plane * weight
        return out

    def logits(self, slot: Any, planes: Planes, s: Array) -> Array:
        return self.up(slot, "pre", planes, s) + self.seen

    def probabilities(self, slot: Any, planes: Planes, s: Array) -> Array:
        """P = 2^(L - log-sum-exp), exactly 0 at keys that are not seen."""
        return jnp.exp2(self.logits(slot, planes, s) - self.row(slot, self.t.channel("q", "lse")))

    def sums(self, which: str, a: Array, g: Array, hidden: Planes, back: Planes) -> tuple[list[Array], list[Array]]:
        """Products whose sums over keys (first) and queries (second) are the gradients of one head's weights.

        For a compose of `a` with output cotangent `g`, `hidden` its planes and `back` those of its transpose.
        """
        q = getattr(self.t, which).q
        gate = a * g
        rows = [gate] + [a * x for x in back[:q]] + [g * x for x in hidden[:q]]
        cols = [gate] + [a * x for x in back[q:]] + [g * x for x in hidden[q:]]
        return rows, cols

    # Leaving. Each warpgroup has staging buffers that its threads only write, and the copy engine and the tensor cores
    # only read: `reuse` and `commit` hold all the barriers that these need, and the compiler is told to add none.

    def reuse(self) -> None:
        """Waits until the staging buffers may be written again."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def stage_rows(self, vectors: Sequence[Array]) -> None:
        for channel, x in enumerate(vectors):
            self.scratch["row_sums"][self.w, channel] = x

    def stage_tile(self, x: Array) -> None:
        self.scratch["tile"][self.w] = x.astype(self.t.dtype)

    def stage_cols(self, head: Any, tiles: Sequence[Array]) -> None:
        t = self.t
        if t.interpret:
            rows = lax.broadcasted_iota(jnp.int32, (QUERIES, QUERIES), 0)
        else:
            rows = plgpu.broadcasted_iota(jnp.int32, (QUERIES, QUERIES), 0, layout=plgpu.Layout.WGMMA)
        self.scratch["onehot"][self.w] = jnp.where(rows == head, 1.0, 0.0).astype(jnp.bfloat16)
        for channel, x in enumerate(tiles):
            for part in range(t.parts):
                high = x.astype(jnp.bfloat16)
                self.scratch["products"][self.w, part, :, pl.ds(channel * t.keys, t.keys)] = high
                x = x - high.astype(jnp.float32)

    def add_cols(self, accumulator: Any) -> None:
        """Adds the sums over queries of the staged products to row `head` of the accumulator."""
        for part in range(self.t.parts):
            plgpu.wgmma(accumulator, self.scratch["onehot"].at[self.w], self.scratch["products"].at[self.w, part])
        plgpu.wgmma_wait(0)

    def tile_target(self, out: dict[str, Any], head: Any) -> Any:
        return out["tile"].at[self.b, self.g * self.t.heads + head, self.at_rows, self.at_keys]

    def row_target(self, out: dict[str, Any], head: Any) -> Any:
        return out["row_sums"].at[self.b, self.g * self.t.heads + head, self.column, :, self.at_rows]

    def save_cols(self, ref: Any, x: Array) -> None:
        wide = ref.shape[-1] // self.t.columns
        self.store(ref.at[self.b, self.g, self.i, pl.ds(0, QUERIES), pl.ds(self.column * wide, wide)], x)

    def sweep_with_cols(self, body: Callable[[Any, Any], None], ref: Any) -> None:
        """The last sweep, whose body stages products to be summed over the queries; the sums are saved at its end."""
        shape = (QUERIES, ref.shape[-1] // self.t.columns)

        def scoped(accumulator: Any) -> Array:
            def step(head: Any, slot: Any, carry: Any) -> Any:
                body(head, slot)
                self.add_cols(accumulator)
                return carry

            self.sweep(self.sweeps - 1, step, ())
            return accumulator[...]

        self.save_cols(ref, pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32)))

    def leave(self, targets: Sequence[tuple[str, Any]]) -> None:
        plgpu.commit_smem()
        for name, target in targets:
            plgpu.copy_smem_to_gmem(self.scratch[name].at[self.w], target)

    def visible(self) -> Any:
        """Whether any query of this block sees any of its keys, by the geometry; None: all blocks do."""
        t = self.t
        if not t.causal:
            return None
        first_query = self.i * QUERIES + t.offset
        first_key = self.j * (t.warpgroups * t.keys)
        found = first_key <= first_query + (QUERIES - 1)
        if t.window is not None:
            found = jnp.logical_and(found, first_key + t.warpgroups * t.keys - 1 > first_query - t.window)
        return found
