"""What is static of one attention on a TPU: sizes, blocks, and where each weight lies among the packed ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def quotient(a: Any, b: int) -> Any:
    """a // b of a >= 0; Mosaic lowers // only where a TPU is at hand."""
    return jax.lax.div(a, jnp.int32(b)) if isinstance(a, jax.Array) else a // b


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


class Side(NamedTuple):
    """Where the weights of one side (queries or keys) of one compose begin among that side's rows or columns."""

    down: Any  # a number, or None where the branch is absent
    up: Any
    gate: Any


class Form(NamedTuple):
    """The static form of one compose."""

    q: Side
    k: Side
    rank_q: int
    rank_k: int
    static: bool
    skip: float  # the factor of the skip connection
    first_column: int  # of its key-wise weights
    columns: int


class Case(NamedTuple):
    """All that is static of one attention: sizes before and after padding, blocks, and which branches exist."""

    heads: int
    key_heads: int
    width: int
    groups: int
    first_query: int  # of these queries, where they are a part of all
    queries: int
    keys: int
    block_q: int
    block_k: int
    part: int  # queries that the backward pass takes at once
    strip: int  # keys
    unroll: int  # strips in one step of a loop
    causal: bool
    window: int | None
    masked: bool
    scale: float
    pre: Form | None
    post: Form | None
    vmem: int
    packed: bool  # key-wise weights are pairs of bfloat16 in words of 32 bits

    @property
    def single(self) -> bool:
        """Whether one tile holds all scores of an example."""
        return self.blocks_q == self.blocks_k == 1

    @property
    def blocks_q(self) -> int:
        return pl.cdiv(self.queries, self.block_q)

    @property
    def blocks_k(self) -> int:
        return pl.cdiv(self.keys, self.block_k)

    def key_head(self, head: int) -> slice:
        """The lanes of keys and values that a query head attends to."""
        start = head // (self.heads // self.key_heads) * self.width
        return slice(start, start + self.width)

    def query_head(self, head: int) -> slice:
        return slice(head * self.width, (head + 1) * self.width)

    def first_key_block(self, i: Any, np: Any = jnp) -> Any:
        """The first key block that query block `i` sees; of jax.numpy or numpy."""
        if self.window is None:
            return 0
        return np.minimum(
            quotient(np.maximum(i * self.block_q + (self.first_query - self.window + 1), 0), self.block_k),
            self.blocks_k - 1,
        )

    def last_key_block(self, i: Any, np: Any = jnp) -> Any:
        """The last key block that query block `i` sees; no less than the first."""
        if not self.ordered:
            return self.blocks_k - 1
        return np.minimum(quotient((i + 1) * self.block_q + (self.first_query - 1), self.block_k), self.blocks_k - 1)

    def query_block(self, j: Any, i: Any) -> Any:
        """Query block `i`, or the nearest one that sees key block `j`, so that nothing is fetched in vain."""
        last = self.blocks_q - 1
        low: Any = 0
        if self.ordered:
            low = jnp.minimum(quotient(jnp.maximum(j * self.block_k - self.first_query, 0), self.block_q), last)
        high: Any = last
        if self.window is not None:
            reach = jnp.maximum(j * self.block_k + (self.block_k + self.window - 2 - self.first_query), 0)
            high = jnp.minimum(quotient(reach, self.block_q), last)
        return jnp.clip(i, low, jnp.maximum(high, low))

    @property
    def visits(self) -> int:
        """The most key blocks that any query block sees."""
        i = numpy.arange(self.blocks_q)
        return int(numpy.max(self.last_key_block(i, numpy) - self.first_key_block(i, numpy))) + 1

    @property
    def ordered(self) -> bool:
        return self.causal or self.window is not None


def hidden_planes(case: Case, form: Form | None) -> int:
    """How many hidden planes a compose has."""
    sides = [] if form is None else [(form.q, form.rank_q), (form.k, form.rank_k)]
    return case.groups * sum(rank for side, rank in sides if side.down is not None)


def specifications(
    case: Case, inputs: dict[str, Any], query_block: Any, key_block: Any, **own: Any
) -> dict[str, pl.BlockSpec]:
    """Block specifications of the inputs, by name.

    The maps give the number of a block of queries or keys from the grid's indices, the first of which, the example, is
    left out. An input may have a map of its `own`.
    """
    specs: dict[str, pl.BlockSpec] = {}
    for name, x in inputs.items():
        keys = own.get(name, key_block)
        if name in ("q", "do"):
            specs[name] = pl.BlockSpec((1, case.block_q, x.shape[2]), lambda b, *n: (b, query_block(*n), 0))
        elif name in ("k", "v", "wk"):
            specs[name] = pl.BlockSpec((1, case.block_k, x.shape[2]), lambda b, *n, keys=keys: (b, keys(*n), 0))
        elif name == "wq":
            block = 1, case.block_q // 128, *x.shape[2:]
            specs[name] = pl.BlockSpec(block, lambda b, *n: (b, query_block(*n), 0, 0))
        elif name in ("lse", "delta"):
            specs[name] = pl.BlockSpec((1, x.shape[1], case.block_q), lambda b, *n: (b, 0, query_block(*n)))
        elif name == "mask":
            block, each = (1, case.block_k, case.block_q), int(x.shape[0] > 1)
            specs[name] = pl.BlockSpec(block, lambda b, *n, each=each, keys=keys: (b * each, keys(*n), query_block(*n)))
        else:
            specs[name] = pl.BlockSpec(memory_space=pltpu.SMEM)
    return specs
