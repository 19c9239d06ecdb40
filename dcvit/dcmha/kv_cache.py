"""KV cache for decoding, with key-wise compose weights.

The key-wise weights of a compose depend only on the key's token (Section 3.1), so that they are computed once. They are
cached with the key in factored form: w_k1, w_k2 and w_kg of both composes are 2·(2R + 1)·H numbers for each token,
instead of an H×H matrix for each compose.

Token p of an example is stored in slot p % S of its S slots. With S = window, the slots are a ring buffer. The heads of
a token are one axis of K·D numbers, because a TPU would pad a separate axis of D numbers, and all devices read this
layout contiguously.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.inputs import Composition, Inputs
from dcvit.dcmha.shapes import Array, Bool, Float, Int


class Cache(NamedTuple):
    """Cache of one layer, with axes (B, S slots, …). `pre` and `post` have only the key-wise fields."""

    k: Float[Array, "B S K*D"]
    v: Float[Array, "B S K*D"]
    pre: ComposeWeights | None = None
    post: ComposeWeights | None = None


def cache_of(inputs: Inputs) -> Cache:
    """Return the keys, values and key-wise weights of one call of attention in the form of a cache."""
    k, v = (x.reshape(*x.shape[:2], -1) for x in (inputs.k, inputs.v))
    return Cache(k, v, key_wise(inputs.pre), key_wise(inputs.post))


def empty(composition: Composition, leading: tuple[int, int], heads: int, key_width: int, dtype: DTypeLike) -> Cache:
    """Return the empty cache of one layer.

    Args:
      composition: the composition of the layer.
      leading: number of examples and of slots, the leading dimensions of all arrays.
      heads: H.
      key_width: K·D.
      dtype: dtype of all arrays.
    """
    shapes = composition.cached(heads)
    weights = {
        name: ComposeWeights(**{field: jnp.zeros((*leading, *shape), dtype) for field, shape in shapes.items()})
        for name in composition.names
        if shapes
    }
    k, v = (jnp.zeros((*leading, key_width), dtype) for _ in range(2))
    return Cache(k, v, weights.get("pre"), weights.get("post"))


def key_wise(weights: ComposeWeights | None) -> ComposeWeights | None:
    """Return the key-wise fields of compose weights alone, or None if there are none."""
    if weights is None or (weights.k1 is None and weights.kg is None):
        return None
    return ComposeWeights(k1=weights.k1, k2=weights.k2, kg=weights.kg)


def extend(cache: Cache, new: Cache, before: Int[Array, " B"], count: Int[Array, " B"]) -> Cache:
    """Return the cache with the first `count` of the T tokens in `new` added, at positions `before`, `before` + 1, ….

    Of tokens with the same slot, the newest is kept. Tokens after the first `count` are padding and change nothing.
    """
    size, steps = cache.k.shape[1], jnp.arange(new.k.shape[1])[None]
    kept = (steps < count[:, None]) & (steps >= count[:, None] - size)
    slot = jnp.where(kept, (before[:, None] + steps) % size, size)  # slot `size` does not exist

    def write(slots: Array, tokens: Array, *, key_wise: bool) -> Array:
        return write_many(slots, tokens, slot) if steps.size > 1 else write_one(slots, tokens, slot, key_wise=key_wise)

    weights, more = (cache.pre, cache.post), (new.pre, new.post)
    pre, post = jax.tree.map(functools.partial(write, key_wise=True), weights, more)
    return Cache(write(cache.k, new.k, key_wise=False), write(cache.v, new.v, key_wise=False), pre, post)


def write_many(
    slots: Float[Array, "B S *shape"], tokens: Float[Array, "B T *shape"], slot: Int[Array, "B T"]
) -> Float[Array, "B S *shape"]:
    """Return `slots` with `tokens` written by a scatter that touches no other slots; tokens with slot S are dropped."""
    rows = jnp.arange(slots.shape[0])[:, None]
    return slots.at[rows, slot].set(tokens.astype(slots.dtype), mode="drop")


def write_one(
    slots: Float[Array, "B S *shape"], token: Float[Array, "B 1 *shape"], slot: Int[Array, "B 1"], *, key_wise: bool
) -> Float[Array, "B S *shape"]:
    """Return `slots` with a token of each example written, by the operation that XLA (jax 0.10.2) runs in place.

    On CPUs, a scatter into bfloat16 converts the complete cache to float32 and back, so that a select is used. TPUs lay
    out key-wise weights with the slots last, and a scatter would copy them with padding, so that a select is used for
    these (`key_wise`). On CPUs, a scatter of a single float32 row is repeated for each reader of the cache, into
    copies; with a second row, which is dropped, it is not.
    """
    size = slots.shape[1]

    def scatter(slots: Array, token: Array) -> Array:
        return write_many(slots, token, slot)

    def scatter_two(slots: Array, token: Array) -> Array:
        dropped = jnp.full_like(slot, size)
        return write_many(slots, jnp.repeat(token, 2, axis=1), jnp.concatenate([slot, dropped], axis=1))

    def select(slots: Array, token: Array) -> Array:
        here = (jnp.arange(size)[None] == slot).reshape(-1, size, *[1] * (slots.ndim - 2))
        return jnp.where(here, token.astype(slots.dtype), slots)

    on_cpu = select if slots.dtype.itemsize < 4 else scatter_two
    written: Array = jax.lax.platform_dependent(
        slots, token, cpu=on_cpu, tpu=select if key_wise else scatter, default=scatter
    )
    return written


def positions(slots: int, length: Int[Array, " B"]) -> Int[Array, "B S"]:
    """Return the position of the token in each slot after `length` tokens; it is negative for an empty slot."""
    last = length[:, None] - 1
    return last - (last - jnp.arange(slots)[None]) % slots


def visible(
    slots: int, length: Int[Array, " B"], *, window: int | None, first: Int[Array, " B"] | None = None
) -> Bool[Array, "B 1 1 S"]:
    """Return the mask of the slots that the newest of `length` tokens attends to.

    It is True for tokens inside the window whose position is at least `first` (by default 0).
    """
    oldest = jnp.zeros_like(length) if first is None else first
    if window is not None:
        oldest = jnp.maximum(oldest, length - window)
    return (positions(slots, length) >= oldest[:, None])[:, None, None, :]


def with_keys(weights: ComposeWeights | None, cached: ComposeWeights | None) -> ComposeWeights | None:
    """Return compose weights with the query-wise fields of `weights` and the key-wise fields of `cached`."""
    if weights is None or cached is None:
        return weights
    return weights._replace(k1=cached.k1, k2=cached.k2, kg=cached.kg)
