"""Exact attention in blocks of queries, with its own backward pass. It never holds an array of size H×T×S.

A block is a run of neighboring queries and all keys that they may attend to. A block contains complete rows of the
softmax, so that one pass is enough although the post-compose mixes heads after the normalization. The keys of a block
end at the diagonal in a causal layer and are those of the window in a local layer, so that time and memory of a local
layer are linear in T. The forward pass saves its inputs only; the backward pass computes the softmax of a block again.
With a saved log-sum-exp instead, which rounds large scores, rows of weights would not sum to one.

With a window of composition, the composes compute the part of a block that is near its queries alone (`block.Near`).

With segment ids, the keys of a block are instead those from the first to the last key that may have an id of its
queries. Their number depends on the data; it is rounded up to one of `document_sizes`, and a loop computes the blocks
of each size.

The operations on a block write out the sums over heads (`tile`). The code runs on all platforms.

In the functions of this module below `run`, the arrays of `Inputs` have the axes q (B H T D), k and v (B K S D), mask
(B #T #S), and compose weights as returned by `tile.arrange`; segments are unchanged. Functions on one example or block
have the same axes without B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from dcvit.dcmha import device
from dcvit.dcmha.backends.xla import reference, tile
from dcvit.dcmha.backends.xla.block import Block, Near, backward_block, forward_block
from dcvit.dcmha.device import map_examples
from dcvit.dcmha.gradients import with_backward
from dcvit.dcmha.inputs import Call, Inputs, Options
from dcvit.dcmha.numerics import cdiv, pad, round_up, statistics_dtype
from dcvit.dcmha.segments import Segments, blocks_in_common, first_and_last, pad_ids
from dcvit.dcmha.shapes import Array, Float, not_none

RUNS = 8  # loops over blocks in a causal layer, each with its own number of keys
# Scores of all heads of an example that is computed at once with others, and of all these examples. On two CPU cores,
# 64 examples of 16 tokens with 4 heads at once, or 8, take 0.67 or 0.80 of the time of a loop over them, with the same
# bits. With 8 or more heads or 32 or more tokens, nothing is gained: 0.9 to 1.3 of the time (output and gradients).
MAX_SMALL_EXAMPLE, SCORES_AT_ONCE = 1_024, 65_536
GROUP = 64  # with segments, queries that share their first key and their number of keys
GRAIN = 64  # with segments, keys whose ids have one bound
MIN_KEYS = 256  # with segments, fewest keys of a block, unless there are fewer in all

Side: TypeAlias = Literal["q", "k", ""]  # an array has a query axis, a key axis, or neither
Total = TypeVar("Total")


class Axis(NamedTuple):
    """The query axis or the key axis of an array of one example."""

    side: Side
    dim: int


# The axis of each array of `Inputs` without mask and segments, by the name of its field.
AXES = {
    "q": Axis("q", 1), "k": Axis("k", 1), "v": Axis("k", 1),
    "q1": Axis("q", -1), "q2": Axis("q", -1), "qg": Axis("q", -1),
    "k1": Axis("k", -1), "k2": Axis("k", -1), "kg": Axis("k", -1),
    "static": Axis("", 0),
}  # fmt: skip


class BlockSize(NamedTuple):
    """Approximate number of scores of one head in a block; fewest queries of a block, unless there are fewer in all."""

    scores: int
    queries: int
    most_queries: int = 2**31  # a block of few queries has fewer keys inside a window of composition


# The arrays of a compose stay in a core's cache. Without a compose, the sums of dk and dv, which each block reads and
# writes, take most of the time of a long sequence, unless a block has many queries.
COMPOSED, PLAIN = BlockSize(40_000, 16), BlockSize(80_000, 64)


class Run(NamedTuple):
    """A run of blocks of equal shape.

    Block i has `rows` queries from first + i·rows, and `keys` keys from first_key + i·step (moved inside the sequence).
    """

    first: int | Array
    blocks: int
    rows: int
    first_key: int | Array
    step: int
    keys: int


supports = reference.supports  # every call


def run(call: Call) -> Float[Array, "B T H D"]:
    """Compute the attention that a `Call` describes, and return the outputs of the heads.

    Scores and weights are float32, or float64 for float64 inputs. scale·q is rounded to q's dtype; where
    it could exceed the range of float16, the products are those of float32.
    """
    q, k, v = call.inputs[:3]
    inputs = call.inputs
    if q.dtype == jnp.float16 and abs(call.options.scale) > 1:
        inputs = inputs._replace(q=q.astype(jnp.float32), k=k.astype(jnp.float32), v=v.astype(jnp.float32))
    out: Array = _arrange_and_attend(call.options, inputs)
    return out.astype(q.dtype)


@functools.partial(jax.jit, static_argnums=0)  # trace once if called eagerly
def _arrange_and_attend(options: Options, inputs: Inputs) -> Array:
    """Return the outputs of the heads, computed for arrays with heads first and queries padded to complete blocks."""
    q, k, v, pre, post, mask, segments, *_ = inputs
    wide = statistics_dtype(q.dtype)
    queries, group = q.shape[1], _group(q.shape[1], segments)
    rows = _end(runs(queries, k.shape[1], options, _block_size(inputs, options), group))
    if segments is not None:
        rows = round_up(rows, not_none(group))
        segments = segments._replace(queries=pad_ids(segments.queries, rows))
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in ((q.astype(wide) * options.scale).astype(q.dtype), k, v))
    pre, post = (tile.arrange(w, len(q), wide) for w in (pre, post))
    arranged = Inputs(q, k, v, pre, post, None, segments)
    if rows > queries:

        def pad_queries(axis: Axis, x: Array) -> Array:
            return pad(x, axis.dim + (axis.dim > 0), rows) if axis.side == "q" else x

        arranged = _map_axes(pad_queries, arranged)._replace(segments=segments)
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, 0], (len(q), *mask.shape[2:]))
        if mask.shape[1] == queries and queries > 1:
            mask = pad(mask, 1, rows)
        arranged = arranged._replace(mask=mask)
    out = _attend(options, arranged)
    return jnp.swapaxes(out[:, :, :queries], 1, 2)


def runs(queries: int, keys: int, options: Options, size: BlockSize, group: int | None = None) -> list[Run]:
    """Return the runs of blocks of an example, in the order of their queries; the last block may extend past `queries`.

    With segments, the number of queries of a block divides `group`, a result of `_group`, or else None.
    """
    if options.window is not None and options.window < keys:
        rows = _rows(queries, options.window, size, group)
        extent = min(keys, options.window + rows - 1)
        return [Run(0, cdiv(queries, rows), rows, options.first_query + 1 - options.window, rows, extent)]
    if not options.causal and options.window is None:
        rows = _rows(queries, keys, size, group)
        return [Run(0, cdiv(queries, rows), rows, 0, 0, keys)]
    # On average, a causal mask removes half of the keys after those that all queries attend to; but none in one block.
    average = options.first_query + cdiv(max(1, keys - options.first_query), 2)
    rows = _rows(queries, keys if size.scores // average >= keys else average, size, group)
    blocks = cdiv(queries, rows)
    each = cdiv(blocks, RUNS)
    return [
        Run(first * rows, min(each, blocks - first), rows, 0, 0, min(keys, options.first_query + (first + each) * rows))
        for first in range(0, blocks, each)
    ]


def _rows(queries: int, keys: int, size: BlockSize, group: int | None) -> int:
    """Return the number of queries of a block with about `keys` keys, a multiple of `tile.FOLDS`.

    `queries` is the number of queries of all these blocks, which have equal sizes, the last one with padding.
    """
    if group is not None:
        return _rows_of_group(group, keys, size)
    most = min(max(size.queries, size.scores // keys // tile.FOLDS * tile.FOLDS), size.most_queries)
    blocks = cdiv(queries, most)
    return round_up(cdiv(queries, blocks), tile.FOLDS)


def _rows_of_group(group: int, keys: int, size: BlockSize) -> int:
    """Return the number of queries of a block with `keys` keys: `group`, halved until a block is small enough."""
    rows = group
    most = min(max(size.queries, size.scores // keys), size.most_queries)
    while rows > most and rows % (2 * tile.FOLDS) == 0:
        rows //= 2
    return rows


def _block_size(x: Inputs, options: Options) -> BlockSize:
    """Return the size of the blocks for these inputs."""
    if (window := options.compose_window) is not None:
        return BlockSize(PLAIN.scores, COMPOSED.queries, max(window // 2, COMPOSED.queries))
    return PLAIN if x.pre is None and x.post is None else COMPOSED


def _at_once(x: Inputs) -> int:
    """Return the number of examples to compute at once: more if they are small, to share the overhead of each loop."""
    scores = x.q.shape[1] * x.q.shape[2] * x.k.shape[2]
    small = scores <= MAX_SMALL_EXAMPLE and x.segments is None  # loops over documents differ between examples
    return SCORES_AT_ONCE // scores if small else 1


def _end(parts: list[Run]) -> int:
    """Return the number of queries in all runs of blocks, including padding."""
    return sum(part.blocks * part.rows for part in parts)


def _forward(options: Options, x: Inputs) -> Float[Array, "H T D"]:
    """Return the output of one example."""

    def write_block(block: Block, total: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(total, forward_block(block, options), block.start["q"], 1)

    return _fold_blocks(options, x, jnp.zeros_like(x.q), write_block)


def _backward(options: Options, x: Inputs, d_out: Float[Array, "H T D"]) -> Inputs:
    """Return the gradients of the inputs of one example."""
    wide = statistics_dtype(x.q.dtype)
    total = _map_axes(lambda axis, a: jnp.zeros(a.shape, wide if axis.side == "k" else a.dtype), x)

    def add_block(block: Block, total: Inputs) -> Inputs:
        rows = block.inputs.q.shape[1]
        part = backward_block(block, jax.lax.dynamic_slice_in_dim(d_out, block.start["q"], rows, 1), options)

        def add(axis: Axis, old: Array, new: Array) -> Array:
            side, dim = axis
            if not side:
                return old + new
            if side == "k":
                new = _sum(new, jax.lax.dynamic_slice_in_dim(old, block.start[side], new.shape[dim], dim))
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), block.start[side], dim)

        return _map_axes(add, total, part)

    total = _fold_blocks(options, x, total, add_block)
    return _map_axes(lambda axis, a, like: a.astype(like.dtype), total, x)


_attend = with_backward(
    forward=lambda options, x: (map_examples(_forward, options, x, at_once=_at_once(x)), None),
    backward=lambda options, x, _, d_out: map_examples(_backward, options, x, d_out, at_once=_at_once(x)),
)


@tile.no_inline
def _sum(x: Array, y: Array) -> Array:
    """Return x + y, not inlined: fused into an update of a larger array, XLA would write all of that array."""
    return x + y


def _fold_blocks(options: Options, x: Inputs, total: Total, body: Callable[[Block, Total], Total]) -> Total:
    """Apply total = body(block, total) to all blocks of an example, and return the last total.

    With segments, keys without an id in common with a block are skipped.
    """
    if x.segments is not None and not device.splits_arrays():
        return _fold_documents(options, x, total, body)
    for run in runs(x.q.shape[1], x.k.shape[1], options, _block_size(x, options), _group(x.q.shape[1], x.segments)):

        def step(index: int | Array, total: Total, run: Run = run) -> Total:
            return body(_cut(x, run, index, options), total)

        total = step(0, total) if run.blocks == 1 else jax.lax.fori_loop(0, run.blocks, step, total)
    return total


def _fold_documents(options: Options, x: Inputs, total: Total, body: Callable[[Block, Total], Total]) -> Total:
    """Return the result of `_fold_blocks` with segments: each block has only keys of the documents of its queries.

    Groups of neighboring queries (`_group`) are sorted by the smallest of `document_sizes` that holds their keys. For
    each size, a loop visits its groups and divides them into blocks. Groups that attend to no key are skipped, so that
    their share of the total stays zero.
    """
    group, keys = not_none(_group(x.q.shape[1], x.segments)), x.k.shape[1]
    first, end = (found.astype(int) for found in _needed_keys(options, x, group))
    sizes = document_sizes(keys if options.window is None else min(keys, options.window + group - 1))
    kinds = jnp.where(end > first, jnp.searchsorted(jnp.asarray(sizes), end - first), len(sizes)).astype(int)
    order = jnp.argsort(kinds).astype(int)
    bounds = jnp.searchsorted(kinds[order], jnp.arange(len(sizes) + 1)).astype(int)  # of the groups of each size
    for kind, size in enumerate(sizes):
        rows = _rows_of_group(group, size, _block_size(x, options))
        blocks = group // rows

        def step(index: Array, total: Total, size: int = size, rows: int = rows, blocks: int = blocks) -> Total:
            place = order[index // blocks]
            run = Run(place * group, blocks, rows, first[place], 0, size)
            return body(_cut(x, run, index % blocks, options), total)

        total = jax.lax.fori_loop(bounds[kind] * blocks, bounds[kind + 1] * blocks, step, total)
    return total


def document_sizes(most: int) -> list[int]:
    """Return the numbers of keys that a block with segments may have: multiples of most/8, and halvings of most/8."""
    step = min(most, max(MIN_KEYS, round_up(cdiv(most, RUNS), GRAIN)))
    sizes = {*range(step, most, step), most}
    while step > MIN_KEYS:
        step = max(MIN_KEYS, step // 2)
        sizes.add(step)
    return sorted(sizes)


def _group(queries: int, segments: Segments | None) -> int | None:
    """Return the size of a group, neighboring queries whose blocks start at the same key; None without segments."""
    return None if segments is None else min(GROUP, round_up(queries, tile.FOLDS))


def _needed_keys(options: Options, x: Inputs, group: int) -> tuple[Array, Array]:
    """Return, for each group of queries, the first key that it may attend to and the end, one after the last.

    For a group that attends to no key, the end is at most the first key.
    """
    queries, keys = x.q.shape[1], x.k.shape[1]
    first, last = first_and_last(blocks_in_common(not_none(x.segments), group, GRAIN))
    first, end = first * GRAIN, jnp.minimum((last + 1) * GRAIN, keys)
    at = options.first_query + jnp.arange(0, queries, group, dtype=jnp.int32)
    if options.causal or options.window is not None:
        end = jnp.minimum(end, at + group)
    if options.window is not None:
        first = jnp.maximum(first, at - (options.window - 1))
    return first, end


def _cut(x: Inputs, run: Run, index: int | Array, options: Options) -> Block:
    """Return block number `index` of a run: its inputs, its mask and its positions."""
    start = {
        "q": run.first + index * run.rows,
        "k": jnp.clip(run.first_key + index * run.step, 0, x.k.shape[1] - run.keys),
    }
    size = {"q": run.rows, "k": run.keys}

    def cut(axis: Axis, array: Array) -> Array:
        side, dim = axis
        return jax.lax.dynamic_slice_in_dim(array, start[side], size[side], dim) if side else array

    mask = x.mask
    if mask is not None:
        mask = mask if mask.shape[0] == 1 else cut(Axis("q", 0), mask)
        mask = mask if mask.shape[1] == 1 else cut(Axis("k", 1), mask)
    if options.causal or options.window is not None:
        query = options.first_query + start["q"] + jnp.arange(run.rows)[:, None]
        key = start["k"] + jnp.arange(run.keys)[None, :]
        local = key <= query
        if options.window is not None:
            local &= key > query - options.window
        mask = local if mask is None else mask & local
    if x.segments is not None:
        ids = cut(Axis("q", 0), x.segments.queries)[:, None] == cut(Axis("k", 0), x.segments.keys)[None, :]
        mask = ids if mask is None else mask & ids
    near = None
    if options.compose_window is not None:
        first_query = options.first_query + start["q"]
        near = Near.of_block(first_query, run.rows, start["k"], run.keys, options.compose_window)
    return Block(_map_axes(cut, x), mask, start, near)


def _map_axes(f: Callable[..., Array], x: Inputs, *others: Inputs) -> Inputs:
    """Map f(axis, array, …) over all arrays of `x` and `others` except mask and segments, with the axis from `AXES`."""

    def call(path: tuple[Any, ...], *arrays: Array) -> Array:
        return f(AXES[path[-1].name], *arrays)

    without = [y._replace(mask=None, segments=None) for y in (x, *others)]
    mapped: Inputs = jax.tree_util.tree_map_with_path(call, *without)
    return mapped
