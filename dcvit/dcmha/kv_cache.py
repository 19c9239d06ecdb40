"""The cache of decoding: keys, values and key-wise compose weights of the tokens behind.

Composition is a query-wise plus a key-wise part (Section 3.1), so what a key adds to it never changes and is cached
beside the key, factored: w_k1, w_k2 and w_kg of both composes are 2·(2R + 1)·H numbers a token, never H×H maps.

Token p of an example stands in slot p % S of its S slots. With S = window the slots are a ring. A token's heads lie
side by side, K·D numbers: a TPU would pad heads of D numbers in a dimension of their own, and all devices read them
so, in one piece.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.shapes import Array, Bool, Float, Int


class Cache(NamedTuple):
    """What one layer keeps of the tokens behind; of `pre` and `post` only the key-wise fields."""

    k: Float[Array, "B S K*D"]
    v: Float[Array, "B S K*D"]
    pre: ComposeWeights | None = None
    post: ComposeWeights | None = None


def key_wise(weights: ComposeWeights | None) -> ComposeWeights | None:
    """The fields that belong to keys, or None where there are none."""
    if weights is None or (weights.k1 is None and weights.kg is None):
        return None
    return ComposeWeights(k1=weights.k1, k2=weights.k2, kg=weights.kg)


def extend(cache: Cache, new: Cache, before: Int[Array, " B"], count: Int[Array, " B"]) -> Cache:
    """The cache after `count` of the T tokens in `new`, at positions `before` on; a slot keeps its newest token.

    Tokens from `count` on are padding and leave no trace. Tokens are scattered, which leaves the other slots alone. But
    a single one is selected where XLA (of jax 0.10.2) does not scatter in place: on CPUs it would make float32 of a
    bfloat16 cache and back, and TPUs, which lay out key-wise weights with the slots last, would copy these, padded. And
    on CPUs a single row of float32 would be written once for each reader, into copies; not so with a second one, which
    is dropped.
    """
    size, steps = cache.k.shape[1], jnp.arange(new.k.shape[1])[None]
    kept = (steps < count[:, None]) & (steps >= count[:, None] - size)
    slot = jnp.where(kept, (before[:, None] + steps) % size, size)  # `size` is no slot

    def scatter(slots: Array, tokens: Array) -> Array:
        rows = jnp.arange(slots.shape[0])[:, None]
        return slots.at[rows, slot].set(tokens.astype(slots.dtype), mode="drop")

    def scatter_two(slots: Array, token: Array) -> Array:
        rows, dropped = jnp.arange(slots.shape[0])[:, None], jnp.full_like(slot, size)
        both, columns = jnp.repeat(token, 2, axis=1), jnp.concatenate([slot, dropped], axis=1)
        return slots.at[rows, columns].set(both.astype(slots.dtype), mode="drop")

    def select(slots: Array, token: Array) -> Array:
        here = (jnp.arange(size)[None] == slot).reshape(-1, size, *[1] * (slots.ndim - 2))
        return jnp.where(here, token.astype(slots.dtype), slots)

    def write(slots: Array, tokens: Array, *, key_wise: bool) -> Array:
        if steps.size > 1:
            return scatter(slots, tokens)
        narrow = slots.dtype.itemsize < 4
        written: Array = jax.lax.platform_dependent(
            slots, tokens, cpu=select if narrow else scatter_two, tpu=select if key_wise else scatter, default=scatter
        )
        return written

    weights, more = (cache.pre, cache.post), (new.pre, new.post)
    pre, post = jax.tree.map(functools.partial(write, key_wise=True), weights, more)
    return Cache(write(cache.k, new.k, key_wise=False), write(cache.v, new.v, key_wise=False), pre, post)


def positions(slots: int, length: Int[Array, " B"]) -> Int[Array, "B S"]:
    """Which token stands in each slot after `length` tokens; negative where none does."""
    last = length[:, None] - 1
    return last - (last - jnp.arange(slots)[None]) % slots


def visible(
    slots: int, length: Int[Array, " B"], *, window: int | None, first: Int[Array, " B"] | None = None
) -> Bool[Array, "B 1 1 S"]:
    """Which slots the newest of `length` tokens sees: those of its window, from token `first` on (0 by default)."""
    oldest = jnp.zeros_like(length) if first is None else first
    if window is not None:
        oldest = jnp.maximum(oldest, length - window)
    return (positions(slots, length) >= oldest[:, None])[:, None, None, :]


def with_keys(weights: ComposeWeights | None, cached: ComposeWeights | None) -> ComposeWeights | None:
    """A new query's weights with the key-wise ones of all cached keys."""
    if weights is None or cached is None:
        return weights
    return weights._replace(k1=cached.k1, k2=cached.k2, kg=cached.kg)
