"""Static configuration of the GPU kernels, and the channels of their packed compose weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias

from jax.experimental.pallas import mosaic_gpu as plgpu

QUERIES = 64  # rows of a tile: the only number of rows of Hopper's matrix instruction
DEPTH = 16  # summands of one such instruction
MIN_ROW_MAX = -1e20  # lower bound of row maxima, so that the sum of a fully masked row is 0

Side: TypeAlias = Literal["q", "k"]
Which: TypeAlias = Literal["pre", "post"]


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Ranks of one compose's query-wise and key-wise projections; 0 for an absent projection.

    `key_wise` is True if the compose has key-wise weights. Otherwise the kernels skip its key-wise gate, which is zero.
    """

    q: int = 0
    k: int = 0
    key_wise: bool = False

    @property
    def planes(self) -> int:
        """Number of hidden planes, which down projections compute; the query-wise planes come first."""
        return self.q + self.k

    def channels(self, side: Side) -> int:
        """Return the number of weights of one side ("q" or "k") for a head: a gate, R down and R up projections."""
        return 1 + 2 * (self.q if side == "q" else self.k)


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """All properties that the code of a kernel depends on. Sizes include padding."""

    batch: int
    groups: int
    group_heads: int  # heads of one group
    heads_per_key_head: int
    queries: int
    keys: int
    head_dim: int
    pre: Ranks
    post: Ranks
    tile_keys: int  # keys of one warpgroup's tile
    warpgroups: int
    stages: int  # slots of the ring in shared memory

    @property
    def heads(self) -> int:
        return self.groups * self.group_heads

    @property
    def tile(self) -> tuple[int, int]:
        """Numbers of queries and keys of one warpgroup's tile."""
        return QUERIES, self.tile_keys

    @property
    def block_keys(self) -> int:
        """Number of keys of a thread block, those of all its warpgroups."""
        return self.warpgroups * self.tile_keys

    @property
    def key_tiles(self) -> int:
        return self.keys // self.tile_keys

    def ranks(self, which: Which) -> Ranks:
        return self.pre if which == "pre" else self.post

    def channel(self, side: Side, which: Which) -> int:
        """Return the first channel (number of a weight) of a compose among the query-wise or the key-wise weights.

        The channels of each compose are the gate, R down projections and R up projections. The query-wise channels end
        with the log-sum-exp and delta.
        """
        return 0 if which == "pre" else self.pre.channels(side)

    def channels(self, side: Side, composes: Sequence[Which], count: int) -> range:
        """Return the range, among `count` channels of one side, that a sweep with the weights of `composes` reads."""
        used = [which for which in composes if side == "q" or self.ranks(which).key_wise]
        if not used:
            return range(0)
        if side == "k" and self.block_keys % 32:  # copies have a multiple of 128 bytes; there are 2·n channels in all
            return range(count)
        stop = count if used[-1] == "post" else self.pre.channels(side)
        return range(self.channel(side, used[0]), stop)

    @property
    def lse_channel(self) -> int:
        return self.pre.channels("q") + self.post.channels("q")

    @property
    def delta_channel(self) -> int:
        return self.lse_channel + 1


def swizzled(columns: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Return the shared-memory layout of a bfloat16 matrix that the tensor cores and the copy engine require."""
    swizzle = plgpu.find_swizzle(columns * 16)
    return plgpu.TilingTransform((8, 8 * swizzle // 16)), plgpu.SwizzleTransform(swizzle)
