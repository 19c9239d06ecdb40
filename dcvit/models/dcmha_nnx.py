"""DCMHA in place of flax's `nnx.MultiHeadAttention`: an NNX module with the same call and parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.models import dcmha

Metadata = Mapping[str, Any]  # of an `nnx.Param`, such as its sharding
NONE: Metadata = MappingProxyType({})
UNSUPPORTED = ("qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype")  # and those of the linen layer


class Parameters(nnx.Module):
    """Parameters by name: those of a projection, of a norm or of a composition."""

    def __init__(self, values: Mapping[str, Array], metadata: Mapping[str, Metadata]):
        for name, value in values.items():
            setattr(self, name, nnx.Param(value, **metadata.get(name, NONE)))

    def values(self) -> dict[str, Array]:
        """Return the arrays by name."""
        return {name: x[...] for name, x in vars(self).items() if isinstance(x, nnx.Param)}


class DCMHA(nnx.Module):
    """Multi-head attention whose heads compose dynamically, with the interface of `nnx.MultiHeadAttention`.

    The parameters are those of the flax layer, `query.kernel` and so on, with `pre` and `post` for the compositions.
    With `compose=None`, they are the same, and so is the output. The computation is that of the linen layer
    `dcvit.models.dcmha.DCMHA` as a function of these parameters.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        rngs: nnx.Rngs,
        deterministic: bool | None = None,
        keep_rngs: bool = True,
        kernel_metadata: Metadata = NONE,
        out_kernel_metadata: Metadata = NONE,
        bias_metadata: Metadata = NONE,
        out_bias_metadata: Metadata = NONE,
        query_ln_scale_metadata: Metadata = NONE,
        key_ln_scale_metadata: Metadata = NONE,
        **fields: Any,
    ):
        """Create the parameters.

        Args:
          num_heads: H.
          in_features: M, the width of the inputs.
          qkv_features: width H·D of the queries; None means M.
          out_features: width of the output; None means M.
          num_kv_heads: K, for grouped-query attention; None means H.
          in_kv_features: width of the inputs of keys and values; None means M.
          rngs: random streams; "params" draws the parameters, "dropout" the dropout.
          deterministic: no dropout; given here, by `nnx.Module.train` and `eval`, or in the call.
          keep_rngs: keep the dropout stream, if there is a dropout rate. Otherwise each call gets one.
          kernel_metadata, bias_metadata: metadata of the parameters of the projections.
          out_kernel_metadata, out_bias_metadata: those of the output projection; empty means those of the others.
          query_ln_scale_metadata, key_ln_scale_metadata: metadata of the norms' scales.
          **fields: further fields of `dcvit.models.dcmha.DCMHA`, such as `dtype`, `dropout_rate` or `compose`.

        Raises:
          TypeError: a field does not exist.
          ValueError: a field has a value that is not supported, or the numbers do not divide each other.
        """
        for name in UNSUPPORTED:
            if fields.pop(name, None) is not None:
                raise ValueError(f"DCMHA has no {name}: leave its default, or use flax's layer")
        fields["decode"] = bool(fields.get("decode"))
        self.in_features = in_features
        self.deterministic = deterministic
        self.layer = dcmha.DCMHA(
            num_heads, qkv_features=qkv_features, out_features=out_features, num_key_heads=num_kv_heads, **fields
        )
        x_q, x_k = (jnp.zeros((1, 1, width)) for width in (in_features, in_kv_features or in_features))
        drawn = _draw(self.layer, rngs.params(), x_q, x_k)
        inner = {"kernel": kernel_metadata, "bias": bias_metadata}
        outer = {"kernel": out_kernel_metadata or kernel_metadata, "bias": out_bias_metadata or bias_metadata}
        norms = {"query_ln": {"scale": query_ln_scale_metadata}, "key_ln": {"scale": key_ln_scale_metadata}}
        metadata = {**dict.fromkeys(("query", "key", "value"), inner), "out": outer, **norms}
        for name, values in drawn["params"].items():
            setattr(self, name, Parameters(values, metadata.get(name, {})))
        self.rngs = rngs.dropout.fork() if keep_rngs and self.layer.dropout_rate > 0 else None

    def __call__(
        self,
        inputs_q: Float[Array, "*B T M"],
        inputs_k: Float[Array, "*B S _"] | None = None,
        inputs_v: Float[Array, "*B S _"] | None = None,
        *,
        mask: Bool[Array, "..."] | Float[Array, "..."] | Int[Array, "..."] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
    ) -> Float[Array, "*B T _"]:
        """Attend from `inputs_q` to `inputs_k`, as the flax layer does.

        Args:
          inputs_q: inputs of the queries.
          inputs_k: inputs of the keys; None means `inputs_q`.
          inputs_v: inputs of the values; None means `inputs_k`.
          mask: broadcasts to (*B, 1, T, S): True or not zero where a query attends to a key, the same for all heads.
          deterministic: no dropout; None means the attribute.
          rngs: stream of the dropout; None means that of the module.
          sow_weights: sow the composed weights (*B, H, T, S) as `attention_weights`, an `nnx.Intermediate`.
          decode: not supported.
          is_causal: query i attends only to keys 0 … i.

        Raises:
          ValueError: as the linen layer, or the inputs do not have the width `in_features`.
        """
        if decode:
            raise ValueError("DCMHA has no decode: leave its default, or use flax's layer")
        if inputs_q.shape[-1] != self.in_features:
            raise ValueError(f"inputs_q has width {inputs_q.shape[-1]}, expected in_features={self.in_features}")
        deterministic, key = self._dropout(deterministic, rngs)
        layer = self.layer.clone(causal=True) if is_causal else self.layer
        params = {name: x.values() for name, x in vars(self).items() if isinstance(x, Parameters)}
        out: Array
        out, found = layer.apply(
            {"params": params}, inputs_q, inputs_k, inputs_v, mask=mask, deterministic=deterministic, dropout_rng=key,
            sow_weights=sow_weights, mutable=["intermediates"],
        )  # fmt: skip
        if sow_weights:
            self.sow(nnx.Intermediate, "attention_weights", found["intermediates"]["attention_weights"][0])
        return out

    def set_view(self, deterministic: bool | None = None, decode: bool | None = None) -> None:
        """Set the attribute `deterministic`, for `nnx.view`. Raises ValueError if `decode` is true."""
        if decode:
            raise ValueError("DCMHA has no decode: leave its default, or use flax's layer")
        if deterministic is not None:
            self.deterministic = deterministic

    def _dropout(self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None) -> tuple[bool, Array | None]:
        """Return whether there is no dropout, and its key."""
        if not self.layer.dropout_rate:
            return True, None
        given = self.deterministic if deterministic is None else deterministic
        if given is None:
            raise ValueError("a layer with dropout needs deterministic=True or False, in the constructor or the call")
        stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs or self.rngs
        if not given and stream is None:
            raise ValueError("a layer without its own random stream (keep_rngs=False) needs rngs in the call")
        return given, None if given or stream is None else stream()


@functools.partial(jax.jit, static_argnums=0)
def _draw(layer: dcmha.DCMHA, key: Array, x_q: Array, x_k: Array) -> dict[str, Any]:
    """Return the initial variables of a linen layer; equal layers compile once."""
    variables: dict[str, Any] = layer.init(key, x_q, x_k, deterministic=True)  # type: ignore[assignment]
    return variables
