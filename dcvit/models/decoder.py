"""Decoder layers of the language models, unrolled or scanned, and their KV caches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from dcvit.dcmha.kv_cache import Cache
from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.models import Outputs
from dcvit.models.attention import Attention, CacheUpdate
from dcvit.models.layers import LayerGroup, MlpBlock, in_float32
from dcvit.parallel.mesh import BATCH, constrain

LayerCaches: TypeAlias = dict[str, Any]  # a Cache for each unrolled layer, and a stacked list of them for a scan


class TokenContext(NamedTuple):
    """Positions, documents and places in the cache of the tokens of one call; the same for all layers."""

    positions: Int[Array, "#B T"]  # for position embeddings
    segments: Int[Array, "B T"] | None  # the first token of the document of each token
    update: CacheUpdate | None  # if tokens are decoded with a cache
    angles: Float[Array, "#B T _"] | None = None  # of a rotary embedding


def token_context(
    tokens: Int[Array, "B T"],
    end_of_text: int | None,
    start: Int[Array, " B"] | None = None,
    first: Int[Array, " B"] | None = None,
    count: Int[Array, " B"] | None = None,
) -> TokenContext:
    """Return the positions of tokens, which restart at each document if `end_of_text` is given, and their documents.

    Args:
      tokens: the tokens of a call.
      end_of_text: token that ends a document. The next document starts with it. None: one document.
      start: with a cache, number of tokens before this call.
      first: with a cache, position of the first token of the document to which the last cached token belongs.
      count: with a cache, number of real tokens of each example; None means all.
    """
    batch, length = tokens.shape
    at = (jnp.zeros(batch, jnp.int32) if start is None else start)[:, None] + jnp.arange(length)[None]
    oldest, segments = jnp.zeros_like(at), None  # for each token, the first one that it may attend to
    if end_of_text is not None:
        ends = tokens == end_of_text
        if count is not None:  # padding starts no document
            ends &= jnp.arange(length)[None] < count[:, None]
        starts = jnp.where(ends, at, 0)
        if first is not None:
            starts = starts.at[:, 0].max(first)
        oldest = jax.lax.cummax(starts, axis=1)
        if start is None or length > 1:  # without a cache, the length may be symbolic
            segments = oldest
    if start is None:
        return TokenContext(at - oldest, segments, None)
    count = jnp.full(batch, length, jnp.int32) if count is None else count
    newest = jnp.take_along_axis(oldest, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return TokenContext(at - oldest, segments, CacheUpdate(start, count, newest))


class DecoderBlock(nn.Module):
    """Attention and MLP with a norm before each, in sequence or (`parallel`) both from the same input.

    Fields:
      attention, mlp, norm: constructors of the submodules.
      parallel: attention and MLP read the same input (GPT-NeoX).
      window: number of tokens that a token attends to, itself included; None means all.
      index: index of the layer, from 0; in a scan, its index in the scan's body.
    """

    attention: Callable[..., Attention]
    mlp: Callable[..., MlpBlock]
    norm: Callable[..., nn.Module]
    parallel: bool
    window: int | None
    index: int = 0

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T M"], context: TokenContext, cache: Cache | None
    ) -> tuple[Float[Array, "B T M"], tuple[dict[str, Array], Cache | None]]:
        """Return the output; and the intermediates by name, with the extended cache (None without a cache)."""
        attention = self.attention(window=self.window, layer=self.index, name="MultiHeadDotProductAttention_0")
        out = {}
        y = in_float32(self.norm(name="attention_norm"), x)
        angles, segments, update = context.angles, context.segments, context.update
        if cache is None or update is None:
            y = attention(y, angles=angles, segments=segments)
        elif y.shape[1] > 1:
            y, cache = attention.prefill(y, cache, update.added, angles=angles, segments=segments)
        else:
            y, cache = attention.decode(y, cache, update, angles=angles)
        out["sa"] = y
        after = out["+sa"] = x + y if self.parallel else constrain(x + y, BATCH, "context", None)
        y = in_float32(self.norm(name="mlp_norm"), x if self.parallel else after)
        y = out["mlp"] = self.mlp(name="MlpBlock_0")(y)
        x = out["+mlp"] = constrain(after + y, BATCH, "context", None)
        return x, (out, cache)


class Decoder(nn.Module):
    """`depth` layers whose windows repeat a pattern: all unrolled, or a scan over groups of layers, then the rest.

    Fields:
      depth: L.
      windows: the window of each layer of the pattern.
      layer: constructor of an unrolled layer.
      norm: constructor of the last norm.
      scanned: constructor of a layer inside the scan.
      layout: see `TransformerFields.scan_layout`.
    """

    depth: int
    windows: Sequence[int | None]
    layer: Callable[..., DecoderBlock]
    norm: Callable[..., nn.Module]
    scanned: Callable[..., DecoderBlock]
    layout: tuple[int, int]

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T M"], context: TokenContext, caches: LayerCaches | None
    ) -> tuple[Float[Array, "B T M"], Outputs, LayerCaches | None]:
        """Return the normalized output, the intermediates by layer, and the extended caches."""
        period, repeats = self.layout
        windows = [self.windows[layer % len(self.windows)] for layer in range(self.depth)]
        out: Outputs = {}
        extended: LayerCaches = {}
        if repeats:
            layers = [functools.partial(self.scanned, window=windows[i], index=i) for i in range(period)]
            group = nn.scan(
                LayerGroup, variable_axes={"params": 0}, split_rngs={"params": True}, length=repeats,
                in_axes=(nn.broadcast, 0),
            )(layers, name="group")  # fmt: skip
            x, stacked = group(x, (context,), caches["group"] if caches else None)
            extended["group"] = [cache for _, cache in stacked]
            for layer in range(repeats * period):
                repeat, place = divmod(layer, period)
                out[f"block{layer:02d}"] = jax.tree.map(lambda o, i=repeat: o[i], stacked[place][0])
        for layer in range(repeats * period, self.depth):
            name = f"decoderblock_{layer}"
            block = self.layer(window=windows[layer], index=layer, name=name)
            x, (out[f"block{layer:02d}"], extended[name]) = block(x, context, caches[name] if caches else None)
        out["pre_ln"] = x
        return in_float32(self.norm(name="decoder_norm"), x), out, extended if caches else None
