"""Flax module, inputs and parameter shapes of a model that a `Description` names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

import jax
import numpy as np

from dcvit.errors import CheckpointError, ConfigError, first_line
from dcvit.models import lm, trees, vit
from dcvit.models.trees import shapes_of
from dcvit.weights import preprocessing
from dcvit.weights.family import Description
from dcvit.weights.tensors import Tensors

MAKERS: dict[str, Callable[..., vit.ViT | lm.LM]] = {"vit": vit.Model, "lm": lm.Model}


@contextlib.contextmanager
def errors_name_file(path: PurePath) -> Iterator[None]:
    """Inside the context, raise a CheckpointError that names the file for each error of its description."""
    try:
        yield
    except (CheckpointError, ConfigError) as e:
        raise CheckpointError(f"{path}: {str(e).removeprefix('config.model: ')}") from None


def build(description: Description) -> vit.ViT | lm.LM:
    """Return the module of a described model.

    Raises:
      CheckpointError: a field is unknown or has an invalid value.
    """
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in description.fields.items()}
    try:
        return MAKERS[description.model_name](description.num_outputs, **fields)
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"the description of the model is invalid: {first_line(e)}") from None


def example(description: Description, params: Tensors) -> jax.ShapeDtypeStruct:
    """Return the shape of an input for one example: two tokens, or an image.

    The size of the images is that of the preprocessing. Without one, it follows from the number of position embeddings,
    whose grid is taken to be as square as possible, or else is 14×14 patches.

    Raises:
      CheckpointError: the size of the preprocessing does not fit the position embeddings, or there is no embedding.
    """
    if description.model_name == "lm":
        return jax.ShapeDtypeStruct((1, 2), np.int32)
    kernel = params.get("embedding/kernel")
    if kernel is None or len(kernel.shape) != 4:
        raise CheckpointError("it has no embedding/kernel of four dimensions; it is not a vision transformer")
    height, width, channels, _ = kernel.shape
    tokens = params["pos_embedding"].shape[1] if "pos_embedding" in params else None
    try:
        size = preprocessing.size_of(description.pp)
    except CheckpointError:
        rows = max(n for n in range(1, int(tokens**0.5) + 1) if tokens % n == 0) if tokens else 14
        size = rows * height, (tokens // rows if tokens else 14) * width
    if tokens not in (None, found := (size[0] // height) * (size[1] // width)):
        raise CheckpointError(
            f"the model has {tokens} position embeddings, expected {found}, for patches of {height}x{width} of images "
            f"of {size[0]}x{size[1]}, the size in pp={description.pp!r}"
        )
    return jax.ShapeDtypeStruct((1, *size, channels), np.float32)


def param_shapes(description: Description, params: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a model by its path; `params` tell the size of its images.

    Raises:
      CheckpointError, ConfigError: see `build`, `example` and `dcvit.models.trees.param_shapes`.
    """
    found = example(description, params)
    return _param_shapes(build(description), found.shape, found.dtype)


@functools.lru_cache(maxsize=1)  # the source and the result of a conversion are the same model
def _param_shapes(net: vit.ViT | lm.LM, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, tuple[int, ...]]:
    return shapes_of(trees.param_shapes(net, jax.ShapeDtypeStruct(shape, dtype)))
