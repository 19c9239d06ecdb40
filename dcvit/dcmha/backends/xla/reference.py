"""Reference attention: Eqn 4 as written, with all H×T×S scores in memory. Tests compare the others with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dcvit.dcmha.compose import ComposeWeights, compose
from dcvit.dcmha.inputs import Call, Inputs, Options
from dcvit.dcmha.numerics import statistics_dtype
from dcvit.dcmha.segments import Segments, segment_mask
from dcvit.dcmha.shapes import Array, Bool, Float


class Dropout(NamedTuple):
    """Dropout of composed attention weights, drawn as flax draws it.

    Fields:
      key: random key.
      rate: share of the weights that become zero; the others are divided by 1 - rate. A rate of 1 removes all.
      broadcast: all examples and heads lose the weights of the same pairs of tokens.
    """

    key: Array
    rate: float
    broadcast: bool = True


def visible(
    queries: int,
    keys: int,
    options: Options,
    mask: Bool[Array, "#B 1 #T #S"] | None = None,
    segments: Segments | None = None,
) -> Bool[Array, "#B 1 T S"] | None:
    """Return the mask that is True where a query attends to a key, or None if every query attends to every key."""
    query, key = options.first_query + jnp.arange(queries)[:, None], jnp.arange(keys)[None, :]
    conditions = []
    if options.causal or options.window is not None:
        conditions.append((key <= query)[None, None])
    if options.window is not None:
        conditions.append((key > query - options.window)[None, None])
    if mask is not None:
        conditions.append(jnp.broadcast_to(mask, (mask.shape[0], 1, queries, keys)))
    if segments is not None:
        conditions.append(segment_mask(segments))
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def composed_pairs(queries: int, keys: int, options: Options) -> Bool[Array, "1 1 T S"] | None:
    """Return the mask that is True for the pairs inside `Options.compose_window`, or None if all are composed."""
    if options.compose_window is None:
        return None
    query, key = options.first_query + jnp.arange(queries)[:, None], jnp.arange(keys)[None, :]
    return (key > query - options.compose_window)[None, None]


def composed_inside(
    compose: Callable[..., Array], a: Float[Array, "*shape"], w: ComposeWeights | None, pairs: Array | None
) -> Float[Array, "*shape"]:
    """Return compose(a, w) for the pairs that are composed, and `a` for the others; `pairs` None stands for all."""
    if w is None:
        return a
    return compose(a, w) if pairs is None else jnp.where(pairs, compose(a, w), a)


def masked_softmax(
    scores: Float[Array, "*shape"], mask: Bool[Array, "*#shape"] | None, axis: int = -1
) -> Float[Array, "*shape"]:
    """Return the softmax of `scores` over those keys, along `axis`, where `mask` is True.

    The weight of a masked key is exactly 0, also in a row where every key is masked.
    """
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    # The shift cancels, so it needs no gradient. That of `max` would be 0/0 where XLA computes the scores twice and
    # rounds them differently: then no score equals the maximum.
    weights = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=axis, keepdims=True)))
    if mask is not None:
        weights = jnp.where(mask, weights, 0)
    total = jnp.sum(weights, axis=axis, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def supports(call: Call) -> str | None:
    """Return None: all calls are supported."""


class AttentionMatrices(NamedTuple):
    """The attention scores and weights of one layer, before and after their composes, each (B H T S)."""

    scores: Float[Array, "B H T S"]  # scaled products of queries and keys
    composed_scores: Float[Array, "B H T S"]  # after pre-compose: the inputs of the softmax
    weights: Float[Array, "B H T S"]  # the result of the softmax
    composed_weights: Float[Array, "B H T S"]  # after post-compose: the values are summed by them


def attention_matrices(inputs: Inputs, options: Options, compose: Callable[..., Array] = compose) -> AttentionMatrices:
    """Return all matrices of `dcvit.dcmha.attention`: float32, or float64 for float64 inputs.

    `compose` is the function that computes Eqn 7. `inputs.v` is not used.
    """
    q, k, _, pre, post, mask, segments, _, pairs = inputs
    pairs = composed_pairs(q.shape[1], k.shape[1], options) if pairs is None else pairs
    attended = visible(q.shape[1], k.shape[1], options, mask, segments)
    wide = statistics_dtype(q.dtype)
    k = _repeat(k, q.shape[2])
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=wide) * jnp.asarray(options.scale, wide)
    in_groups = functools.partial(compose, groups=options.groups)
    composed_scores = composed_inside(in_groups, scores, pre, pairs)
    weights = masked_softmax(composed_scores, attended)
    return AttentionMatrices(scores, composed_scores, weights, composed_inside(in_groups, weights, post, pairs))


def run(
    call: Call, *, dropout: Dropout | None = None, compose: Callable[..., Array] = compose
) -> Float[Array, "B T H D"]:
    """Compute the attention that a `Call` describes, and return the outputs of the heads.

    Scores and weights are float32, or float64 for float64 inputs. `dropout` is that of the composed weights,
    and `compose` the function that computes Eqn 7.
    """
    return attend(call.options, call.inputs, dropout=dropout, compose=compose)


def attend(
    options: Options, inputs: Inputs, *, dropout: Dropout | None = None, compose: Callable[..., Array] = compose
) -> Float[Array, "B T H D"]:
    """Return the outputs of the heads, as `run`, from the options and the arrays of a `Call`."""
    weights = attention_matrices(inputs, options, compose).composed_weights
    if dropout is not None:
        weights = _drop(weights, dropout)
    v = _repeat(inputs.v, inputs.q.shape[2])
    out = jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v, preferred_element_type=weights.dtype)
    return out.astype(inputs.q.dtype)


def _repeat(x: Float[Array, "B S K D"], heads: int) -> Float[Array, "B S H D"]:
    """Return `x` with each of its K heads repeated for the query heads that share it, `heads` in all."""
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def _drop(weights: Float[Array, "B H T S"], dropout: Dropout) -> Float[Array, "B H T S"]:
    if dropout.rate == 1:
        return jnp.zeros_like(weights)
    shape = (1, 1, *weights.shape[2:]) if dropout.broadcast else weights.shape
    kept = jax.random.bernoulli(dropout.key, 1 - dropout.rate, shape)
    return weights * (kept.astype(weights.dtype) / (1 - dropout.rate))
