"""Flax module, example inputs and parameter shapes of a model with a `Description`."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import jax
import numpy as np

from dcvit.errors import CheckpointError, ConfigError
from dcvit.models import lm, trees, vit
from dcvit.parallel.trees import check_tree, shapes_of
from dcvit.weights import family, preprocessing
from dcvit.weights.families import Weights
from dcvit.weights.family import Description
from dcvit.weights.tensors import Tensors

log = logging.getLogger(__name__)


@contextlib.contextmanager
def errors_name_file(path: PurePath) -> Iterator[None]:
    """Context manager that turns errors of a description into a CheckpointError that names the file."""
    try:
        yield
    except (CheckpointError, ConfigError) as e:
        raise CheckpointError(f"{path}: {str(e).removeprefix('config.model: ')}") from None


def build(description: Description) -> vit.ViT | lm.LM:
    """Return the module of a described model. Raises CheckpointError: see `dcvit.weights.family.build`."""
    net: vit.ViT | lm.LM = family.build(description)
    return net


def example(description: Description, params: Tensors) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of an input for one example: two tokens, or an image.

    The size of the image is that of the preprocessing, or else of the position embeddings in a grid that is as square
    as possible, or else 14×14 patches.

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


def at_image_size(description: Description, params: Tensors, size: tuple[int, int]) -> tuple[Description, Tensors]:
    """Return a described model, and its parameters, for images of another height and width.

    Learned position embeddings are interpolated, and the preprocessing is that of `preprocessing.at_size`.

    Raises:
      ConfigError: the model is not one of images, or its patches do not divide the size.
      CheckpointError: see `example` and `preprocessing.at_size`.
    """
    if description.model_name != "vit":
        raise ConfigError(f"image_size={size[0]}x{size[1]} is for models of images, found a language model")
    old, patch = example(description, params).shape[1:3], params["embedding/kernel"].shape[:2]
    if any(side < 1 or side % p for side, p in zip(size, patch, strict=True)):
        raise ConfigError(f"image_size={size[0]}x{size[1]}: patches of {patch[0]}x{patch[1]} do not divide it")
    grids = [(height // patch[0], width // patch[1]) for height, width in (old, size)]
    pp = preprocessing.at_size(description.pp, size) if description.pp else ""
    return description._replace(pp=pp), vit.with_grid(params, *grids)


def param_shapes(description: Description, params: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a model by its path; the size of images is inferred from `params`.

    Raises:
      CheckpointError, ConfigError: see `build`, `example` and `dcvit.models.trees.param_shapes`.
    """
    found = example(description, params)
    return _param_shapes(build(description), found.shape, found.dtype)


@functools.lru_cache(maxsize=1)  # the source and the result of a conversion are the same model
def _param_shapes(net: vit.ViT | lm.LM, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, tuple[int, ...]]:
    return shapes_of(trees.param_shapes(net, jax.ShapeDtypeStruct(shape, dtype)))


def checked(weights: Weights) -> Weights:
    """Return weights for conversion, with a preprocessing if they are of an image model.

    Raises:
      CheckpointError: names or shapes of the parameters do not fit the description.
    """
    with errors_name_file(weights.path):
        shapes = param_shapes(weights.description, weights.params)
    check_tree({path: tensor.shape for path, tensor in weights.params.items()}, shapes, str(weights.path))
    return weights._replace(description=_with_preprocessing(weights))


def _with_preprocessing(weights: Weights) -> Description:
    """Return the description, with big_vision's usual preprocessing if the weights have none.

    Other libraries need an image size, which is part of the preprocessing. It is that of the position embeddings, if
    they are a square grid and images have 1 or 3 channels; otherwise the description stays without preprocessing.
    """
    found, params = weights.description, weights.params
    if found.model_name != "vit" or found.pp or "pos_embedding" not in params:
        return found
    _, height, width, channels = example(found, params).shape
    patch_height, patch_width = params["embedding/kernel"].shape[:2]
    if height * patch_width != width * patch_height or channels not in (1, 3):
        return found
    size = height if height == width else [height, width]
    pp = f"{'decode' if channels == 3 else 'decode(1)'}|resize({size})|value_range(-1, 1)"
    log.info("%s names no preprocessing; assumed: %s", weights.path, pp)
    return found._replace(pp=pp)
