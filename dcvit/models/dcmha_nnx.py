"""Drop-in replacement of flax's `nnx.MultiHeadAttention`, with the same arguments, call and parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Shape
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dcvit.dcmha.plan import Selection, selecting
from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.models import dcmha
from dcvit.models.composition import ComposeParams
from dcvit.models.fields import check_attention

# Arguments of flax's layer whose default is the only supported value; `dtype` alone decides on the computation.
UNSUPPORTED = (
    "attention_fn", "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls",
    "qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype",
)  # fmt: skip
COMPOSED = {field.name for field in dataclasses.fields(dcmha.ComposedFields)} - {"num_key_heads", "parent", "name"}
MODULES = ("query", "key", "value", "query_ln", "key_ln", "out", "pre", "post")  # those that have parameters


class ComposeParameters(nnx.Module):
    """Parameters of one compose ("pre" or "post"), with the names of `dcvit.models.composition.ComposeParams`."""

    def __init__(self, layer: dcmha.DCMHA, width: int, rngs: nnx.Rngs):
        params = ComposeParams(layer.composition(), layer.num_heads)
        for name, value in _draw(params, rngs.params(), width).items():
            setattr(self, name, nnx.Param(value))


class DCMHA(nnx.MultiHeadAttention):
    """Multi-head attention whose heads compose dynamically, with the interface of `nnx.MultiHeadAttention`.

    The parameters are those of the flax layer, `query.kernel` and so on, with `pre` and `post` for the compositions.
    The constructor of the flax layer draws them: with the same `rngs`, they have the same values and metadata. With
    `compose=None`, the output is the same, too. The computation is that of the linen layer
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
        **fields: Any,
    ):
        """Create the parameters.

        Args:
          num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features: as in flax.
          rngs: random streams; "params" draws the parameters, "dropout" the dropout.
          **fields: further arguments of `nnx.MultiHeadAttention`, such as `dtype`, `dropout_rate` or
            `kernel_metadata`, and the fields of `dcvit.models.dcmha.ComposedFields`, such as `compose` or `causal`.

        Raises:
          TypeError: an argument does not exist.
          ValueError: an argument has a value that is not supported, or the numbers do not divide each other.
        """
        arguments = inspect.signature(nnx.MultiHeadAttention.__init__).parameters
        dcmha.check_supported(fields, {name: p.default for name, p in arguments.items()}, UNSUPPORTED)
        composed = {name: fields.pop(name) for name in COMPOSED & fields.keys()}
        fields["normalize_qk"] = fields.get("normalize_qk", False) or composed.get("qk_norm") is not None
        super().__init__(
            num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features, rngs=rngs, **fields
        )
        self.layer = dcmha.DCMHA(
            num_heads, dtype=self.dtype, param_dtype=self.param_dtype, qkv_features=self.qkv_features,
            out_features=self.out_features, num_key_heads=self.num_kv_heads, broadcast_dropout=self.broadcast_dropout,
            precision=self.precision, use_bias=self.use_bias, normalize_qk=self.normalize_qk, **composed,
        )  # fmt: skip
        check_attention(self.layer, num_heads)
        if self.layer.compose and self.in_kv_features != in_features:
            raise ValueError(f"a composition needs inputs of one width, found {in_features} and {self.in_kv_features}")
        for name in self.layer.composition().names:
            setattr(self, name, ComposeParameters(self.layer, in_features, rngs))

    def __call__(
        self,
        inputs_q: Float[Array, "*B T M"],
        inputs_k: Float[Array, "*B S _"] | None = None,
        inputs_v: Float[Array, "*B S _"] | None = None,
        *,
        mask: Bool[Array, "..."] | Float[Array, "..."] | Int[Array, "..."] | None = None,
        segments: Int[Array, "*B T"] | tuple[Int[Array, "*B T"], Int[Array, "*B S"]] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: NamedSharding | P | None = None,
        qkv_sharding: NamedSharding | P | None = None,
        input_positions: Float[Array, "..."] | Int[Array, "..."] | None = None,
    ) -> Float[Array, "*B T _"]:
        """Attend from `inputs_q` to `inputs_k`, as the flax layer does.

        Args:
          inputs_q, inputs_k, inputs_v, deterministic, rngs, is_causal, qkv_sharding: as the flax layer takes them.
          mask, segments: as the linen layer takes them.
          sow_weights: sow the composed weights (*B, H, T, S) as `attention_weights`, an `nnx.Intermediate`.
          decode: add the one token to the cache of `init_cache`, and attend to all tokens in it; None means the
            attribute.
          out_sharding: sharding of the output on a mesh with explicit axes; None means that of `inputs_q`.
          input_positions: must be None; flax passes it to `attention_fn`, which this layer does not have.

        Raises:
          ValueError: as the linen layer, the inputs do not have the width `in_features`, or there is no cache.
        """
        if input_positions is not None:
            raise ValueError("DCMHA has no input_positions, because it has no attention_fn: use flax's layer")
        if inputs_q.shape[-1:] != (self.in_features,):
            raise ValueError(f"inputs_q has shape {inputs_q.shape}, expected a width of in_features={self.in_features}")
        decode = bool(self.decode if decode is None else decode)
        if decode and self.cached_key is None:
            raise ValueError("decode=True needs a cache: call init_cache first")
        deterministic, key = _dropout(self, deterministic, rngs)
        layer = self.layer.clone(
            causal=self.layer.causal or is_causal, decode=decode, dropout_rate=self.dropout_rate,
            qkv_sharding=getattr(qkv_sharding, "spec", qkv_sharding),
        )  # fmt: skip
        variables: dict[str, dict[str, Any]] = {"params": _params(self), "cache": _cache(self) if decode else {}}
        out: Array
        out, found = layer.apply(
            variables, inputs_q, inputs_k, inputs_v, mask=mask, segments=segments, deterministic=deterministic,
            dropout_rng=key, sow_weights=sow_weights, mutable=["intermediates", "cache"],
        )  # fmt: skip
        for name, value in found.get("cache", {}).items():
            getattr(self, name)[...] = value.astype(getattr(self, name).dtype)
        if sow_weights:
            self.sow(nnx.Intermediate, "attention_weights", found["intermediates"]["attention_weights"][0])
        return out if out_sharding is None else jax.sharding.reshard(out, out_sharding)

    def init_cache(self, input_shape: Shape, dtype: Dtype = jnp.float32) -> None:
        """Create an empty cache for decoding, or replace it.

        Args:
          input_shape: shape (*B, S, M) of the inputs of all tokens.
          dtype: dtype of keys, values and key-wise compose weights.
        """
        for name, x in _empty_cache(self, input_shape[:-1]).items():
            kind = dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
            setattr(self, name, nnx.Cache(jnp.zeros(x.shape, kind)))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Shape | None = None,
        max_length: int | None = None,
    ) -> None:
        """Set attributes for `nnx.view`; `decode`, `batch_size` and `max_length` together create a missing cache."""
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if decode and self.cached_key is None and batch_size is not None and max_length is not None:
            lead = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*lead, max_length, self.in_features), self.dtype or jnp.float32)


def _dropout(
    layer: DCMHA, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
) -> tuple[bool, Array | None]:
    """Return (deterministic, key of the dropout): True and None if there is no dropout."""
    if not layer.dropout_rate:
        return True, None
    given = layer.deterministic if deterministic is None else deterministic
    if given is None:
        raise ValueError("a layer with dropout needs deterministic=True or False, in the constructor or the call")
    stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs or layer.rngs
    if not given and stream is None:
        raise ValueError("a layer without its own random stream (keep_rngs=False) needs rngs in the call")
    return given, None if given or stream is None else stream()


def _params(layer: DCMHA) -> dict[str, dict[str, Array]]:
    """Return the parameters of `layer` by module and name, in the linen layer's tree."""
    modules = {name: getattr(layer, name, None) for name in MODULES}
    return {
        name: {key: x[...] for key, x in vars(module).items() if isinstance(x, nnx.Param)}
        for name, module in modules.items()
        if module is not None
    }


def _cache(layer: DCMHA) -> dict[str, Array]:
    """Return the arrays of the cache of `layer` by name; {} without a cache."""
    return {name: x[...] for name, x in vars(layer).items() if isinstance(x, nnx.Cache)}


def _empty_cache(layer: DCMHA, lead: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the cache's arrays; `lead` is (*B, S)."""
    net, widths = layer.layer.clone(decode=True, causal=True), (layer.in_features, layer.in_kv_features)
    x_q, x_k = (jax.ShapeDtypeStruct((*lead, width), jnp.float32) for width in widths)
    with selecting(Selection("off")):  # the shapes do not depend on kernels
        variables = jax.eval_shape(lambda q, k: net.init(jax.random.key(0), q, k), x_q, x_k)
    shapes: dict[str, jax.ShapeDtypeStruct] = variables["cache"]
    return shapes


@functools.partial(jax.jit, static_argnums=(0, 2))
def _draw(params: ComposeParams, key: Array, width: int) -> dict[str, Array]:
    """Return initial parameters of one compose by name; jitted, so that layers with equal `params` compile once."""
    values: dict[str, Array] = params.init(key, width)["params"]
    return values
