"""Multi-head attention module: projections, compose weights, `dcvit.dcmha.attention` and the output projection."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from dcvit.dcmha import Dropout, attention_weights
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.kv_cache import Cache, extend, key_wise, visible, with_keys
from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.models import Params, head_variants, sharded_attention
from dcvit.models.composition import ComposeInput, ComposeParams, compose_inputs, compose_weights
from dcvit.models.fields import BranchFields, values_of
from dcvit.models.projections import Projections
from dcvit.parallel.mesh import BATCH, constrain, divisible_axes, explicit_mesh, shard_as, with_auto_axes


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


class LayerInputs(NamedTuple):
    """Arrays of one call of a layer, with any number of leading axes; `LayerInputs.flat` makes it one."""

    q: Float[Array, "*B T M"]
    k: Float[Array, "*B S _"] | None = None  # None: as q
    v: Float[Array, "*B S _"] | None = None  # None: as k
    mask: Bool[Array, "..."] | Float[Array, "..."] | Int[Array, "..."] | None = None
    positions: Int[Array, "..."] | None = None
    dropout_key: Array | None = None
    cache: Cache | None = None  # the tokens before; see `FlatAttention.decode`
    update: CacheUpdate | None = None

    def check_axes(self) -> None:
        """Raise ValueError if inputs lack an axis, or have other leading axes than the queries."""
        shapes = [x.shape for x in (self.q, self.k, self.v) if x is not None]
        if any(len(shape) < 2 or shape[:-2] != shapes[0][:-2] for shape in shapes):
            raise ValueError(f"expected inputs (*B, T, M) with the same leading axes, found {shapes}")

    def flat(self, mask_heads: int) -> LayerInputs:
        """Return the inputs with a single leading axis B, and the mask as booleans with 1 or `mask_heads` heads."""
        lead, queries = self.q.shape[:-2], self.q.shape[-2]
        keys = (self.q if self.k is None else self.k).shape[-2]
        if self.cache is not None and queries == 1:
            keys = self.cache.k.shape[-2]

        merged: dict[int, Array] = {}  # so that an array stays one: queries and keys of the same tokens

        def merge(x: Array) -> Array:
            if len(lead) != 1 and id(x) not in merged:
                merged[id(x)] = x.reshape(-1, *x.shape[len(lead) :])
            return x if len(lead) == 1 else merged[id(x)]

        q, k, v, cache, update = jax.tree.map(merge, (self.q, self.k, self.v, self.cache, self.update))
        mask = None if self.mask is None else boolean_mask(self.mask, (*lead, mask_heads, queries, keys))
        positions = None if self.positions is None else flat_positions(self.positions, lead, queries)
        return LayerInputs(q, k, v, mask, positions, self.dropout_key, cache, update)


class LayerOutputs(NamedTuple):
    """Results of one call of a layer; weights and cache are None unless they are asked for."""

    out: Float[Array, "*B T _"]
    weights: Float[Array, "*B H T S"] | None = None  # the composed weights
    cache: Cache | None = None  # the given cache with the new tokens, or these alone


def boolean_mask(
    mask: Bool[Array, "..."] | Float[Array, "..."] | Int[Array, "..."], expected: tuple[int, ...]
) -> Bool[Array, "_ _ _ _"]:
    """Return a mask as flax makes it, of numbers or booleans that broadcast to `expected`, with one leading axis.

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


def flat_positions(positions: Int[Array, "..."], lead: tuple[int, ...], length: int) -> Int[Array, "_ T"]:
    """Return positions that broadcast to (*lead, T) with one leading axis.

    Raises:
      ValueError: the shape does not broadcast.
    """
    if positions.ndim and positions.shape[-1] == length and all(n == 1 for n in positions.shape[:-1]):
        return positions.reshape(1, length)
    try:
        return jnp.broadcast_to(positions, (*lead, length)).reshape(-1, length)
    except ValueError:
        raise ValueError(f"positions of shape {positions.shape} do not broadcast to {(*lead, length)}") from None


class FlatAttention(Projections):
    """Attention of inputs B T M, also with a cache of earlier tokens; the base class of `Attention`.

    Fields:
      causal, window: see `dcvit.dcmha.attention`.
      prefill_window: with `window`, the window of a call with several tokens; None means `window`.
      dropout_rate: dropout rate of the composed attention weights.
      broadcast_dropout: all examples and heads lose the weights of the same pairs of tokens.
      deterministic: no dropout; given here or in the call.
      remat: recompute the attention in the backward pass instead of keeping arrays as large as T×S.
      heads: a variant of `dcvit.models.head_variants` instead of a composition, or None.
      layer: number of the layer, from 0; some variants depend on it.
    """

    causal: bool = False
    window: int | None = None
    prefill_window: int | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True
    deterministic: bool | None = None
    remat: bool = False
    heads: str | None = None
    layer: int = 0

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
          mask: as `dcvit.dcmha.attention` takes it; if T = 1, the S keys are the slots of the cache.
          positions: as in `Attention`.

        Returns:
          The output, and the cache with the new tokens.
        """
        result = self._attend(LayerInputs(x, mask=mask, positions=positions, cache=cache, update=update))
        assert result.cache is not None
        return result.out, result.cache

    @nn.compact
    def _attend(self, inputs: LayerInputs, return_weights: bool = False) -> LayerOutputs:
        """Return the output, the composed weights if asked for, and the cache, for flat inputs."""
        x_q, mask = inputs.q, inputs.mask
        x_k = x_q if inputs.k is None else inputs.k
        if self.rotary and x_k is not x_q:
            raise ValueError("a rotary embedding needs queries and keys of the same tokens")
        if self.compose and x_k.shape[-1] != x_q.shape[-1]:
            raise ValueError(f"a composition needs inputs of one width, found {x_q.shape[-1]} and {x_k.shape[-1]}")
        to_compose = compose_inputs(x_q, x_k, groups=self.groups) if self.compose else {}
        q, k, v = self.project(x_q, x_k, x_k if inputs.v is None else inputs.v, inputs.positions)
        compose = self._compose_weights(x_q.shape[-1], to_compose)
        arrays = AttentionInputs(q, k, v, compose.get("pre"), compose.get("post"))
        causal, window = self.causal, self.window and (self.prefill_window or self.window)
        cache = _cache_of(arrays)
        if inputs.cache is not None and inputs.update is not None:
            cache = extend(inputs.cache, cache, inputs.update.start, inputs.update.added)
            if x_q.shape[1] == 1:  # several tokens attend to each other only, because the cache was empty
                arrays, mask = _attend_to_cache(cache, arrays, inputs.update, mask, self.window)
                causal, window = False, None
        has_per_head_mask = mask is not None and mask.shape[1] > 1
        if mask is not None and has_per_head_mask:
            arrays, mask = _heads_as_examples(arrays, mask)
        groups = self.groups if self.compose else head_variants.groups_of(self.heads, self.num_heads)
        attend: Callable[..., Array] = functools.partial(
            sharded_attention.attention, causal=causal, window=window, groups=groups, dropout=self._dropout(inputs),
            implementation=self.implementation,
        )  # fmt: skip
        if self.remat:
            attend = jax.checkpoint(attend, policy=jax.checkpoint_policies.nothing_saveable)
        attend = functools.partial(attend, mask=mask)
        heads = attend(*arrays) if self.heads is None else self._variant()(x_q, *arrays[:3], attend)
        if has_per_head_mask:
            heads = heads.reshape(len(q), -1, *heads.shape[1:2], heads.shape[-1]).swapaxes(1, 2)
        out = shard_as(self.output(constrain(heads, BATCH, None, "tensor", None), x_q.shape[-1]), x_q)
        if not return_weights:
            return LayerOutputs(out, None, cache)
        if self.heads is not None:
            raise ValueError(f"heads={self.heads!r} has no attention weights to return")
        weights = attention_weights(
            arrays.q, arrays.k, arrays.pre, arrays.post, mask=mask, causal=causal, window=window, groups=groups
        )
        return LayerOutputs(out, weights.reshape(len(q), -1, *weights.shape[2:]), cache)

    def query_heads(self) -> int:
        """Return the number of heads of the queries, which is twice `num_heads` for some variants."""
        return head_variants.query_heads(self.heads, self.num_heads)

    def _variant(self) -> head_variants.HeadVariant:
        """Return the module of `heads`."""
        assert self.heads is not None
        return head_variants.make_variant(
            self.heads, self.num_heads, layer=self.layer, kernel_init=self.kernel_init, dtype=self.dtype
        )

    def _dropout(self, inputs: LayerInputs) -> Dropout | None:
        """Return the dropout of a call, or None."""
        if inputs.dropout_key is None:
            return None
        return Dropout(inputs.dropout_key, self.dropout_rate, self.broadcast_dropout)

    def _compose_weights(self, width: int, inputs: Mapping[str, ComposeInput]) -> dict[str, ComposeWeights]:
        """Return the weights of the compositions "pre" and "post", as far as `compose` asks for them."""
        params = {
            where: ComposeParams(self.num_heads, **values_of(self, BranchFields), name=where)(width)
            for where in ("pre", "post")
            if self.compose in (where, "both")
        }
        return compose_weights(params, inputs, num_heads=self.num_heads, gelu=self.compose_gelu, dtype=self.dtype)


class Attention(FlatAttention):
    """Multi-head attention with optional dynamic composition.

    The parameter tree is that of flax's `MultiHeadDotProductAttention`, with `pre` and `post` for the
    compositions. The module has the fields of `FlatAttention`, `Projections` and
    `AttentionFields`.
    """

    @overload
    def __call__(
        self, x_q: Array, x_kv: Array | None = ..., mask: Array | None = ..., positions: Array | None = ..., *,
        x_v: Array | None = ..., deterministic: bool | None = ..., dropout_rng: Array | None = ...,
    ) -> Array: ...  # fmt: skip

    @overload
    def __call__(
        self, x_q: Array, x_kv: Array | None = ..., mask: Array | None = ..., positions: Array | None = ..., *,
        x_v: Array | None = ..., deterministic: bool | None = ..., dropout_rng: Array | None = ...,
        return_weights: bool,
    ) -> tuple[Array, Array]: ...  # fmt: skip

    def __call__(
        self,
        x_q: Float[Array, "*B T M"],
        x_kv: Float[Array, "*B S _"] | None = None,
        mask: Bool[Array, "..."] | Float[Array, "..."] | Int[Array, "..."] | None = None,
        positions: Int[Array, "..."] | None = None,
        *,
        x_v: Float[Array, "*B S _"] | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Float[Array, "*B T _"] | tuple[Float[Array, "*B T _"], Float[Array, "*B H T S"]]:
        """Attend from `x_q` to `x_kv`, or to `x_q` itself.

        On a mesh with explicit axes, the output is sharded as `x_q`.

        Args:
          x_q: inputs of the queries, with any number of leading axes.
          x_kv: inputs of the keys and values; None means `x_q`.
          mask: True or not zero where a query attends to a key; broadcasts to (*B, H, T, S), as masks of flax do, and
            to (*B, 1, T, S) with a composition, which mixes the heads. The output of a query whose keys are all masked
            is that of attention weights of zero.
          positions: positions of the tokens for a rotary embedding, which broadcast to (*B, T); None means 0 … T-1.
          x_v: inputs of the values, if not `x_kv`.
          deterministic: no dropout. If there is a dropout rate, exactly one of field and argument is given.
          dropout_rng: key of the dropout; None means the rng stream "dropout".
          return_weights: also return the composed attention weights, before dropout.

        Raises:
          ValueError: a field has none of its valid values, the numbers of heads, key heads and groups and the width do
            not divide each other as they must, the inputs lack an axis or have different leading axes, the mask does
            not broadcast, or a rotary embedding is combined with `x_kv`.
        """
        inputs = LayerInputs(x_q, x_kv, x_v, mask, positions, dropout_rng)
        result = self.attend(inputs, deterministic=deterministic, return_weights=return_weights)
        if result.weights is not None:
            return result.out, result.weights
        return result.out

    def attend(
        self,
        inputs: LayerInputs,
        *,
        deterministic: bool | None = None,
        return_weights: bool = False,
        return_cache: bool = False,
    ) -> LayerOutputs:
        """Attend as `__call__`, also to the tokens of a cache.

        Args:
          inputs: arrays of the call, all with the leading axes *B of the queries. `cache` needs `update`.
          deterministic: no dropout.
          return_weights: return the composed attention weights.
          return_cache: return the cache with the new tokens; without a cache in `inputs`, that of the new tokens alone.

        Raises:
          ValueError: as `__call__`.
        """
        inputs.check_axes()
        if not self.dropout_rate or nn.merge_param("deterministic", self.deterministic, deterministic):
            inputs = inputs._replace(dropout_key=None)
        elif inputs.dropout_key is None:
            inputs = inputs._replace(dropout_key=self.make_rng("dropout"))
        mesh = explicit_mesh(inputs)
        call = self._call if mesh is None else functools.partial(self._call_explicitly, mesh)
        return call(inputs, return_weights, return_cache)

    def _call_explicitly(
        self, mesh: AbstractMesh, inputs: LayerInputs, return_weights: bool, return_cache: bool
    ) -> LayerOutputs:
        """Return `_call` on a mesh with explicit axes, sharded as the inputs of the queries."""
        if self.is_initializing():  # parameters exist outside of the automatic axes
            tokens = LayerInputs(inputs.q, inputs.k, inputs.v)
            self._attend(jax.tree.map(lambda x: jnp.zeros((1, 1, x.shape[-1]), x.dtype), tokens))
        variables = {"params": nn.meta.unbox(self.variables["params"])}
        spec = jax.typeof(inputs.q).sharding.spec
        width = divisible_axes((self.out_features or inputs.q.shape[-1],), spec[-1:], mesh)
        examples = P(*spec[:-2])
        specs = P(*spec[:-1], *width), examples if return_weights else None, examples if return_cache else None
        module = self.clone(parent=None)

        def call(variables: Mapping[str, Params], inputs: LayerInputs) -> tuple[Array, Array | None, Cache | None]:
            results: LayerOutputs = module.apply(variables, inputs, return_weights, return_cache, method="_call")  # type: ignore[assignment]
            return results.out, results.weights, results.cache

        return LayerOutputs(*with_auto_axes(call, mesh, specs)(variables, inputs))

    def _call(self, inputs: LayerInputs, return_weights: bool, return_cache: bool) -> LayerOutputs:
        """Return the results with the leading axes of the inputs."""
        lead = inputs.q.shape[:-2]
        results = self._attend(inputs.flat(1 if self.compose or self.heads else self.num_heads), return_weights)
        if not return_cache:
            results = results._replace(cache=None)
        return results if len(lead) == 1 else jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), results)


def _cache_of(inputs: AttentionInputs) -> Cache:
    """Return the keys, values and key-wise weights of the tokens of one call."""
    k, v = (x.reshape(*x.shape[:2], -1) for x in (inputs.k, inputs.v))
    return Cache(k, v, key_wise(inputs.pre), key_wise(inputs.post))


def _attend_to_cache(
    cache: Cache, inputs: AttentionInputs, update: CacheUpdate, mask: Array | None, window: int | None
) -> tuple[AttentionInputs, Array]:
    """Return the inputs and the mask for attention from one new token to all tokens of the cache."""
    length = update.start + update.added
    in_reach = visible(cache.k.shape[1], length, window=window, first=update.oldest_visible)
    mask = in_reach if mask is None else in_reach & mask
    k, v = (x.reshape(*x.shape[:2], *inputs.k.shape[2:]).astype(inputs.k.dtype) for x in (cache.k, cache.v))
    pre, post = with_keys(inputs.pre, cache.pre), with_keys(inputs.post, cache.post)
    return AttentionInputs(inputs.q, k, v, pre, post), mask


def _heads_as_examples(inputs: AttentionInputs, mask: Bool[Array, "#B H #T #S"]) -> tuple[AttentionInputs, Array]:
    """Return plain attention of one head, with the heads of an example as examples, which have masks of their own."""
    batch, _, heads, _ = inputs.q.shape

    def split(x: Array) -> Array:
        x = jnp.repeat(x, heads // x.shape[2], axis=2)
        return x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], 1, x.shape[3])

    masks = jnp.broadcast_to(mask, (batch, *mask.shape[1:])).reshape(batch * heads, 1, *mask.shape[2:])
    return AttentionInputs(split(inputs.q), split(inputs.k), split(inputs.v), None, None), masks
