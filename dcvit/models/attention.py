"""Multi-head attention module: projections, compose weights, attention over composed heads, output projection."""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.linen as nn
import jax

from dcvit.dcmha import Dropout
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.inputs import Attend, Call, Composition, Inputs, make_call
from dcvit.dcmha.kv_cache import Cache, cache_of, extend, visible, with_keys
from dcvit.dcmha.segments import Segments, make_segments
from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.models import sharded_attention
from dcvit.models.composition import ComposeInput, ComposeParams, compose_inputs, compose_weights
from dcvit.models.projections import Projections
from dcvit.parallel.mesh import BATCH, constrain, shard_as


class CacheUpdate(NamedTuple):
    """Numbers that place the tokens of one call in the cache of each example; see `dcvit.dcmha.kv_cache`."""

    start: Int[Array, " B"]  # number of tokens in the cache before the call
    added: Int[Array, " B"]  # number of tokens of the call that are real; padding follows them
    oldest_visible: Int[Array, " B"]  # first token that the last real token may attend to


class LayerInputs(NamedTuple):
    """Arrays that one call of an attention layer takes; `cache` and `update` only if it decodes."""

    q: Float[Array, "B T M"]
    k: Float[Array, "B S _"] | None = None  # None: as q
    v: Float[Array, "B S _"] | None = None  # None: as k
    mask: Bool[Array, "#B _ #T #S"] | None = None
    positions: Int[Array, "#B T"] | Float[Array, "B T 2"] | None = None
    cache: Cache | None = None  # the tokens before; see `Attention.decode`
    update: CacheUpdate | None = None
    segments: Segments | None = None


class Prepared(NamedTuple):
    """Attention's inputs and options in one call, and the new cache."""

    inputs: Inputs
    causal: bool
    window: int | None
    cache: Cache  # the given cache with the new tokens, or these alone


class Attention(Projections):
    """Multi-head attention with optional dynamic composition (Section 3), also with a cache of earlier tokens.

    The parameter tree is that of flax's `MultiHeadDotProductAttention`, plus `pre` and `post` for the compositions. The
    module also has the fields of `Projections` and `AttentionFields`.

    Fields:
      causal, window: see `dcvit.dcmha.attention`.
      prefill_window: with `window`, the window of a call with several tokens; None means `window`.
      remat: recompute the attention in the backward pass instead of keeping arrays as large as T×S.
    """

    causal: bool = False
    window: int | None = None
    prefill_window: int | None = None
    remat: bool = False

    def __call__(
        self,
        x_q: Float[Array, "B T M"],
        x_kv: Float[Array, "B S _"] | None = None,
        mask: Bool[Array, "#B 1 #T #S"] | None = None,
        positions: Int[Array, "#B T"] | Float[Array, "B T 2"] | None = None,
        segments: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    ) -> Float[Array, "B T _"]:
        """Attend from `x_q` to `x_kv`, or to `x_q` itself.

        Args:
          x_q: inputs of the queries.
          x_kv: inputs of the keys and values; None means `x_q`.
          mask, segments: as `dcvit.dcmha.attention` takes them.
          positions: positions of the tokens for a rotary embedding, None means 0 … T-1; or the coordinates of patches
            in two dimensions, see `dcvit.models.projections.rotate_at`.

        Raises:
          ValueError: a field is invalid; the width, the heads, the key heads and the groups do not divide each other as
            they must; the mask does not broadcast; or a rotary embedding is combined with `x_kv`.
        """
        return self.attend(LayerInputs(x_q, x_kv, None, mask, positions, segments=make_segments(segments)))[0]

    def decode(
        self,
        x: Float[Array, "B T M"],
        cache: Cache,
        update: CacheUpdate,
        mask: Bool[Array, "#B 1 #T #S"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T M"], Cache]:
        """Attend from new tokens to the tokens in a cache and to each other.

        Args:
          x: inputs of the new tokens. If T > 1, the cache must be empty.
          cache: cache of the earlier tokens; see `dcvit.models.lm.init_cache`.
          update: position of the new tokens in the cache.
          mask: as `dcvit.dcmha.attention` takes it; if T = 1, the S keys are the slots of the cache.
          positions: as in `__call__`.
          segments: of the new tokens, if T > 1.

        Returns:
          The output, and the cache with the new tokens.

        Raises:
          ValueError: T = 1 and segments are given: the cache has no segment ids; give a mask instead.
        """
        ids = make_segments(segments)
        return self.attend(LayerInputs(x, mask=mask, positions=positions, cache=cache, update=update, segments=ids))

    @nn.compact
    def attend(self, x: LayerInputs) -> tuple[Float[Array, "B T _"], Cache]:
        """Return the output, and `x.cache` with the new tokens added or, without it, a cache of these tokens alone."""
        prepared = self.prepare(x)
        call = make_call(
            prepared.inputs, self.attended_composition(), causal=prepared.causal, window=prepared.window
        )  # fmt: skip
        return self.output_of(self.head_outputs(call), x.q), prepared.cache

    def prepare(self, x: LayerInputs) -> Prepared:
        """Return attention's inputs: projections, compose weights (Eqn 5-6) and, if T = 1, the tokens of the cache."""
        x_k = x.q if x.k is None else x.k
        if self.rotary and x_k is not x.q:
            raise ValueError("a rotary embedding needs queries and keys of the same tokens")
        if self.compose and x_k.shape[-1] != x.q.shape[-1]:
            raise ValueError(f"a composition needs inputs of one width, found {x.q.shape[-1]} and {x_k.shape[-1]}")
        to_compose = compose_inputs(x.q, x_k, groups=self.groups) if self.compose else {}
        q, k, v = self.project(x.q, x_k, x_k if x.v is None else x.v, x.positions)
        weights = self.compose_weights(x.q.shape[-1], to_compose) if to_compose else {}
        inputs = Inputs(q, k, v, weights.get("pre"), weights.get("post"), x.mask, x.segments)
        new = cache_of(inputs)
        window = self.window and (self.prefill_window or self.window)
        if x.cache is None or x.update is None:
            return Prepared(inputs, self.causal, window, new)
        cache = extend(x.cache, new, x.update.start, x.update.added)
        if x.q.shape[1] > 1:  # several tokens attend to each other only, because the cache was empty
            return Prepared(inputs, self.causal, window, cache)
        return Prepared(attend_to_cache(cache, inputs, x.update, self.window), False, None, cache)

    def compose_weights(self, width: int, inputs: dict[str, ComposeInput]) -> dict[str, ComposeWeights]:
        """Return the layer's `ComposeWeights` by name, "pre", "post" or both, for inputs of M = `width`."""
        composition = self.composition()
        params = {name: ComposeParams(composition, self.num_heads, name=name)(width) for name in composition.names}
        return compose_weights(composition, params, inputs, num_heads=self.num_heads, dtype=self.dtype)

    def head_outputs(self, call: Call, dropout: Dropout | None = None) -> Float[Array, "B T H D"]:
        """Return the outputs of all heads before the output projection."""

        is_plain_layer = call.is_plain and self.implementation == "folded"  # of a model whose other layers compose
        implementation = None if is_plain_layer else self.implementation
        attend: Attend = functools.partial(sharded_attention.attention, implementation=implementation, dropout=dropout)
        if self.remat:
            attend = jax.checkpoint(attend, policy=jax.checkpoint_policies.nothing_saveable)
        return attend(call)

    def output_of(self, head_outputs: Float[Array, "B T H D"], like: Float[Array, "B T M"]) -> Float[Array, "B T _"]:
        """Return the output projection of all heads' outputs, sharded as `like`, the layer's input."""
        return shard_as(self.output(constrain(head_outputs, BATCH, "context", "tensor", None), like.shape[-1]), like)

    def attended_composition(self) -> Composition:
        """Return the composition that attention applies; the layer's groups and branches count with a compose only."""
        return self.composition() if self.compose else Composition()


def attend_to_cache(cache: Cache, inputs: Inputs, update: CacheUpdate, window: int | None) -> Inputs:
    """Return attention's inputs for one new token: its query, the cached keys and values, a mask of visible ones."""
    if inputs.segments is not None:
        raise ValueError("one token that attends to a cache has no segments: give a mask of the slots")
    length = update.start + update.added
    mask = visible(cache.k.shape[1], length, window=window, first=update.oldest_visible)
    mask = mask if inputs.mask is None else mask & inputs.mask
    k, v = (x.reshape(*x.shape[:2], *inputs.k.shape[2:]).astype(inputs.k.dtype) for x in (cache.k, cache.v))
    return Inputs(inputs.q, k, v, with_keys(inputs.pre, cache.pre), with_keys(inputs.post, cache.post), mask)
