"""Attention matrices of a model's layers, before and after each composition.

Training uses fused implementations, which never hold these matrices. Here the queries, the keys and the compose weights
of a forward pass are captured, and the matrices are computed from them as in `dcvit.dcmha.reference`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dcvit.dcmha.reference import AttentionMatrices, attention_matrices, visible
from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.models import Params, lm, vit
from dcvit.models.attention import Attention
from dcvit.models.decoder import token_context
from dcvit.models.lm import LM
from dcvit.models.vit import ViT

CAPTURED = ("project", "_compose_weights")  # methods of `Attention`


def attention_maps(
    model: ViT | LM,
    params: Params,
    inputs: Float[Array, "B height width channels"] | Int[Array, "B T"],
    layers: Sequence[int] | None = None,
) -> dict[int, AttentionMatrices]:
    """Return the attention matrices of the given layers, by default of all; in float32, or float64 for such inputs.

    The scores of a key that the query may not attend to are 0.

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
def _maps(model: ViT | LM, params: Params, inputs: Array, layers: tuple[int, ...]) -> dict[int, AttentionMatrices]:
    """Run the unrolled model and compute the matrices of its layers."""
    _, captured = model.apply(
        {"params": params}, inputs, capture_intermediates=_is_captured, mutable=["intermediates"]
    )  # fmt: skip
    blocks: Any = captured["intermediates"]["Transformer"]
    prefix = "decoderblock" if isinstance(model, LM) else "encoderblock"
    causal = isinstance(model, LM)
    mask = token_context(inputs, model.end_of_text).mask if isinstance(model, LM) else None
    windows = _windows(model)
    found = {}
    for layer in layers:
        methods = blocks[f"{prefix}_{layer}"]["MultiHeadDotProductAttention_0"]
        (q, k, _), weights = methods["project"][0], methods["_compose_weights"][0]
        seen = visible(q.shape[1], k.shape[1], causal=causal, window=windows[layer % len(windows)], mask=mask)
        matrices = attention_matrices(
            q, k, weights.get("pre"), weights.get("post"), mask=seen, groups=model.groups if model.compose else 1,
            scale=q.shape[-1] ** -0.5,
        )  # fmt: skip
        found[layer] = matrices if seen is None else matrices._replace(
            scores=jnp.where(seen, matrices.scores, 0), composed_scores=jnp.where(seen, matrices.composed_scores, 0)
        )  # fmt: skip
    return found


def _windows(model: ViT | LM) -> list[int | None]:
    """Return the windows of the repeated pattern of layers, for inputs of several tokens."""
    if isinstance(model, ViT):
        return [None]
    return [window and (model.prefill_window or window) for window in lm.layer_windows(model)]


def _is_captured(module: nn.Module, method: str) -> bool:
    return isinstance(module, Attention) and method in CAPTURED
