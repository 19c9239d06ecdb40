"""Drop-in replacement of flax's `nn.MultiHeadDotProductAttention`: the same fields, call, parameters and cache.

`dcvit.models.attention` computes the attention. This module adds the parts of flax's interface that the models of this
project do not use: inputs with any leading axes, masks of numbers or for each head, dropout of the weights, meshes with
explicit axes, and the cache as a collection of variables.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from dcvit.dcmha import Dropout
from dcvit.dcmha.backends.xla.reference import attention_matrices
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.kv_cache import Cache
from dcvit.dcmha.segments import make_segments
from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.models import Params
from dcvit.models.attention import Attention, CacheUpdate, LayerInputs
from dcvit.models.fields import AttentionFields, values_of
from dcvit.parallel.mesh import divisible_axes, explicit_mesh, with_auto_axes

# Arguments of flax's layer whose default is the only supported value: fused implementations have no attention function
# or einsums that could be replaced, and flax has deprecated the others.
UNSUPPORTED = (
    "attention_fn", "qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls", "qkv_dot_general",
    "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls",
)  # fmt: skip


class LayerOutputs(NamedTuple):
    """Results of one call of a layer; weights and cache are None unless they are asked for."""

    out: Float[Array, "*B T _"]
    weights: Float[Array, "*B H T S"] | None  # the composed weights
    cache: Cache | None  # the given cache with the new token, or the tokens of the call alone


class ComposedFields(AttentionFields, kw_only=True):
    """Fields that flax's layer does not have (keyword only), in addition to those of `AttentionFields`.

    Fields:
      compose: the attention matrices that are composed: "both", "pre" (scores), "post" (weights) or None.
      num_key_heads: K, for grouped-query attention; None means H.
      causal, window: see `dcvit.dcmha.attention`.
      qkv_sharding: see `Attention`.
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
      qkv_features, out_features: width of all queries, and of the output; None means that of the inputs.
      dropout_rate: dropout rate of the composed attention weights; a rate of 1 removes all of them.
      broadcast_dropout: all examples and heads lose the weights of the same pairs of tokens.
      deterministic: no dropout; given here or in the call.
      dtype, param_dtype, precision: dtypes of the computation and of the parameters, and precision of the projections.
      kernel_init, bias_init, out_kernel_init, out_bias_init: initializers of the projections; those of the output are
        by default the same.
      use_bias: the projections have biases.
      normalize_qk: norm of queries and keys, by default LayerNorm.
      decode: keep keys, values and key-wise compose weights of earlier tokens in the collection "cache". `init` with
        inputs of S tokens creates S slots; each call of `apply(..., mutable=["cache"])` takes one token and attends to
        the tokens before. After S tokens, each replaces the oldest one.
      force_fp32_for_softmax: always true.
      attention_fn, qk_attn_weights_einsum_cls, attn_weights_value_einsum_cls: leave their defaults.
      qkv_dot_general, out_dot_general, qkv_dot_general_cls, out_dot_general_cls: leave their defaults.
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
            precision=self.precision, qkv_sharding=self.qkv_sharding, causal=self.causal, window=self.window, **fields,
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
        segments: Int[Array, "*B T"] | tuple[Int[Array, "*B T"], Int[Array, "*B S"]] | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*B T _"]:
        """Attend from `inputs_q` to `inputs_k`, as the flax layer does.

        Args:
          inputs_q, inputs_k, inputs_v, inputs_kv, deterministic, dropout_rng: as the flax layer takes them.
          mask: True or not zero where a query attends to a key; broadcasts to (*B, H, T, S), with a composition to
            (*B, 1, T, S), because it mixes the heads. With a cache, the S keys are its slots.
          segments: int32 ids of the tokens of packed rows, or the pair of those of queries and keys: a query attends
            only to keys with its own id. Flax's layer needs a mask for this. With a cache, give a mask.
          sow_weights: sow the composed weights (*B, H, T, S) as `attention_weights` into "intermediates", as they are
            before dropout.

        Raises:
          ValueError: as `Attention`, a field has a value that is not supported, the inputs lack an axis or have
            different leading axes, or there is a cache and T > 1.
        """
        if inputs_kv is not None and (inputs_k is not None or inputs_v is not None):
            raise ValueError("give either inputs_kv, or inputs_k and inputs_v")
        if inputs_k is None and inputs_v is not None:
            raise ValueError("inputs_v needs inputs_k; if keys and values have the same inputs, give inputs_k only")
        inputs_k = inputs_k if inputs_kv is None else inputs_kv
        inputs = LayerInputs(inputs_q, inputs_k, inputs_v, mask, segments=make_segments(segments))
        check_axes(inputs)
        is_cached = self.decode and self.has_variable("cache", "cached_key")
        inputs = self._with_cache(inputs) if is_cached else inputs
        if not self.dropout_rate or nn.merge_param("deterministic", self.deterministic, deterministic):
            dropout_rng = None
        elif dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        mesh = explicit_mesh(inputs, dropout_rng, self.variables)
        attend = self.results if mesh is None else functools.partial(self._results_on, mesh)
        results = attend(inputs, dropout_rng, sow_weights)
        if results.weights is not None:
            self.sow("intermediates", "attention_weights", results.weights)
        if results.cache is not None:
            self._store(results.cache, is_cached)
        return results.out

    def results(self, inputs: LayerInputs, dropout_key: Array | None, with_weights: bool) -> LayerOutputs:
        """Return the results for inputs with any leading axes, which the results have, too."""
        lead = inputs.q.shape[:-2]
        flat = flat_inputs(inputs, mask_heads=1 if self.compose else self.num_heads)
        dropout = None if dropout_key is None else Dropout(dropout_key, self.dropout_rate, self.broadcast_dropout)
        out, call, cache = self.attention.attend(flat, dropout)
        weights = None
        if with_weights:
            weights = attention_matrices(call.inputs, call.options).composed_weights
            weights = weights.reshape(len(flat.q), -1, *weights.shape[2:])  # heads may be examples
        results = LayerOutputs(out, weights, cache if self.decode else None)
        return results if len(lead) == 1 else jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), results)

    def _results_on(
        self, mesh: AbstractMesh, inputs: LayerInputs, dropout_key: Array | None, with_weights: bool
    ) -> LayerOutputs:
        """Return the `results` on a mesh with explicit axes, sharded as the inputs of the queries."""
        if self.is_initializing():  # parameters exist outside of the automatic axes
            tokens = LayerInputs(inputs.q, inputs.k, inputs.v)
            self.attention.attend(jax.tree.map(lambda x: jnp.zeros((1, 1, x.shape[-1]), x.dtype), tokens))
        variables = {"params": nn.meta.unbox(self.variables["params"])}
        spec = jax.typeof(inputs.q).sharding.spec
        width = divisible_axes((self.out_features or inputs.q.shape[-1],), spec[-1:], mesh)
        examples = P(*spec[:-2])
        specs = P(*spec[:-1], *width), examples if with_weights else None, examples if self.decode else None
        attend = _with_auto_axes(self.clone(parent=None), with_weights, mesh, specs)
        return LayerOutputs(*attend(variables, inputs, dropout_key))

    def _with_cache(self, inputs: LayerInputs) -> LayerInputs:
        """Return `inputs`, which are of one token, with `cache` and `update` from the collection "cache"."""
        variables: Mapping[str, Array] = self.variables["cache"]
        *lead, slots = variables["cached_key"].shape[:-2]
        shapes = [x.shape[:-1] for x in inputs[:3] if x is not None]
        if {*shapes} != {(*lead, 1)}:
            raise ValueError(f"decode=True takes inputs of shape {(*lead, 1)} before the width, found {shapes}")
        index = variables["cache_index"]
        start, added, oldest = (jnp.broadcast_to(x, lead) for x in (index, jnp.ones_like(index), jnp.zeros_like(index)))
        k, v = (variables[name].reshape(*lead, slots, -1) for name in ("cached_key", "cached_value"))
        pre, post = (_with_prefix(variables, f"cached_{name}_") for name in ("pre", "post"))
        return inputs._replace(cache=Cache(k, v, pre, post), update=CacheUpdate(start, added, oldest))

    def _store(self, cache: Cache, is_cached: bool) -> None:
        """Write `cache` to the collection "cache" and count its new token; unless `is_cached`, write zeros instead."""
        heads = self.num_key_heads or self.num_heads
        arrays = {"cached_key": cache.k, "cached_value": cache.v}
        arrays = {name: x.reshape(*x.shape[:-1], heads, -1) for name, x in arrays.items()}
        for compose_name, weights in (("pre", cache.pre), ("post", cache.post)):
            fields = {} if weights is None else weights._asdict()
            arrays |= {f"cached_{compose_name}_{name}": x for name, x in fields.items() if x is not None}
        for name, x in arrays.items():
            self.put_variable("cache", name, x if is_cached else jnp.zeros_like(x))
        index = self.get_variable("cache", "cache_index") + 1 if is_cached else jnp.zeros((), jnp.int32)
        self.put_variable("cache", "cache_index", index)


@functools.lru_cache(maxsize=64)  # so that another call of an equal layer compiles nothing
def _with_auto_axes(
    layer: DCMHA, with_weights: bool, mesh: AbstractMesh, specs: tuple[P | None, ...]
) -> Callable[..., tuple[Array, Array | None, Cache | None]]:
    """Return `results` as a function (variables, inputs, dropout key) of arrays, with results sharded by `specs`."""

    def call(
        variables: Mapping[str, Params], inputs: LayerInputs, dropout_key: Array | None
    ) -> tuple[Array, Array | None, Cache | None]:
        found: LayerOutputs = layer.apply(variables, inputs, dropout_key, with_weights, method="results")  # type: ignore[assignment]
        return found.out, found.weights, found.cache

    return with_auto_axes(call, mesh, specs)


def check_axes(inputs: LayerInputs) -> None:
    """Raise ValueError if inputs or segments lack an axis, or have other leading axes than the queries."""
    shapes = [x.shape for x in (inputs.q, inputs.k, inputs.v) if x is not None]
    if any(len(shape) < 2 or shape[:-2] != shapes[0][:-2] for shape in shapes):
        raise ValueError(f"expected inputs (*B, T, M) with the same leading axes, found {shapes}")
    tokens = [shapes[0][:-1], shapes[min(1, len(shapes) - 1)][:-1]]
    for ids, expected in zip(inputs.segments or (), tokens, strict=False):
        if ids.shape != expected:
            raise ValueError(f"segments have shape {ids.shape}, expected {expected}")


def flat_inputs(inputs: LayerInputs, *, mask_heads: int) -> LayerInputs:
    """Return the inputs with a single leading axis B, and the mask as booleans with 1 or `mask_heads` heads."""
    lead, queries = inputs.q.shape[:-2], inputs.q.shape[-2]
    keys = (inputs.q if inputs.k is None else inputs.k).shape[-2]
    if inputs.cache is not None and queries == 1:
        keys = inputs.cache.k.shape[-2]

    merged: dict[int, Array] = {}  # so that an array stays one: queries and keys of the same tokens

    def merge(x: Array) -> Array:
        if len(lead) != 1 and id(x) not in merged:
            merged[id(x)] = x.reshape(-1, *x.shape[len(lead) :])
        return x if len(lead) == 1 else merged[id(x)]

    flat: LayerInputs = jax.tree.map(merge, inputs._replace(mask=None))
    mask = None if inputs.mask is None else boolean_mask(inputs.mask, (*lead, mask_heads, queries, keys))
    return flat._replace(mask=mask)


def boolean_mask(
    mask: Bool[Array, "..."] | Float[Array, "..."] | Int[Array, "..."], expected: tuple[int, ...]
) -> Bool[Array, "_ _ _ _"]:
    """Convert a mask of flax, numbers or booleans that broadcast to `expected`, to booleans with one leading axis.

    Args:
      mask: True or not zero where a query attends to a key.
      expected: shape (*B, H, T, S); with a composition, (*B, 1, T, S).

    Raises:
      ValueError: the shape does not broadcast.
    """
    lead, shape = expected[:-3], (1,) * (len(expected) - mask.ndim) + mask.shape
    if len(shape) > len(expected) or any(n not in (1, most) for n, most in zip(shape, expected, strict=True)):
        why = ", because a composition mixes the heads: all share one mask" if expected[-3] == 1 else ""
        raise ValueError(f"mask has shape {mask.shape}, expected it to broadcast to {expected}{why}")
    if mask.dtype != jnp.bool_:
        mask = mask != 0
    if all(n == 1 for n in shape[:-3]):
        return mask.reshape(1, *shape[-3:])
    if len(lead) == 1:
        return mask.reshape(shape)
    return jnp.broadcast_to(mask.reshape(shape), (*lead, *shape[-3:])).reshape(-1, *shape[-3:])


def _with_prefix(variables: Mapping[str, Array], prefix: str) -> ComposeWeights | None:
    """Return compose weights from the variables whose names start with `prefix`; None if there are none."""
    fields = {name.removeprefix(prefix): x for name, x in variables.items() if name.startswith(prefix)}
    return ComposeWeights(**fields) if fields else None


def check_supported(values: Mapping[str, object], defaults: Mapping[str, object], unsupported: Sequence[str]) -> None:
    """Raise ValueError if an argument named in `unsupported` does not have its default."""
    for name in unsupported:
        if name in values and values[name] is not defaults[name]:
            raise ValueError(f"DCMHA does not support {name}: leave its default, or use flax's layer")
