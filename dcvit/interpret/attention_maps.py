"""Attention matrices of a model's layers, before and after each composition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcvit.dcmha.backends.xla.reference import AttentionMatrices
from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.interpret.activations import run_with_cache
from dcvit.models import Params
from dcvit.models.lm import LM
from dcvit.models.vit import ViT


def attention_maps(
    model: ViT | LM,
    params: Params,
    inputs: Float[Array, "B height width channels"] | Int[Array, "B T"],
    layers: Sequence[int | np.integer] | None = None,
) -> dict[int, AttentionMatrices]:
    """Return the attention matrices of the given layers, by default of all, in float32.

    The scores of a key that the query may not attend to are 0. The result's keys are layer indices from 0 in ascending
    order: `layers=[-1]` of 12 layers gives the key 11.

    Args:
      model: the model.
      params: its parameters.
      inputs: preprocessed images, or tokens.
      layers: indices of layers; negative ones count from the end.

    Raises:
      ValueError: an index is not one of a layer, or only some layers compose.
    """
    chosen = layer_numbers(model, layers)
    names = {n: [f"block{n:02d}/{field}" for field in AttentionMatrices._fields] for n in chosen}
    found = run_with_cache(model, params, inputs, names=[name for some in names.values() for name in some]).arrays
    return {n: AttentionMatrices(*(found[name] for name in some)) for n, some in names.items()}


def layer_numbers(model: ViT | LM, layers: Sequence[int | np.integer] | None) -> list[int]:
    """Return the given layer indices, of which negative ones count from the end, sorted and from 0; all for None.

    Raises:
      ValueError: an index is not one of a layer.
    """
    chosen = range(model.depth) if layers is None else layers
    wrong = [layer for layer in chosen if not -model.depth <= layer < model.depth]
    if wrong:
        raise ValueError(f"there is no layer {wrong[0]}: the model has {model.depth} layers")
    return sorted({int(layer) % model.depth for layer in chosen})
