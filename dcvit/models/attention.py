"""Multi-head attention module: projections, optional QK-norm and rotary embedding, then `dcvit.dcmha.attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.kv_cache import Cache, extend, key_wise, visible, with_keys
from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.models import sharded_attention
from dcvit.models.composition import ComposeInput, ComposeParams, compose_inputs, compose_weights
from dcvit.models.fields import AttentionFields, BranchFields, check_attention, check_heads, values_of
from dcvit.models.layers import in_float32
from dcvit.parallel.mesh import BATCH, constrain


class CacheUpdate(NamedTuple):
    """Position of the tokens of one call in the cache of each example; see `dcvit.dcmha.kv_cache`."""

    start: Int[Array, " B"]  # number of tokens in the cache before the call
    added: Int[Array, " B"]  # number of tokens of the call that are real; padding follows them
    oldest_visible: Int[Array, " B"]  # first token that the last real token may attend to


class AttentionInputs(NamedTuple):
    """Queries, keys, values and compose weights: the first arguments of `dcvit.dcmha.attention`."""

    q: Float[Array, "B T H D"]
    k: Float[Array, "B S K D"]
    v: Float[Array, "B S K D"]
    pre: ComposeWeights | None
    post: ComposeWeights | None


def rotate(
    x: Float[Array, "B T H D"], positions: Int[Array, "#B T"], *, width: int, base: float
) -> Float[Array, "B T H D"]:
    """Apply a rotary position embedding (Su et al., 2021) to the first `width` of D numbers, in float32.

    Number i of the first half and number i of the second half form a pair, which is rotated by the angle
    position · base^(-2i/width): the layout of GPT-NeoX and LLaMA.
    """
    frequencies = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    a, b = jnp.split(x[..., :width].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, x[..., width:]], axis=-1)


class Attention(AttentionFields):
    """Multi-head attention with optional dynamic composition.

    The parameter tree is that of flax's `MultiHeadDotProductAttention`, with `pre` and `post` for the
    compositions. The module also has the fields of `AttentionFields`.

    Fields:
      num_heads: H; divides the model width M.
      num_key_heads: K, for grouped-query attention; None means H.
      rotary: number of a head's D numbers that carry a rotary position embedding, in queries and keys.
      rotary_base: base of the frequencies of that embedding.
      causal, window: see `dcvit.dcmha.attention`.
      prefill_window: with `window`, the window of a call with several tokens; None means `window`.
      use_bias: the four projections have biases.
      kernel_init: initializer of the four projections.
      out_init: initializer of the output projection; None means `kernel_init`.
      dtype: dtype of the computation; parameters are float32.
      remat: recompute the attention in the backward pass instead of keeping arrays as large as T×S.
    """

    num_heads: int
    num_key_heads: int | None = None
    rotary: int = 0
    rotary_base: float = 10_000.0
    causal: bool = False
    window: int | None = None
    prefill_window: int | None = None
    use_bias: bool = True
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    dtype: DTypeLike | None = None
    remat: bool = False

    def __call__(
        self,
        x_q: Float[Array, "B T M"],
        x_kv: Float[Array, "B S M"] | None = None,
        mask: Bool[Array, "#B 1 #T #S"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
    ) -> Float[Array, "B T M"]:
        """Attend from `x_q` to `x_kv`, or to `x_q` itself.

        Args:
          x_q: inputs of the queries.
          x_kv: inputs of the keys and values; None means `x_q`.
          mask: see `dcvit.dcmha.attention`.
          positions: positions of the tokens for a rotary embedding; None means 0 … T-1.

        Raises:
          ValueError: a field has none of its valid values, the numbers of heads, key heads and groups and the width do
            not divide each other as they must, or a rotary embedding is combined with `x_kv`.
        """
        return self._attend(x_q, x_q if x_kv is None else x_kv, mask, positions)[0]

    def decode(
        self,
        x: Float[Array, "B T M"],
        cache: Cache,
        update: CacheUpdate,
        mask: Bool[Array, "#B 1 #T #S"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
    ) -> tuple[Float[Array, "B T M"], Cache]:
        """Attend from new tokens to the tokens in a cache and to each other.

        Args:
          x: inputs of the new tokens. If T > 1, the cache must be empty.
          cache: the tokens before; see `dcvit.models.lm.init_cache`.
          update: position of the new tokens in the cache.
          mask: as in `__call__`; if T = 1, the S keys are the slots of the cache.
          positions: as in `__call__`.

        Returns:
          The output, and the cache with the new tokens.
        """
        out, extended = self._attend(x, x, mask, positions, cache, update)
        assert extended is not None  # because `cache` is not
        return out, extended

    @nn.compact
    def _attend(
        self,
        x_q: Array,
        x_kv: Array,
        mask: Array | None,
        positions: Array | None,
        cache: Cache | None = None,
        update: CacheUpdate | None = None,
    ) -> tuple[Array, Cache | None]:
        """Return the output and the extended cache, if one is given."""
        width = x_q.shape[-1]
        check_fields(self, width)
        if self.rotary and x_kv is not x_q:
            raise ValueError("a rotary embedding needs queries and keys of the same tokens")
        to_compose = compose_inputs(x_q, x_kv, groups=self.groups)
        q, k, v = self._project(x_q, x_kv, positions)
        weights = self._compose_weights(width, to_compose)
        inputs = AttentionInputs(q, k, v, weights.get("pre"), weights.get("post"))
        causal, window = self.causal, self.window and (self.prefill_window or self.window)
        if cache is not None and update is not None:
            cache = _extend_cache(cache, inputs, update)
            if x_q.shape[1] == 1:  # several tokens attend to each other only, because the cache was empty
                inputs, mask = _attend_to_cache(cache, inputs, update, mask, self.window)
                causal, window = False, None
        attend: Callable[..., Array] = functools.partial(
            sharded_attention.attention, causal=causal, window=window,
            groups=self.groups if self.compose else 1, implementation=self.implementation,
        )  # fmt: skip
        if self.remat:
            attend = jax.checkpoint(attend, policy=jax.checkpoint_policies.nothing_saveable)
        out = constrain(attend(*inputs, mask=mask), BATCH, None, "tensor", None)
        out = nn.DenseGeneral(
            width, axis=(-2, -1), use_bias=self.use_bias, kernel_init=self.out_init or self.kernel_init,
            dtype=self.dtype, name="out",
        )(out)  # fmt: skip
        return out, cache

    def _project(self, x_q: Array, x_kv: Array, positions: Array | None) -> tuple[Array, Array, Array]:
        """Return queries B T H D, keys and values B S K D, normalized and rotated according to the fields."""
        head_dim = x_q.shape[-1] // self.num_heads

        def project(name: str, x: Array, heads: int) -> Array:
            dense = nn.DenseGeneral(
                (heads, head_dim), use_bias=self.use_bias, kernel_init=self.kernel_init, dtype=self.dtype, name=name
            )
            return constrain(dense(x), BATCH, None, "tensor", None)

        key_heads = self.num_key_heads or self.num_heads
        q = project("query", x_q, self.num_heads)
        k = project("key", x_kv, key_heads)
        v = project("value", x_kv, key_heads)
        if self.qk_norm:
            norm: Callable[..., nn.Module] = (
                nn.RMSNorm if self.qk_norm == "rmsnorm" else functools.partial(nn.LayerNorm, use_bias=False)
            )
            q = in_float32(norm(epsilon=self.qk_norm_epsilon, name="query_norm"), q)
            k = in_float32(norm(epsilon=self.qk_norm_epsilon, name="key_norm"), k)
        if self.rotary:
            if positions is None:
                positions = jnp.arange(x_q.shape[1])[None]
            q, k = (rotate(x, positions, width=self.rotary, base=self.rotary_base) for x in (q, k))
        return q, k, v

    def _compose_weights(self, width: int, inputs: Mapping[str, ComposeInput]) -> dict[str, ComposeWeights]:
        """Return the weights of the compositions "pre" and "post", as far as `compose` asks for them."""
        params = {
            where: ComposeParams(self.num_heads, **values_of(self, BranchFields), name=where)(width)
            for where in ("pre", "post")
            if self.compose in (where, "both")
        }
        return compose_weights(params, inputs, num_heads=self.num_heads, gelu=self.compose_gelu, dtype=self.dtype)


def check_fields(module: Attention, width: int) -> None:
    """Raise ValueError if the fields of a module are invalid or do not fit inputs of M = `width`."""
    check_attention(module, module.num_heads)
    check_heads(module.num_heads, width)
    head_dim = width // module.num_heads
    if module.rotary % 2 or not 0 <= module.rotary <= head_dim:
        raise ValueError(f"rotary={module.rotary} should be even and at most {head_dim}, a head's width")
    if module.num_key_heads is not None and (module.num_key_heads < 1 or module.num_heads % module.num_key_heads):
        raise ValueError(f"num_key_heads={module.num_key_heads} does not divide num_heads={module.num_heads}")


def _extend_cache(cache: Cache, inputs: AttentionInputs, update: CacheUpdate) -> Cache:
    """Return the cache with the keys, values and key-wise weights of new tokens."""
    k, v = (x.reshape(*x.shape[:2], -1) for x in (inputs.k, inputs.v))
    new = Cache(k, v, key_wise(inputs.pre), key_wise(inputs.post))
    return extend(cache, new, update.start, update.added)


def _attend_to_cache(
    cache: Cache, inputs: AttentionInputs, update: CacheUpdate, mask: Array | None, window: int | None
) -> tuple[AttentionInputs, Array]:
    """Return the inputs and the mask for attention from one new token to all tokens of the cache."""
    length = update.start + update.added
    in_reach = visible(cache.k.shape[1], length, window=window, first=update.oldest_visible)
    mask = in_reach if mask is None else in_reach & mask
    k, v = (x.reshape(*x.shape[:2], *inputs.k.shape[2:]) for x in (cache.k, cache.v))
    pre, post = with_keys(inputs.pre, cache.pre), with_keys(inputs.post, cache.post)
    return AttentionInputs(inputs.q, k, v, pre, post), mask
