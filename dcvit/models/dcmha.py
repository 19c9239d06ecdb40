"""DCMHA in place of flax's `nn.MultiHeadDotProductAttention`: the same fields, call, parameters and cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.kv_cache import Cache
from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.models.attention import Attention, CacheUpdate, LayerInputs
from dcvit.models.fields import AttentionFields, values_of

# Arguments of flax's layers whose default is the only supported value, and the reason.
UNSUPPORTED = {
    "attention_fn": "the composition is part of the attention function",
    "qk_attn_weights_einsum_cls": "fused implementations have no einsum of scores",
    "attn_weights_value_einsum_cls": "fused implementations have no einsum of weights and values",
    **dict.fromkeys(
        ("qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls"), "flax has deprecated it"
    ),
}


class ComposedFields(AttentionFields, kw_only=True):
    """Fields that flax's layer does not have, given by keyword. It also has the fields of `AttentionFields`.

    Fields:
      compose: the attention matrices that are composed: "both", "pre" (scores), "post" (weights) or None.
      num_key_heads: K, for grouped-query attention; None means H.
      causal, window: see `dcvit.dcmha.attention`.
      qkv_sharding: see `Projections`.
    """

    compose: str | None = "both"
    num_key_heads: int | None = None
    causal: bool = False
    window: int | None = None
    qkv_sharding: P | None = None


class DCMHA(ComposedFields, nn.MultiHeadDotProductAttention):
    """Multi-head attention whose heads compose dynamically, with the interface of `nn.MultiHeadDotProductAttention`.

    The parameters are those of the flax layer, with `pre` and `post` for the compositions. With `compose=None`, they
    are the same, and so is the output, except for a query whose keys are all masked: here its attention weights are
    zero, in flax they are equal. The layer also has the fields of `ComposedFields`.

    Fields:
      num_heads: H.
      dtype: dtype of the computation; None means that of inputs and parameters. The softmax is float32.
      param_dtype: dtype of the parameters of the projections.
      qkv_features: width H·D of the queries; None means M.
      out_features: width of the output; None means M.
      broadcast_dropout: all examples and heads lose the weights of the same pairs of tokens.
      dropout_rate: dropout rate of the composed attention weights; a rate of 1 removes all of them.
      deterministic: no dropout; given here or in the call.
      precision: precision of the projections, see `jax.lax.Precision`.
      kernel_init, bias_init: initializers of the projections.
      out_kernel_init, out_bias_init: initializers of the output projection; None means those of the others.
      use_bias: the four projections have biases.
      attention_fn: not supported; leave the default.
      qkv_dot_general, out_dot_general, qkv_dot_general_cls, out_dot_general_cls: not supported.
      qk_attn_weights_einsum_cls, attn_weights_value_einsum_cls: not supported.
      decode: keep keys, values and key-wise compose weights of earlier tokens in the collection "cache". `init` with
        inputs of S tokens creates S slots; each call of `apply(..., mutable=["cache"])` takes one token and attends to
        the tokens before. After S tokens, each replaces the oldest one.
      normalize_qk: layer norms of queries and keys.
      force_fp32_for_softmax: always true.
    """

    def setup(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(nn.MultiHeadDotProductAttention)}
        check_supported({name: getattr(self, name) for name in defaults}, defaults, UNSUPPORTED)
        fields = values_of(self, AttentionFields)
        if self.normalize_qk:
            fields["qk_norm"] = fields["qk_norm"] or "layernorm"
        self.attention = Attention(
            self.num_heads, num_key_heads=self.num_key_heads, qkv_features=self.qkv_features,
            out_features=self.out_features, use_bias=self.use_bias, kernel_init=self.kernel_init,
            out_init=self.out_kernel_init, bias_init=self.bias_init, out_bias_init=self.out_bias_init,
            norm_names=("query_ln", "key_ln"), dtype=self.dtype, param_dtype=self.param_dtype,
            precision=self.precision, qkv_sharding=self.qkv_sharding, causal=self.causal, window=self.window,
            dropout_rate=self.dropout_rate, broadcast_dropout=self.broadcast_dropout,
            deterministic=self.deterministic, **fields,
        )  # fmt: skip
        nn.share_scope(self, self.attention)

    def __call__(
        self,
        inputs_q: Float[Array, "*B T M"],
        inputs_k: Float[Array, "*B S _"] | None = None,
        inputs_v: Float[Array, "*B S _"] | None = None,
        *,
        inputs_kv: Float[Array, "*B S _"] | None = None,
        mask: Bool[Array, "..."] | Float[Array, "..."] | Int[Array, "..."] | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*B T _"]:
        """Attend from `inputs_q` to `inputs_k`, as the flax layer does.

        Args:
          inputs_q: inputs of the queries.
          inputs_k: inputs of the keys; None means `inputs_q`.
          inputs_v: inputs of the values; None means `inputs_k`.
          inputs_kv: inputs of keys and values, instead of `inputs_k` and `inputs_v`.
          mask: True or not zero where a query attends to a key; broadcasts to (*B, H, T, S), with a composition to
            (*B, 1, T, S), because it mixes the heads. With a cache, the S keys are its slots.
          deterministic: no dropout.
          dropout_rng: key of the dropout; None means the rng stream "dropout".
          sow_weights: sow the composed weights (*B, H, T, S) as `attention_weights` into "intermediates".

        Raises:
          ValueError: as `Attention`, a field has a value that is not supported, or there is a cache and T > 1.
        """
        if inputs_kv is not None and (inputs_k is not None or inputs_v is not None):
            raise ValueError("give either inputs_kv, or inputs_k and inputs_v")
        if inputs_k is None and inputs_v is not None:
            raise ValueError("inputs_v needs inputs_k; if keys and values have the same inputs, give inputs_k only")
        inputs = LayerInputs(inputs_q, inputs_k if inputs_kv is None else inputs_kv, inputs_v, mask, None, dropout_rng)
        is_cached = self.decode and self.has_variable("cache", "cached_key")
        if is_cached:
            inputs = self._with_cache(inputs)
        results = self.attention.attend(
            inputs, deterministic=deterministic, return_weights=sow_weights, return_cache=self.decode
        )
        if results.weights is not None:
            self.sow("intermediates", "attention_weights", results.weights)
        if results.cache is not None:
            self._store(results.cache, is_cached)
        return results.out

    def _with_cache(self, inputs: LayerInputs) -> LayerInputs:
        """Return the inputs of one token with the variables of the cache."""
        variables: Mapping[str, Array] = self.variables["cache"]
        *lead, slots = variables["cached_key"].shape[:-2]
        shapes = [x.shape[:-1] for x in inputs[:3] if x is not None]
        if {*shapes} != {(*lead, 1)}:
            raise ValueError(f"decode=True takes inputs of shape {(*lead, 1)} before the width, found {shapes}")
        index = variables["cache_index"]
        start, added, oldest = (jnp.broadcast_to(x, lead) for x in (index, jnp.ones_like(index), jnp.zeros_like(index)))
        k, v = (variables[name].reshape(*lead, slots, -1) for name in ("cached_key", "cached_value"))
        pre, post = (_with_prefix(variables, f"cached_{where}_") for where in ("pre", "post"))
        return inputs._replace(cache=Cache(k, v, pre, post), update=CacheUpdate(start, added, oldest))

    def _store(self, cache: Cache, is_cached: bool) -> None:
        """Write the variables of the cache; the first call creates empty ones."""
        heads = self.num_key_heads or self.num_heads
        arrays = {"cached_key": cache.k, "cached_value": cache.v}
        arrays = {name: x.reshape(*x.shape[:-1], heads, -1) for name, x in arrays.items()}
        for where, weights in (("pre", cache.pre), ("post", cache.post)):
            fields = {} if weights is None else weights._asdict()
            arrays |= {f"cached_{where}_{name}": x for name, x in fields.items() if x is not None}
        for name, x in arrays.items():
            self.put_variable("cache", name, x if is_cached else jnp.zeros_like(x))
        index = self.get_variable("cache", "cache_index") + 1 if is_cached else jnp.zeros((), jnp.int32)
        self.put_variable("cache", "cache_index", index)


def _with_prefix(variables: Mapping[str, Array], prefix: str) -> ComposeWeights | None:
    """Return the weights whose names start with `prefix`, or None if there are none."""
    fields = {name.removeprefix(prefix): x for name, x in variables.items() if name.startswith(prefix)}
    return ComposeWeights(**fields) if fields else None


def check_supported(
    values: Mapping[str, object], defaults: Mapping[str, object], unsupported: Mapping[str, str]
) -> None:
    """Raise ValueError if an argument of flax's layer that is not supported has another value than its default."""
    for name, reason in unsupported.items():
        if name in values and values[name] is not defaults[name]:
            raise ValueError(f"DCMHA has no {name}, because {reason}: leave its default, or use flax's layer")
