"""Attention matrices of a model's layers, before and after each composition.

Training uses fused implementations, which never hold these matrices. Here the queries, the keys and the compose weights
of a forward pass are captured, and the matrices are computed from them as in `dcvit.dcmha.reference`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dcvit.dcmha.compose import compose
from dcvit.dcmha.numerics import statistics_dtype
from dcvit.dcmha.reference import masked_softmax, visible
from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.models import Params, lm, vit
from dcvit.models.attention import Attention, AttentionInputs
from dcvit.models.decoder import token_context
from dcvit.models.lm import LM
from dcvit.models.vit import ViT

CAPTURED = ("project", "_compose_weights")  # methods of `Attention`


class AttentionMaps(NamedTuple):
    """Attention matrices of one layer. A score or weight of a key that the query may not attend to is 0.

    Fields:
      scores: scaled products of queries and keys.
      composed_scores: the scores after pre-compose, which are the inputs of the softmax.
      weights: the result of the softmax.
      composed_weights: the weights after post-compose, by which values are summed.
    """

    scores: Float[Array, "B H T S"]
    composed_scores: Float[Array, "B H T S"]
    weights: Float[Array, "B H T S"]
    composed_weights: Float[Array, "B H T S"]


def attention_maps(
    model: ViT | LM,
    params: Params,
    inputs: Float[Array, "B height width channels"] | Int[Array, "B T"],
    layers: Sequence[int] | None = None,
) -> dict[int, AttentionMaps]:
    """Return the attention matrices of the given layers, by default of all; in float32, or float64 for such inputs.

    Args:
      model: the model.
      params: its parameters.
      inputs: preprocessed images, or tokens.
      layers: numbers of layers; negative ones count from the last.

    Raises:
      ValueError: there is no layer of a number.
    """
    chosen = range(model.depth) if layers is None else layers
    wrong = [layer for layer in chosen if not -model.depth <= layer < model.depth]
    if wrong:
        raise ValueError(f"there is no layer {wrong[0]}: the model has {model.depth} layers")
    numbers = tuple(sorted({layer % model.depth for layer in chosen}))
    unstack = lm.unstack_blocks if isinstance(model, LM) else vit.unstack_blocks
    return _maps(model.clone(scan=False, remat="none"), unstack(params), inputs, numbers)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _maps(model: ViT | LM, params: Params, inputs: Array, layers: tuple[int, ...]) -> dict[int, AttentionMaps]:
    """Run the unrolled model and compute the matrices of its layers."""
    _, captured = model.apply(
        {"params": params}, inputs, capture_intermediates=_is_captured, mutable=["intermediates"]
    )  # fmt: skip
    blocks: Any = captured["intermediates"]["Transformer"]
    prefix = "decoderblock" if isinstance(model, LM) else "encoderblock"
    causal = isinstance(model, LM)
    mask = token_context(inputs, model.end_of_text).mask if isinstance(model, LM) else None
    windows = lm.layer_windows(model) if isinstance(model, LM) else (None,)
    found = {}
    for layer in layers:
        methods = blocks[f"{prefix}_{layer}"]["MultiHeadDotProductAttention_0"]
        (q, k, v), weights = methods["project"][0], methods["_compose_weights"][0]
        attention = AttentionInputs(q, k, v, weights.get("pre"), weights.get("post"))
        seen = visible(q.shape[1], k.shape[1], causal=causal, window=windows[layer % len(windows)], mask=mask)
        found[layer] = _layer_maps(attention, seen, model.groups if model.compose else 1)
    return found


def _is_captured(module: nn.Module, method: str) -> bool:
    return isinstance(module, Attention) and method in CAPTURED


def _layer_maps(inputs: AttentionInputs, mask: Array | None, groups: int) -> AttentionMaps:
    """Compute the matrices of one layer; `mask` is True where a query may attend to a key."""
    q, k = inputs.q, jnp.repeat(inputs.k, inputs.q.shape[2] // inputs.k.shape[2], axis=2)
    wide = statistics_dtype(q.dtype)
    scale = jnp.asarray(q.shape[-1] ** -0.5, wide)

    def masked(x: Array) -> Array:
        return x if mask is None else jnp.where(mask, x, 0)

    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=wide) * scale
    composed = scores if inputs.pre is None else compose(scores, inputs.pre, groups=groups)
    weights = masked_softmax(composed, mask)
    last = weights if inputs.post is None else compose(weights, inputs.post, groups=groups)
    return AttentionMaps(masked(scores), masked(composed), weights, last)
