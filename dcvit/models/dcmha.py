"""DCMHA in place of flax's `nn.MultiHeadDotProductAttention`: the same fields, call and parameters."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from flax.typing import PrecisionLike
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.models.attention import Attention
from dcvit.models.fields import AttentionFields, values_of

# Fields of the flax layer that have no counterpart here.
UNSUPPORTED = (
    "attention_fn", "decode", "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls",
    "qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls",
)  # fmt: skip


class ComposedFields(AttentionFields, kw_only=True):
    """Fields that flax's layer does not have, given by keyword. It also has the fields of `AttentionFields`.

    Fields:
      compose: the attention matrices that are composed: "both", "pre" (scores), "post" (weights) or None.
      num_key_heads: K, for grouped-query attention; None means H.
      causal, window: see `dcvit.dcmha.attention`.
    """

    compose: str | None = "both"
    num_key_heads: int | None = None
    causal: bool = False
    window: int | None = None


class DCMHA(ComposedFields):
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
      dropout_rate: dropout rate of the composed attention weights.
      deterministic: no dropout; given here or in the call.
      precision: precision of the projections, see `jax.lax.Precision`.
      kernel_init, bias_init: initializers of the projections.
      out_kernel_init, out_bias_init: initializers of the output projection; None means those of the others.
      use_bias: the four projections have biases.
      attention_fn: not supported; leave the default.
      qkv_dot_general, out_dot_general, qkv_dot_general_cls, out_dot_general_cls: not supported.
      qk_attn_weights_einsum_cls, attn_weights_value_einsum_cls: not supported.
      decode: not supported; `dcvit.models.attention.Attention.decode` attends with a cache.
      normalize_qk: layer norms of queries and keys.
      force_fp32_for_softmax: always true.
    """

    num_heads: int
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: PrecisionLike = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    attention_fn: object = nn.dot_product_attention
    decode: bool = False
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = False
    qkv_dot_general: object = None
    out_dot_general: object = None
    qkv_dot_general_cls: object = None
    out_dot_general_cls: object = None
    qk_attn_weights_einsum_cls: object = None
    attn_weights_value_einsum_cls: object = None

    def setup(self) -> None:
        check_supported(self)
        fields = values_of(self, AttentionFields)
        if self.normalize_qk:
            fields["qk_norm"] = "layernorm"
        self.attention = Attention(
            self.num_heads, num_key_heads=self.num_key_heads, qkv_features=self.qkv_features,
            out_features=self.out_features, use_bias=self.use_bias, kernel_init=self.kernel_init,
            out_init=self.out_kernel_init, bias_init=self.bias_init, out_bias_init=self.out_bias_init,
            norm_names=("query_ln", "key_ln"), dtype=self.dtype, param_dtype=self.param_dtype,
            precision=self.precision, causal=self.causal, window=self.window, dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout, deterministic=self.deterministic, **fields,
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
          mask: broadcasts to (*B, 1, T, S): True or not zero where a query attends to a key, the same for all heads.
          deterministic: no dropout.
          dropout_rng: key of the dropout; None means the rng stream "dropout".
          sow_weights: sow the composed weights (*B, H, T, S) as `attention_weights` into "intermediates".

        Raises:
          ValueError: as `Attention`, or a field has a value that is not supported.
        """
        if inputs_kv is not None and (inputs_k is not None or inputs_v is not None):
            raise ValueError("give either inputs_kv, or inputs_k and inputs_v")
        if inputs_k is None and inputs_v is not None:
            raise ValueError("inputs_v needs inputs_k; if keys and values have the same inputs, give inputs_k only")
        keys = inputs_k if inputs_kv is None else inputs_kv
        if not sow_weights:
            return self.attention(
                inputs_q, keys, mask, x_v=inputs_v, deterministic=deterministic, dropout_rng=dropout_rng
            )
        out, weights = self.attention(
            inputs_q, keys, mask, x_v=inputs_v, deterministic=deterministic, dropout_rng=dropout_rng,
            return_weights=True,
        )  # fmt: skip
        self.sow("intermediates", "attention_weights", weights)
        return out


def check_supported(module: DCMHA) -> None:
    """Raise ValueError if a field of flax's layer has a value that DCMHA does not support."""
    defaults = {field.name: field.default for field in dataclasses.fields(module)}
    for name in UNSUPPORTED:
        if getattr(module, name) != defaults[name]:
            raise ValueError(f"DCMHA has no {name}: leave its default, or use flax's layer")
