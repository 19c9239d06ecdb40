"""Exact attention in blocks of queries, with its own backward pass: nothing of size H×T×S is ever alive. Any backend.

A block is a run of neighbouring queries with all keys that they may see: a row of the softmax is whole, so one pass
suffices although the post-compose mixes heads after their normalisation. Blocks of a causal layer stop at the
diagonal, those of a window see only its keys, so time and memory of a local layer are linear in T. Forward saves its
inputs and the logarithm of each softmax's denominator; backward computes the block's scores again.

Inside a block the heads are apart (`dcvit.dcmha.blockwise_tile`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dcvit.dcmha import blockwise_tile as tile
from dcvit.dcmha.compose import ComposeWeights, statistics_dtype
from dcvit.dcmha.shapes import Array, Bool, Float

BLOCK = 40_000  # scores of one head in a block, about
SEGMENTS = 8  # loops over blocks in a causal layer, each with its own number of keys


class Options(NamedTuple):
    """What is known when the program is compiled."""

    causal: bool
    window: int | None
    groups: int


class Inputs(NamedTuple):
    """What one example, or one block of it, attends with; also the gradients of all that."""

    q: Float[Array, "H T D"]
    k: Float[Array, "K S D"]
    v: Float[Array, "K S D"]
    pre: ComposeWeights | None  # as `tile.arrange` leaves them
    post: ComposeWeights | None
    mask: Bool[Array, "#T #S"] | None = None


class Segment(NamedTuple):
    """A run of blocks of equal shape: block i has queries first + i·rows … and keys first_key + i·step …"""

    first: int
    blocks: int
    rows: int
    first_key: int
    step: int
    keys: int


@functools.partial(jax.jit, static_argnames=("causal", "window", "groups", "scale"))  # outside of a jit, traced once
def attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    causal: bool,
    window: int | None,
    mask: Bool[Array, "#B 1 #T #S"] | None,
    groups: int,
    scale: float,
) -> Float[Array, "B T H D"]:
    """See `dcvit.dcmha.attention`, which checks the arguments. Scores and weights are float32 at least; `scale` is
    multiplied into q, in its dtype."""
    wide = statistics_dtype(q.dtype)
    options = Options(causal, window, groups)
    queries, rows = q.shape[1], _end(segments(q.shape[1], k.shape[1], options))
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * jnp.asarray(scale, q.dtype), k, v))
    pre, post = (tile.arrange(w, len(q), wide) for w in (pre, post))
    inputs = Inputs(q, k, v, pre, post)
    if rows > queries:
        inputs = _each(lambda side, axis, x: _pad(x, rows - queries, axis + (axis > 0)) if side == "q" else x, inputs)
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, 0], (len(q), *mask.shape[2:]))
        if mask.shape[1] == queries and queries > 1:
            mask = _pad(mask, rows - queries, 1)
        inputs = inputs._replace(mask=mask)
    out = jax.lax.map(functools.partial(_attend, options), inputs)
    return jnp.swapaxes(out[:, :, :queries], 1, 2)


def segments(queries: int, keys: int, options: Options) -> list[Segment]:
    """The blocks of one example, in the order of their queries, which are 0 … `queries` and perhaps a few beyond."""
    if options.window is not None and options.window < keys:
        rows = _rows(queries, options.window)
        extent = min(keys, options.window + rows - 1)
        return [Segment(0, -(-queries // rows), rows, 1 - options.window, rows, extent)]
    if not options.causal and options.window is None:
        rows = _rows(queries, keys)
        return [Segment(0, -(-queries // rows), rows, 0, 0, keys)]
    rows = _rows(queries, -(-keys // 2))  # half of them are behind the diagonal
    blocks = -(-queries // rows)
    each = -(-blocks // SEGMENTS)
    return [
        Segment(first * rows, min(each, blocks - first), rows, 0, 0, min(keys, (first + each) * rows))
        for first in range(0, blocks, each)
    ]


def _rows(queries: int, keys: int) -> int:
    """Queries of a block that has about so many keys; all blocks are of one size, which `tile.FOLDS` divides."""
    blocks = -(-queries // max(16, BLOCK // keys))
    return -(-queries // (blocks * tile.FOLDS)) * tile.FOLDS


def _end(parts: list[Segment]) -> int:
    return parts[-1].first + parts[-1].blocks * parts[-1].rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, x: Inputs) -> Float[Array, "H T D"]:
    return _forward(options, x)[0]


def _forward(options: Options, x: Inputs) -> tuple[Array, tuple[Inputs, Array]]:
    """The output, and what the backward pass needs: the inputs and log Σ exp of each query and head (H T)."""
    total = jnp.zeros_like(x.q), jnp.zeros(x.q.shape[:2], statistics_dtype(x.q.dtype))

    def block(cut: Inputs, seen: Array | None, start: dict[str, Any], total: Any) -> Any:
        parts = _forward_block(cut, seen, options)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(*pair, start["q"], 1) for pair in zip(total, parts, strict=True)
        )

    out, log_sum = _blocks(options, x, total, block)
    return out, (x, log_sum)


def _backward(options: Options, saved: tuple[Inputs, Array], d_out: Float[Array, "H T D"]) -> tuple[Inputs]:
    x, log_sum = saved
    wide = log_sum.dtype
    total = _each(lambda side, axis, a: jnp.zeros(a.shape, wide if side == "k" else a.dtype), x)

    def block(cut: Inputs, seen: Array | None, start: dict[str, Any], total: Inputs) -> Inputs:
        rows = cut.q.shape[1]
        log_sums, d_outs = (jax.lax.dynamic_slice_in_dim(a, start["q"], rows, 1) for a in (log_sum, d_out))
        part = _backward_block(cut, seen, log_sums, d_outs, options)

        def add(side: str, axis: int, old: Array, new: Array) -> Array:
            if not side:
                return old + new
            if side == "k":
                new = _added(new, jax.lax.dynamic_slice_in_dim(old, start[side], new.shape[axis], axis))
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start[side], axis)

        return _each(add, total, part)

    total = _blocks(options, x, total, block)
    return (_each(lambda side, axis, a, like: a.astype(like.dtype), total, x),)


_attend.defvjp(_forward, _backward)


def _forward_block(x: Inputs, seen: Array | None, options: Options) -> tuple[Array, Array]:
    """Eqn 4 on one block: the outputs (H t D), and the logarithms of the softmax's denominators (H t)."""
    groups = options.groups
    scores = _heads("htd,hsd->hts", x.q, x.k)
    scores = tile.mix(scores, tile.hidden(scores, x.pre, groups=groups), x.pre, seen, groups=groups)
    weights, log_sum = tile.softmax(scores)
    weights = tile.mix(weights, tile.hidden(weights, x.post, groups=groups), x.post, None, groups=groups)
    return _heads("hts,hsd->htd", weights.astype(x.v.dtype), x.v).astype(x.q.dtype), log_sum


def _backward_block(x: Inputs, seen: Array | None, log_sum: Array, d_out: Array, options: Options) -> Inputs:
    """The gradients of one block's inputs; those of what belongs to keys are sums over its queries."""
    groups = options.groups
    scores = _heads("htd,hsd->hts", x.q, x.k)
    pre = tile.hidden(scores, x.pre, groups=groups)
    weights = tile.softmax_again(scores, pre, x.pre, seen, log_sum, groups=groups)

    d_final = _heads("htd,hsd->hts", d_out, x.v)
    back = tile.transposed(x.post)
    post = tile.hidden(weights, x.post, groups=groups), tile.hidden(d_final, back, groups=groups)
    final = tile.mix(weights, post[0], x.post, None, groups=groups)
    dv = _heads("hts,htd->hsd", final.astype(d_out.dtype), d_out)
    d_post = x.post and tile.weight_gradients(weights, d_final, *post, x.post, groups=groups)
    d_composed = tile.softmax_gradient(weights, d_final, post[1], back, groups)

    back = tile.transposed(x.pre)
    d_hidden = tile.hidden(d_composed, back, groups=groups)
    d_pre = x.pre and tile.weight_gradients(scores, d_composed, pre, d_hidden, x.pre, groups=groups)
    d_scores = tile.mix(d_composed, d_hidden, back, None, groups=groups).astype(x.q.dtype)
    dq = _heads("hts,hsd->htd", d_scores, x.k)
    dk = _heads("hts,htd->hsd", d_scores, x.q)
    if len(x.q) != len(x.k):  # key heads are shared
        dk, dv = (y.reshape(len(x.k), -1, *y.shape[1:]).sum(1) for y in (dk, dv))
    return Inputs(dq, dk, dv, d_pre, d_post)


@tile.stage
def _added(x: Array, y: Array) -> Array:
    """A sum that is not fused into the update that stores it: XLA would then write all of what it updates."""
    return x + y


def _heads(equation: str, a: Array, b: Array) -> Array:
    """A product for each head, summed in float32 at least; neighbouring heads may share a key head in `b`."""
    if len(a) != len(b):
        b = jnp.repeat(b, len(a) // len(b), axis=0)
    return jnp.einsum(equation, a, b, preferred_element_type=statistics_dtype(a.dtype))


def _blocks(options: Options, x: Inputs, total: Any, body: Callable[..., Any]) -> Any:
    """Folds body(inputs, seen, start, total) over the blocks of an example."""
    keys = x.k.shape[1]
    for segment in segments(x.q.shape[1], keys, options):

        def step(index: Any, total: Any, segment: Segment = segment) -> Any:
            return body(*_cut(x, segment, index, options), total)

        total = step(0, total) if segment.blocks == 1 else jax.lax.fori_loop(0, segment.blocks, step, total)
    return total


def _cut(x: Inputs, segment: Segment, index: Any, options: Options) -> tuple[Inputs, Array | None, dict[str, Any]]:
    """Block `index` of a segment: its inputs, which keys its queries see (None: all), and where either side begins."""
    start = {
        "q": segment.first + index * segment.rows,
        "k": jnp.clip(segment.first_key + index * segment.step, 0, x.k.shape[1] - segment.keys),
    }
    size = {"q": segment.rows, "k": segment.keys}

    def cut(side: str, axis: int, array: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, start[side], size[side], axis) if side else array

    seen = x.mask
    if seen is not None:
        for axis, side in enumerate("qk"):
            seen = seen if seen.shape[axis] == 1 else cut(side, axis, seen)
    if options.causal or options.window is not None:
        query = start["q"] + jnp.arange(segment.rows)[:, None]
        key = start["k"] + jnp.arange(segment.keys)[None, :]
        near = key <= query
        if options.window is not None:
            near &= key > query - options.window
        seen = near if seen is None else seen & near
    return _each(cut, x), seen, start


def _each(f: Callable[..., Any], x: Inputs, *others: Inputs) -> Inputs:
    """f(side, axis, array, …) of all arrays but the mask: whose side ("q", "k" or ""), and where its length is."""

    def weights(*w: Any) -> ComposeWeights | None:
        if w[0] is None:
            return None
        fields = zip(("q", "q", "q", "k", "k", "k", ""), zip(*w, strict=True), strict=True)
        return ComposeWeights(*[None if arrays[0] is None else f(side, -1, *arrays) for side, arrays in fields])

    q, k, v, pre, post, _ = zip(x, *others, strict=True)
    return Inputs(f("q", 1, *q), f("k", 1, *k), f("k", 1, *v), weights(*pre), weights(*post))


def _pad(x: Array, count: int, axis: int) -> Array:
    """Zeros behind `x`: queries whose outputs nobody reads."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count)
    return jnp.pad(x, widths)
