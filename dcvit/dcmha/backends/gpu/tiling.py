"""Choice of blocks and tiles for the GPU kernels, the loop over the parts of a layer, and unsupported calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from dcvit.dcmha.backends.gpu.config import QUERIES, KernelConfig, Ranks
from dcvit.dcmha.backends.gpu.launch import Kind, output_shapes
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.device import compute_capability
from dcvit.dcmha.inputs import Call, Inputs, Options, UnsupportedError
from dcvit.dcmha.numerics import cdiv, round_up
from dcvit.dcmha.shapes import Array

Result = TypeVar("Result")
HOPPER = "9.0"  # compute capability of H100 and H200, whose matrix instruction the kernels use
# Keys of a warpgroup's tile; more keys would not leave enough registers for the hidden planes.
KEYS_FORWARD, KEYS_BACKWARD = 32, 16
MANY_PLANES = 4  # a compose with more hidden planes than this uses the narrow tile of the backward pass
WARPGROUPS = 2  # side by side along the keys, with shared queries
MAX_STAGES = 4  # slots of the ring; three if shared memory is short, as with 128 dimensions and gradients
ROWS_CAUSAL, ROWS_WINDOW = 512, 256  # queries of a block
KEY_LENGTHS = 4  # numbers of keys of the blocks of a causal layer, each of which needs kernels of its own
WORKSPACE_BYTES = 2**30  # most that the kernels write, with their mask, at one time
SHARED_MEMORY_BYTES = 220 * 1024  # for the ring and the staging buffers
MAX_RANK, MAX_HEAD_DIM, MAX_GROUP = 4, 128, 64
KINDS: tuple[tuple[Kind, Kind], ...] = (("statistics", "weights"), ("post_grad", "pre_grad"))  # forward, backward


class Partition(NamedTuple):
    """Sizes of the parts of a layer that are computed one after the other.

    Fields:
      examples: number of examples of a part, a divisor of the batch.
      rows: number of queries of a rectangle.
    """

    examples: int
    rows: int


class Span(NamedTuple):
    """Consecutive blocks of queries, each with the same number of keys, so that the same kernels compute them."""

    blocks: range
    keys: int


def check_supported(call: Call) -> None:
    """Raise UnsupportedError if the kernels do not support the device, the call, the dtypes or the sizes."""
    (q, k, v, pre, post, *_), options = call.inputs, call.options
    capability = compute_capability()
    if capability not in (HOPPER, None):  # without a GPU, kernels are lowered for one elsewhere
        raise UnsupportedError(f"the GPU kernels need a Hopper GPU (compute capability {HOPPER}), found {capability}")
    if call.is_plain:
        raise UnsupportedError("the GPU kernels need a composition; cudnn and reference compute plain attention")
    if options.first_query:
        raise UnsupportedError("the GPU kernels need all queries, found a part of them (mesh axis context)")
    if options.compose_window is not None:
        raise UnsupportedError("the GPU kernels compose all pairs, found a window of composition")
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        raise UnsupportedError(
            f"the GPU kernels support q, k and v of bfloat16, found {q.dtype}, {k.dtype} and {v.dtype}"
        )
    head_dim, group_heads = q.shape[3], q.shape[2] // options.groups
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(f"the GPU kernels support heads of up to {MAX_HEAD_DIM} dimensions, found {head_dim}")
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
    partition(call.inputs, options, backward=True)


def block_rows(queries: int, most: int) -> int:
    """Return the size, a multiple of 64 and at most `most`, of equal blocks that hold all queries."""
    return round_up(cdiv(queries, cdiv(queries, most)), QUERIES)


def partition(inputs: Inputs, options: Options, *, backward: bool) -> Partition:
    """Return the largest parts of a layer that fit the memory: with fewer examples first, then queries.

    Raises:
      UnsupportedError: the smallest part does not fit.
    """
    batch, queries, heads = inputs.q.shape[:3]
    config = make_config(inputs, options, QUERIES, backward=backward)
    rows = block_rows(
        queries, ROWS_WINDOW if options.window is not None else ROWS_CAUSAL if options.causal else queries
    )
    sizes = [Partition(n, rows) for n in range(batch, 0, -1) if batch % n == 0]
    sizes += [Partition(1, block_rows(queries, n)) for n in range(rows - QUERIES, 0, -QUERIES)]
    each_masked = inputs.segments is not None or (inputs.mask is not None and inputs.mask.shape[0] > 1)
    needed = 0
    for size in sizes:
        part = dataclasses.replace(config, batch=size.examples, queries=size.rows)
        keys = spans(queries, inputs.k.shape[1], options, part)[-1].keys
        masks = size.examples if each_masked else 1
        needed = workspace(dataclasses.replace(part, keys=keys), masks, backward=backward)
        if needed <= WORKSPACE_BYTES:
            return size
    raise UnsupportedError(
        f"the GPU kernels need {needed / 2**20:,.0f} MiB for {QUERIES} queries of one example, {heads} heads "
        f"and {inputs.k.shape[1]:,} keys, found a limit of {WORKSPACE_BYTES / 2**20:,.0f} MiB"
    )


def workspace(config: KernelConfig, masks: int, *, backward: bool) -> int:
    """Return the size in bytes of the arrays that the kernels write for one rectangle, and of its masks."""
    first, second = (output_shapes(config, kind) for kind in KINDS[backward])
    second = {"planes": first["planes"], **second} if "planes" in first else second
    written: int = max(sum(x.size * x.dtype.itemsize for x in arrays.values()) for arrays in (first, second))
    return written + 4 * masks * config.queries * config.keys


def spans(queries: int, keys: int, options: Options, config: KernelConfig) -> list[Span]:
    """Return the blocks of queries, grouped by their number of keys, a multiple of `config.block_keys`.

    A causal layer has at most `KEY_LENGTHS` different numbers of keys, a local layer has one.
    """
    blocks, keys = cdiv(queries, config.queries), round_up(keys, config.block_keys)
    if options.window is not None:
        return [Span(range(blocks), min(keys, round_up(config.queries + options.window - 1, config.block_keys)))]
    if not options.causal:
        return [Span(range(blocks), keys)]
    each = cdiv(min(blocks, cdiv(keys, config.queries)), KEY_LENGTHS)
    stops = [min((n + 1) * each, blocks) if n < KEY_LENGTHS - 1 else blocks for n in range(KEY_LENGTHS)]
    found, start = [], 0
    for stop in stops:
        if stop > start:
            found.append(Span(range(start, stop), min(keys, round_up(stop * config.queries, config.block_keys))))
        start = stop
    return found


def ranks(weights: ComposeWeights | None) -> Ranks:
    """Return the ranks of the projections of one compose; 0 for absent ones."""
    if weights is None:
        return Ranks()
    q, k = (0 if x is None else x.shape[2] for x in (weights.q1, weights.k1))
    return Ranks(q, k, key_wise=weights.k1 is not None or weights.kg is not None)


def make_config(inputs: Inputs, options: Options, queries: int, *, backward: bool) -> KernelConfig:
    """Return the configuration of the kernels for a layer with these inputs, without the number of keys."""
    q = inputs.q
    tile_keys = KEYS_BACKWARD if backward else KEYS_FORWARD
    ranks_pre, ranks_post = ranks(inputs.pre), ranks(inputs.post)
    if max(ranks_pre.planes, ranks_post.planes) > MANY_PLANES:
        tile_keys = KEYS_BACKWARD
    config = KernelConfig(
        batch=q.shape[0], groups=options.groups, group_heads=q.shape[2] // options.groups,
        heads_per_key_head=q.shape[2] // inputs.k.shape[2], queries=queries, keys=0,
        head_dim=round_up(q.shape[3], 16), pre=ranks_pre, post=ranks_post, tile_keys=tile_keys, warpgroups=WARPGROUPS,
        stages=MAX_STAGES,
    )  # fmt: skip
    return dataclasses.replace(config, stages=min(max_stages(config, 2 if backward else 1), MAX_STAGES))


def max_stages(config: KernelConfig, pairs: int) -> int:
    """Return the most ring slots, each for `pairs` pairs of arrays, that fit into shared memory with other buffers."""
    c = config
    wide = c.block_keys
    rows = 2 + c.pre.channels("q") + c.post.channels("q")
    cols = 2 + c.pre.channels("k") + c.post.channels("k")
    slot = pairs * (QUERIES + wide) * c.head_dim * 2 + 4 * (rows * QUERIES + cols * wide)
    staging = wide * QUERIES * 2 + c.warpgroups * rows * QUERIES * 4
    if pairs > 1:
        channels = max(c.pre.channels("k"), c.post.channels("k"))
        staging += c.warpgroups * QUERIES * channels * c.tile_keys * 2
    return (SHARED_MEMORY_BYTES - staging) // slot


def in_parts(compute: Callable[..., Result], size: Partition, args: tuple[Inputs, *tuple[Array, ...]]) -> Result:
    """Return compute(*args), computed part by part: one part of the examples at a time.

    Args:
      compute: function of inputs and more arrays, whose results also have the examples as their first axis.
      size: the sizes of the parts.
      args: inputs, or inputs, gradients of the output (B T H D), and log-sum-exp (B H T).
    """
    inputs, *more = args
    batch, mask = inputs.q.shape[0], inputs.mask
    if size.examples == batch:
        return compute(*args)
    common = mask if mask is not None and mask.shape[0] == 1 else None  # for all examples
    if common is not None:
        inputs = inputs._replace(mask=None)

    def part(args: tuple[Inputs, *tuple[Array, ...]]) -> Result:
        return compute(args[0] if common is None else args[0]._replace(mask=common), *args[1:])

    parts = jax.tree.map(lambda x: x.reshape(-1, size.examples, *x.shape[1:]), (inputs, *more))
    out: Result = jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), lax.map(part, parts))
    return out
