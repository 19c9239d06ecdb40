"""Static configuration of the TPU kernels: sizes, blocks, and the layout of the packed compose weights.

Everything in this module is known when the program is traced. `dcvit.dcmha.backends.tpu.tiling` chooses the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.numerics import LOG2_E, cdiv
from dcvit.dcmha.shapes import Array

LANES = 128  # columns of a vector register
SUBLANES = 8  # rows of a vector register of 32-bit numbers

Index: TypeAlias = int | Array  # a block number: static, or traced inside a kernel
Rows: TypeAlias = slice | pl.Slice  # some rows of a reference
Interpret: TypeAlias = bool | pltpu.InterpretParams  # the argument `interpret` of `pallas_call`
# Kernels of one of two families compute attention. In both, the MXU mixes heads by key-wise and static weights, and the
# VPU adds the query-wise branch:
#
#   "interleaved"  blocks of eight interleaved examples, each of one tile; of 1.4 to 1.7 times fewer bundles (about
#                  cycles, docs/performance.md) than "matrix" for ViT-S/16 on v5e and v6e
#   "matrix"       one example in tiles
Family: TypeAlias = Literal["interleaved", "matrix"]
IndexMap: TypeAlias = Callable[..., Index]  # from the indices of a grid to that of a block


class BranchOffsets(NamedTuple):
    """First packed column of each weight of one side (query-wise or key-wise) of one compose; None if it is absent."""

    down: int | None
    up: int | None
    gate: int | None


class ComposeLayout(NamedTuple):
    """The branches of one compose and the position of its weights in the packed arrays."""

    query: BranchOffsets
    key: BranchOffsets
    query_rank: int
    key_rank: int
    has_static: bool
    skip_factor: float  # multiplies the skip connection where the compose has no query-wise gate

    def with_keys_after(self, columns: int) -> ComposeLayout:
        """Return the layout in an array where `columns` query-wise columns precede the key-wise columns."""
        key = BranchOffsets(*(None if start is None else start + columns for start in self.key))
        return self._replace(key=key)

    def without_branches(self) -> ComposeLayout:
        """Return the layout of a compose that has the skip connection alone."""
        absent = BranchOffsets(None, None, None)
        return ComposeLayout(absent, absent, 0, 0, has_static=False, skip_factor=self.skip_factor)

    @property
    def mixes(self) -> bool:
        """True if there is a key-wise branch or a static projection, see `dcvit.dcmha.backends.tpu.mixing`."""
        return self.has_static or any(start is not None for start in self.key)

    def hidden_planes(self, groups: int) -> int:
        """Return the number of hidden planes of the query-wise projection: one for each rank and group."""
        return 0 if self.query.down is None else groups * self.query_rank


class KernelConfig(NamedTuple):
    """All static properties of one attention call: sizes before and after padding, blocks, and compose layouts."""

    family: Family
    heads: int
    key_heads: int
    head_dim: int
    groups: int
    first_query: int  # position of query 0 among the keys, as in `dcvit.dcmha.inputs.Options`
    queries: int
    keys: int
    block_q: int
    block_k: int
    queries_per_pass: int  # queries that the backward pass processes at once
    strip: int  # keys that vector operations process at once, and that share a matrix product that mixes heads
    strips_per_step: int  # strips that one step of a loop processes
    causal: bool
    window: int | None
    scale: float
    pre: ComposeLayout | None
    post: ComposeLayout | None
    vmem_bytes: int  # limit for one kernel
    dtype: np.dtype[Any]  # of the tokens: queries, keys, values and the output
    rounded: bool  # operands of products are bfloat16
    has_hidden: bool = False  # kernels compute the second layer of the dynamic weights
    compose_window: int | None = None  # as in `dcvit.dcmha.inputs.Options`; "matrix" only

    @property
    def layouts(self) -> tuple[ComposeLayout | None, ComposeLayout | None]:
        """The composes before and after the softmax."""
        return self.pre, self.post

    @property
    def mixes(self) -> tuple[bool, bool]:
        """True for a compose whose matrices the MXU multiplies, see `ComposeLayout.mixes`."""
        pre, post = (layout is not None and layout.mixes for layout in self.layouts)
        return pre, post

    @property
    def operand_dtype(self) -> np.dtype[Any]:
        """Dtype of the operands of matrix products."""
        dtype: np.dtype[Any] = jnp.dtype(jnp.bfloat16 if self.rounded else jnp.float32)
        return dtype

    @property
    def examples(self) -> int:
        """Number of examples of a block: 8 if they are interleaved, or else 1."""
        return SUBLANES if self.family == "interleaved" else 1

    @property
    def is_ordered(self) -> bool:
        """True if the layer is causal or has a window, so that no query attends to later keys."""
        return self.causal or self.window is not None

    @property
    def score_factor(self) -> float:
        """The factor that converts gradients of scores in units of log 2 to gradients of q·k."""
        return 1 / LOG2_E if self.pre is not None else self.scale

    @property
    def blocks_q(self) -> int:
        return cdiv(self.queries, self.block_q)

    @property
    def blocks_k(self) -> int:
        return cdiv(self.keys, self.block_k)

    @property
    def max_key_blocks(self) -> int:
        """The largest number of key blocks that any query block attends to."""

        spans = [self.last_key_block(i) - self.first_key_block(i) for i in range(self.blocks_q)]
        return max(int(span) for span in spans) + 1

    @property
    def attended_tiles(self) -> int:
        """The number of tiles of an example that are computed: those in which some query attends to some key."""
        return sum(int(self.last_key_block(i) - self.first_key_block(i)) + 1 for i in range(self.blocks_q))

    @property
    def tile_counts(self) -> tuple[int, ...]:
        """The numbers of attended tiles for each branch of `dcvit.dcmha.backends.tpu.stages.in_tile`."""
        if self.compose_window is None:
            return (self.attended_tiles,)
        return self.composed_tiles, self.attended_tiles - self.composed_tiles

    @property
    def composed_tiles(self) -> int:
        """The number of attended tiles in which some pair is inside of the window of composition."""
        tiles = [
            (i, j)
            for i in range(self.blocks_q)
            for j in range(int(self.first_key_block(i)), int(self.last_key_block(i)) + 1)
        ]
        return sum(bool(self.is_composed(i, j)) for i, j in tiles)

    def key_lanes(self, head: int) -> slice:
        """Return the lanes of the keys and values that query head `head` uses."""
        start = head // (self.heads // self.key_heads) * self.head_dim
        return slice(start, start + self.head_dim)

    def query_lanes(self, head: int) -> slice:
        """Return the lanes (or rows, where queries are columns) of query head `head`."""
        return slice(head * self.head_dim, (head + 1) * self.head_dim)

    def first_key_block(self, i: Index) -> Index:
        """Return the first key block that query block `i` attends to."""
        if self.window is None:
            return 0
        first_key = _maximum(i * self.block_q + (self.first_query - self.window + 1), 0)
        return _minimum(_quotient(first_key, self.block_k), self.blocks_k - 1)

    def last_key_block(self, i: Index) -> Index:
        """Return the last key block that query block `i` attends to; it is at least the first one."""
        if not self.is_ordered:
            return self.blocks_k - 1
        last_key = (i + 1) * self.block_q + (self.first_query - 1)
        return _minimum(_quotient(last_key, self.block_k), self.blocks_k - 1)

    def is_composed(self, i: Index, j: Index) -> bool | Array:
        """Return True if some pair of query block `i` and key block `j` is inside of the window of composition."""
        if self.compose_window is None:
            return True
        last_key = _minimum((j + 1) * self.block_k, self.keys) - 1
        return last_key > i * self.block_q + (self.first_query - self.compose_window)

    def query_block(self, j: Index, i: Index) -> Index:
        """Return query block `i`, or the nearest query block that attends to key block `j`.

        Pallas fetches a block only when its index changes, so the clamped index avoids fetches of unused blocks.
        """
        last = self.blocks_q - 1
        low: Index = 0
        if self.is_ordered:
            first_query = jnp.maximum(j * self.block_k - self.first_query, 0)
            low = jnp.minimum(_quotient(first_query, self.block_q), last)
        high: Index = last
        if self.window is not None:
            last_query = jnp.maximum(j * self.block_k + (self.block_k + self.window - 2 - self.first_query), 0)
            high = jnp.minimum(_quotient(last_query, self.block_q), last)
        return jnp.clip(i, low, jnp.maximum(high, low))


def _minimum(a: Index, b: int) -> Index:
    return min(a, b) if isinstance(a, int) else jnp.minimum(a, b)


def _maximum(a: Index, b: int) -> Index:
    return max(a, b) if isinstance(a, int) else jnp.maximum(a, b)


def _quotient(a: Index, b: int) -> Index:
    """Return a // b for a >= 0. Mosaic lowers the operator // of arrays only where a TPU is present."""
    return a // b if isinstance(a, int) else jax.lax.div(a, jnp.int32(b))


def conditions(steps: int, *times: int) -> dict[str, str]:
    """Return metadata of a kernel: how often its conditional parts run, for the estimates of scripts/tpu/step.py.

    Args:
      steps: the number of steps of the grid for one example.
      times: the number of these steps in which the condition holds, for each `pl.when` in the order of the kernel.
    """
    return {"steps": str(steps), "conditions": " ".join(map(str, times))}
