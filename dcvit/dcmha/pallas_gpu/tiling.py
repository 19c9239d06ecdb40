"""Choice of rectangles and tiles for the GPU kernels, and the cases that they do not support."""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.errors import UnsupportedError
from dcvit.dcmha.inputs import Inputs, Options
from dcvit.dcmha.numerics import round_up
from dcvit.dcmha.pallas_gpu import HOPPER, compute_capability
from dcvit.dcmha.pallas_gpu.config import QUERIES, KernelConfig, Ranks
from dcvit.dcmha.shapes import Array

# Keys of a warpgroup's tile; more keys would not leave enough registers for the hidden planes.
KEYS_FORWARD, KEYS_BACKWARD = 32, 16
MANY_PLANES = 4  # a compose with more hidden planes than this uses the narrow tile of the backward pass
WARPGROUPS = 2  # side by side along the keys, with shared queries
MAX_STAGES = 4  # slots of the ring; fewer if shared memory is short
ROWS_CAUSAL, ROWS_WINDOW = 512, 256  # queries of a rectangle
WORKSPACE_BYTES = 2**29  # of one H×rows×keys array
SHARED_MEMORY_BYTES = 220 * 1024  # for the ring and the staging buffers
MAX_RANK, MAX_HEAD_DIM, MAX_GROUP = 4, 256, 64


class Static(NamedTuple):
    """Static options of a layer. `options.causal` is True for a layer with a window."""

    options: Options
    interpret: bool


class Rectangle(NamedTuple):
    """Queries `rows` and keys `cols`, each a range [from, to); the queries attend to no other keys."""

    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def size(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]


def check_supported(inputs: Inputs, options: Options) -> None:
    """Raise UnsupportedError if the kernels do not support the device, the dtypes or the sizes."""
    q, k, v, pre, post, *_ = inputs
    capability = compute_capability()
    if capability != HOPPER:
        raise UnsupportedError(f"the GPU kernels need a Hopper GPU (compute capability {HOPPER}), found {capability}")
    if options.first_query:
        raise UnsupportedError("the GPU kernels need all queries, found a part of them (mesh axis context)")
    if q.dtype not in (jnp.bfloat16, jnp.float32) or not q.dtype == k.dtype == v.dtype:
        raise UnsupportedError(
            "the GPU kernels support q, k and v that are all bfloat16 or all float32,"
            f" found {q.dtype}, {k.dtype} and {v.dtype}"
        )
    head_dim, group_heads = q.shape[3], q.shape[2] // options.groups
    max_head_dim = MAX_HEAD_DIM // (1 if q.dtype == jnp.bfloat16 else 2)
    if head_dim > max_head_dim:
        raise UnsupportedError(
            f"the GPU kernels support heads of up to {max_head_dim} dimensions in {q.dtype}, found {head_dim}"
        )
    if group_heads > MAX_GROUP:
        raise UnsupportedError(f"the GPU kernels support groups of up to {MAX_GROUP} heads, found {group_heads}")
    for weights in (pre, post):
        if weights is None:
            continue
        if weights.static is not None:
            raise UnsupportedError("the GPU kernels do not support a static projection")
        for x in (weights.q1, weights.k1):
            if x is not None and x.shape[2] > MAX_RANK:
                raise UnsupportedError(f"the GPU kernels support ranks up to {MAX_RANK}, found {x.shape[2]}")


def rectangles(q: Array, k: Array, options: Options) -> list[Rectangle]:
    """Split the queries so that H×rows×keys values fit into `WORKSPACE_BYTES`; each part has the keys it attends to."""
    batch, queries, heads = q.shape[:3]
    keys, itemsize = k.shape[1], q.dtype.itemsize
    most = ROWS_WINDOW if options.window is not None else ROWS_CAUSAL if options.causal else queries
    width = min(keys, options.window + most) if options.window is not None else keys
    fitting = max(QUERIES, WORKSPACE_BYTES // (batch * heads * width * itemsize) // QUERIES * QUERIES)
    rows = min(most, fitting)
    found = []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        last = min(keys, stop) if options.causal else keys
        first = 0 if options.window is None else max(0, start - options.window + 1) // QUERIES * QUERIES
        found.append(Rectangle((start, stop), (first, last)))
    return found


def ranks(weights: ComposeWeights | None) -> Ranks:
    """Return the ranks of a compose."""
    if weights is None:
        return Ranks()
    return Ranks(*(0 if x is None else x.shape[2] for x in (weights.q1, weights.k1)))


def make_config(inputs: Inputs, static: Static, rectangle: Rectangle, *, backward: bool) -> KernelConfig:
    """Return the configuration of the kernels for one rectangle of a layer with these inputs."""
    q, options = inputs.q, static.options
    tile_keys = KEYS_BACKWARD if backward else KEYS_FORWARD
    ranks_pre, ranks_post = ranks(inputs.pre), ranks(inputs.post)
    if max(ranks_pre.planes, ranks_post.planes) > MANY_PLANES:
        tile_keys = KEYS_BACKWARD
    pairs = 2 if backward else 1
    queries, keys = rectangle.size
    config = KernelConfig(
        batch=q.shape[0], groups=options.groups, group_heads=q.shape[2] // options.groups,
        heads_per_key_head=q.shape[2] // inputs.k.shape[2], queries=round_up(queries, QUERIES), keys=0,
        head_dim=round_up(q.shape[3], 16), parts=1 if q.dtype == jnp.bfloat16 else 2, pre=ranks_pre, post=ranks_post,
        offset=rectangle.rows[0] - rectangle.cols[0], causal=options.causal, window=options.window,
        tile_keys=tile_keys, warpgroups=interpretable_warpgroups() if static.interpret else WARPGROUPS, stages=2,
        dtype=q.dtype, interpret=static.interpret,
    )  # fmt: skip
    stages = max_stages(config, pairs)
    if stages < 2:  # float32 heads with many dimensions
        config = dataclasses.replace(config, warpgroups=1)
        stages = max_stages(config, pairs)
    padded_keys = round_up(keys, config.block_keys)
    return dataclasses.replace(config, keys=padded_keys, stages=min(stages, MAX_STAGES))


def interpretable_warpgroups() -> int:
    """Return the number of warpgroups that can be interpreted.

    Each warpgroup, and the one that copies, blocks a thread of XLA's thread pool.
    """
    return max(1, min(WARPGROUPS, max(os.cpu_count() or 1, jax.local_device_count("cpu")) - 1))


def max_stages(config: KernelConfig, pairs: int) -> int:
    """Return the number of ring slots that fit into shared memory beside the staging buffers."""
    c = config
    wide, itemsize = c.block_keys, jnp.dtype(c.dtype).itemsize
    rows = 2 + c.pre.channels("q") + c.post.channels("q")
    cols = 2 + c.pre.channels("k") + c.post.channels("k")
    slot = pairs * c.parts * (QUERIES + wide) * c.head_dim * 2 + 4 * (rows * QUERIES + cols * wide)
    staging = wide * QUERIES * itemsize + c.warpgroups * rows * QUERIES * 4
    if pairs > 1:
        channels = max(c.pre.channels("k"), c.post.channels("k"))
        staging += c.warpgroups * QUERIES * (c.parts * channels * c.tile_keys + QUERIES) * 2
    return (SHARED_MEMORY_BYTES - staging) // slot
