"""Multi-head attention module: projections, compose weights, attention over composed heads, output projection."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import PrecisionLike
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from dcvit.dcmha import Dropout, plan
from dcvit.dcmha.inputs import Attend, Call, Composition, Inputs, make_call
from dcvit.dcmha.kv_cache import Cache, cache_of, extend, visible, with_keys
from dcvit.dcmha.segments import Segments, make_segments
from dcvit.dcmha.shapes import Array, Bool, Float, Int, not_none
from dcvit.models import sharded_attention
from dcvit.models.composition import ComposeInput, ComposeParams, LayerWeights, compose_inputs, compose_weights
from dcvit.models.fields import AttentionFields, check_attention
from dcvit.models.layers import HeadDense, flat_product, in_float32, rotate
from dcvit.parallel.mesh import BATCH, active_mesh, constrain, constrain_to, shard_as


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
    mask: Bool[Array, "#B _ #T #S"] | None = None  # without a composition, heads may have their own
    angles: Float[Array, "#B T _"] | None = None
    segments: Segments | None = None
    cache: Cache | None = None  # the tokens before; see `Attention.decode`
    update: CacheUpdate | None = None


class Attended(NamedTuple):
    """Results of one call of an attention layer."""

    out: Float[Array, "B T _"]
    call: Call  # the call of attention
    cache: Cache  # the given cache with the new token or, without one, the tokens of this call alone


class Attention(AttentionFields):
    """Multi-head attention with optional dynamic composition (Section 3), also with a cache of earlier tokens.

    The parameter tree is that of flax's `MultiHeadDotProductAttention`, plus `pre` and `post` for the compositions. The
    module also has the fields of `AttentionFields`.

    Fields:
      num_heads: H; divides the width of queries, keys and values.
      num_key_heads: K, for grouped-query attention; None means H.
      qkv_features: width H·D of the queries; None means M.
      out_features: width of the output; None means M.
      use_bias: the four projections have biases.
      qkv_bias: initials of the projections among query, key and value that have a bias; None: as `use_bias` says.
      kernel_init, bias_init: initializers of the four projections.
      out_init, out_bias_init: initializers of the output projection; None means those of all.
      norm_names: names of the norms of queries and keys in the parameter tree.
      dtype: dtype of the computation; None means that of inputs and parameters.
      param_dtype: dtype of the parameters of the projections.
      precision: precision of the products with parameters, see `jax.lax.Precision`.
      qkv_sharding: sharding of queries, keys and values (*B, T, H, D); None splits heads over a mesh axis "tensor".
      causal, window: see `dcvit.dcmha.attention`.
      remat: recompute the attention in the backward pass instead of keeping arrays as large as T×S.
    """

    num_heads: int
    num_key_heads: int | None = None
    qkv_features: int | None = None
    out_features: int | None = None
    use_bias: bool = True
    qkv_bias: str | None = None
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    norm_names: tuple[str, str] = ("query_norm", "key_norm")
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: PrecisionLike = None
    qkv_sharding: P | None = None
    causal: bool = False
    window: int | None = None
    remat: bool = False

    def __call__(
        self,
        x_q: Float[Array, "B T M"],
        x_kv: Float[Array, "B S _"] | None = None,
        mask: Bool[Array, "#B _ #T #S"] | None = None,
        angles: Float[Array, "#B T _"] | None = None,
        segments: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    ) -> Float[Array, "B T _"]:
        """Attend from `x_q`, the inputs of the queries, to `x_kv`, those of keys and values, or to `x_q` itself.

        Args:
          x_q, x_kv: the inputs.
          mask, segments: as `dcvit.dcmha.attention` takes them; without a composition, the mask may have H heads.
          angles: rotary embedding of queries and keys, see `dcvit.models.layers.rotate`; None means none.

        Raises:
          ValueError: a field is invalid, sizes do not divide each other, or angles are combined with `x_kv`.
        """
        return self.attend(LayerInputs(x_q, x_kv, None, mask, angles, make_segments(segments))).out

    def prefill(
        self,
        x: Float[Array, "B T M"],
        cache: Cache,
        count: Int[Array, " B"],
        angles: Float[Array, "#B T _"] | None = None,
        segments: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T M"], Cache]:
        """Attend from the tokens of prompts to each other; return the output, and the cache with these tokens.

        The first `count` tokens of each example are real, and replace the tokens of the example in the cache; padding
        follows them. The cache of an example without real tokens is unchanged.
        """
        out, _, new = self.attend(LayerInputs(x, angles=angles, segments=make_segments(segments)))
        return out, extend(cache, new, jnp.zeros_like(count), count)

    def decode(
        self,
        x: Float[Array, "B T M"],
        cache: Cache,
        update: CacheUpdate,
        mask: Bool[Array, "#B 1 #T #S"] | None = None,
        angles: Float[Array, "#B T _"] | None = None,
    ) -> tuple[Float[Array, "B T M"], Cache]:
        """Attend from a new token to the tokens in a cache and to itself; return the output and the extended cache.

        The mask is that of the S slots of the cache, which `prefill`, `decode` or `dcvit.models.lm.init_cache` returns.

        Raises:
          ValueError: there are several tokens.
        """
        if x.shape[1] != 1:
            raise ValueError(f"decode takes one token of each example, found {x.shape[1]}: prefill takes several")
        out, _, cache = self.attend(LayerInputs(x, mask=mask, angles=angles, cache=cache, update=update))
        return out, cache

    @nn.compact
    def attend(self, x: LayerInputs, dropout: Dropout | None = None) -> Attended:
        """Return the results for the inputs: those of `__call__`, or one token and the cache of earlier ones."""
        inputs, causal, window = attention_inputs(self, x), self.causal, self.window
        cache = cache_of(inputs)
        if x.cache is not None and x.update is not None:
            cache = extend(x.cache, cache, x.update.start, x.update.added)
            inputs, causal, window = attend_to_cache(self, cache, inputs, x.update), False, None
        has_head_masks = not self.compose and inputs.mask is not None and inputs.mask.shape[1] > 1
        inputs = heads_as_examples(inputs) if has_head_masks else inputs
        composition = self.composition() if self.compose else Composition()  # groups and branches count with a compose
        call = make_call(inputs, composition, causal=causal, window=window)
        heads = head_outputs(self, call, dropout)
        if has_head_masks:
            heads = heads.reshape(len(x.q), self.num_heads, heads.shape[1], -1).swapaxes(1, 2)
        heads = constrain(heads, BATCH, "context", "tensor", None)
        return Attended(shard_as(self.output(heads, x.q.shape[-1]), x.q), call, cache)

    def project(self, x_q: Array, x_k: Array, x_v: Array, angles: Array | None) -> tuple[Array, Array, Array]:
        """Return queries B T H D, keys and values B S K D of the inputs, after any QK-norm and rotary embedding."""
        biases = "qkv" * self.use_bias if self.qkv_bias is None else self.qkv_bias
        dense = functools.partial(
            HeadDense, head_dim=head_width(self, x_q.shape[-1]), kernel_init=self.kernel_init, bias_init=self.bias_init,
            dtype=self.dtype, param_dtype=self.param_dtype, precision=self.precision,
        )  # fmt: skip
        key_heads = self.num_key_heads or self.num_heads
        q = sharded_heads(self, dense(self.num_heads, use_bias="q" in biases, name="query")(x_q))
        k = sharded_heads(self, dense(key_heads, use_bias="k" in biases, name="key")(x_k))
        v = sharded_heads(self, dense(key_heads, use_bias="v" in biases, name="value")(x_v))
        if self.qk_norm:
            q, k = (normalized(self, name, x) for name, x in zip(self.norm_names, (q, k), strict=True))
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        return q, k, v

    def compose_weights(self, width: int, inputs: dict[str, ComposeInput]) -> LayerWeights:
        """Return the layer's weights for inputs of M = `width`."""
        composition = self.composition()
        params = {name: ComposeParams(composition, self.num_heads, name=name)(width) for name in composition.names}
        return compose_weights(composition, params, inputs, num_heads=self.num_heads, dtype=self.dtype)

    def output(self, x: Float[Array, "B T H D"], width: int) -> Float[Array, "B T _"]:
        """Return the output projection of all heads; its width is `out_features`, or `width` if that is None."""
        kernel_init, bias_init = self.out_init or self.kernel_init, self.out_bias_init or self.bias_init
        dense = nn.DenseGeneral(
            self.out_features or width, axis=(-2, -1), use_bias=self.use_bias, kernel_init=kernel_init,
            bias_init=bias_init, dtype=self.dtype, param_dtype=self.param_dtype, precision=self.precision,
            dot_general=flat_product, name="out",
        )  # fmt: skip
        out: Array = dense(x)
        return out


def attention_inputs(layer: Attention, x: LayerInputs) -> Inputs:
    """Return attention's inputs for the tokens of a call: projections and compose weights (Eqn 5-6)."""
    x_k = x.q if x.k is None else x.k
    if x.angles is not None and x_k is not x.q:
        raise ValueError("a rotary embedding needs queries and keys of the same tokens")
    if layer.compose and x_k.shape[-1] != x.q.shape[-1]:
        raise ValueError(f"a composition needs inputs of one width, found {x.q.shape[-1]} and {x_k.shape[-1]}")
    to_compose = compose_inputs(x.q, x_k, groups=layer.groups) if layer.compose else {}
    q, k, v = layer.project(x.q, x_k, x_k if x.v is None else x.v, x.angles)
    pre, post, hidden = layer.compose_weights(x.q.shape[-1], to_compose) if to_compose else LayerWeights()
    return Inputs(q, k, v, pre, post, x.mask, x.segments, hidden)


def head_width(layer: Attention, width: int) -> int:
    """Return D of a layer for inputs of M = `width`.

    Raises:
      ValueError: the fields are invalid or do not fit the width.
    """
    heads, key_heads = layer.num_heads, layer.num_key_heads
    check_attention(layer, heads)
    inner = width if layer.qkv_features is None else layer.qkv_features
    if inner % heads:
        name = "width" if layer.qkv_features is None else "qkv_features"
        raise ValueError(f"num_heads={heads} does not divide {name}={inner}")
    if key_heads is not None and (key_heads < 1 or heads % key_heads):
        raise ValueError(f"num_key_heads={key_heads} does not divide num_heads={heads}")
    return inner // heads


def sharded_heads(layer: Attention, x: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
    """Constrain the sharding of queries, keys or values."""
    if layer.qkv_sharding is None:
        return constrain(x, BATCH, "context", "tensor", None)
    return constrain_to(x, layer.qkv_sharding)


def normalized(layer: Attention, name: str, x: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
    """Return the QK-norm `name` of queries or keys."""
    norm: Callable[..., nn.Module] = (
        nn.RMSNorm if layer.qk_norm == "rmsnorm" else functools.partial(nn.LayerNorm, use_bias=False)
    )
    return in_float32(norm(epsilon=layer.qk_norm_epsilon, param_dtype=layer.param_dtype, name=name), x)


def head_outputs(layer: Attention, call: Call, dropout: Dropout | None) -> Float[Array, "B T H D"]:
    """Return the outputs of all heads before the output projection."""
    is_plain_layer = call.is_plain and layer.implementation == "folded"  # of a model whose other layers compose
    takes_pairs = call.inputs.composed is None or layer.implementation in plan.OF_PAIRS  # of a cache
    implementation = None if is_plain_layer or not takes_pairs else layer.implementation
    attention = plan.attention if active_mesh() is None else sharded_attention.attention
    attend: Attend = functools.partial(attention, implementation=implementation, dropout=dropout)
    if layer.remat:
        attend = jax.checkpoint(attend, policy=jax.checkpoint_policies.nothing_saveable)
    return attend(call)


def attend_to_cache(layer: Attention, cache: Cache, inputs: Inputs, update: CacheUpdate) -> Inputs:
    """Return attention's inputs for one new token: its query, the cached keys and values, a mask of visible ones."""
    if inputs.segments is not None:
        raise ValueError("one token that attends to a cache has no segments: give a mask of the slots")
    length = update.start + update.added
    slots, compose_window = cache.k.shape[1], layer.compose_window
    mask = visible(slots, length, window=layer.window, first=update.oldest_visible)
    mask = mask if inputs.mask is None else mask & inputs.mask
    composed = None if compose_window is None else visible(slots, length, window=compose_window)
    k, v = (x.reshape(*x.shape[:2], *inputs.k.shape[2:]).astype(inputs.k.dtype) for x in (cache.k, cache.v))
    pre, post = with_keys(inputs.pre, cache.pre), with_keys(inputs.post, cache.post)
    return Inputs(inputs.q, k, v, pre, post, mask, composed=composed)


def heads_as_examples(inputs: Inputs) -> Inputs:
    """Return the inputs of plain attention as B·H examples with one head, so that each head has its own mask."""
    batch, _, heads, _ = inputs.q.shape
    mask = not_none(inputs.mask)

    def split(x: Array) -> Array:
        x = jnp.repeat(x, heads // x.shape[2], axis=2)
        return x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], 1, x.shape[3])

    masks = jnp.broadcast_to(mask, (batch, *mask.shape[1:])).reshape(batch * heads, 1, *mask.shape[2:])
    segments = jax.tree.map(lambda ids: jnp.repeat(ids, heads, axis=0), inputs.segments)
    return Inputs(split(inputs.q), split(inputs.k), split(inputs.v), None, None, masks, segments)
