"""One token at a time: attention of a new query to a cache of keys, values and key-wise compose weights.

Composition is a query-wise plus a key-wise part (Section 3.1), so what a key adds to it never changes and is cached
beside the key, factored: w_k1, w_k2 and w_kg of both composes are 2·(2R + 1)·H numbers a token, never H×H maps.

Token p of an example stands in slot p % S of its S slots. With S = window the slots are a ring.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.shapes import Array, Bool, Float, Int


class Cache(NamedTuple):
    """What one layer keeps of the tokens behind; of `pre` and `post` only the key-wise fields."""

    k: Float[Array, "B S K D"]
    v: Float[Array, "B S K D"]
    pre: ComposeWeights | None = None
    post: ComposeWeights | None = None


def key_wise(weights: ComposeWeights | None) -> ComposeWeights | None:
    """The fields that belong to keys, or None where there are none."""
    if weights is None or (weights.k1 is None and weights.kg is None):
        return None
    return ComposeWeights(k1=weights.k1, k2=weights.k2, kg=weights.kg)


def extend(cache: Cache, new: Cache, before: Int[Array, " B"], count: Int[Array, " B"]) -> Cache:
    """The cache after `count` of the T tokens in `new`, at positions `before` on; a slot keeps its newest token.

    Tokens from `count` on are padding and leave no trace.
    """

    def write(slots: Array, tokens: Array) -> Array:
        size, steps = slots.shape[1], jnp.arange(tokens.shape[1])[None]
        kept = (steps < count[:, None]) & (steps >= count[:, None] - size)
        slot = jnp.where(kept, (before[:, None] + steps) % size, size)  # `size` is no slot
        rows = jnp.arange(slots.shape[0])[:, None]
        return slots.at[rows, slot].set(tokens.astype(slots.dtype), mode="drop")

    written: Cache = jax.tree.map(write, cache, new)
    return written


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
