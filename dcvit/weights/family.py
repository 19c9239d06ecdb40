"""Description of a model, and its module, inputs and parameter shapes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import typing
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from dcvit.errors import CheckpointError, ConfigError, check_call, first_line
from dcvit.models import trees
from dcvit.models.fields import TRAINING_ONLY_FIELDS
from dcvit.parallel.trees import shapes_of as shapes_of_tree
from dcvit.weights import preprocessing
from dcvit.weights.tensors import Json, Tensors

MODELS = ("vit", "lm")  # modules of `dcvit.models`
Shape: TypeAlias = tuple[int | None, ...]  # None stands for any size
NOT_IN_FILES = (*TRAINING_ONLY_FIELDS, "num_classes", "vocab_size", "compose_layers", "parent", "name")


class Description(NamedTuple):
    """Description of a model of this project.

    Fields:
      model_name: "vit" or "lm".
      num_outputs: the number of classes or tokens; None for a model without a head.
      fields: fields of the model that differ from their defaults; see `dcvit.models`.
      pp: preprocessing of an image file, for `config.pp_predict`.
      class_names: a name for each class; empty if they have none.
      end_tokens: tokens that end a text, besides the field `end_of_text`.
      multilabel: probabilities of classes are sigmoids of the logits, independent of each other, not their softmax.
    """

    model_name: str
    num_outputs: int | None
    fields: Mapping[str, Any]
    pp: str = ""
    class_names: tuple[str, ...] = ()
    end_tokens: tuple[int, ...] = ()
    multilabel: bool = False


def defaults(model_name: str, *others: str) -> Json:
    """Return the defaults of the fields that determine the function of a model, except `others`, as JSON data."""
    fields = dataclasses.fields(typing.get_type_hints(_constructor(model_name))["return"])
    values = {field.name: field.default for field in fields if field.name not in (*NOT_IN_FILES, *others)}
    return {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}


def _constructor(model_name: str) -> Any:
    """Import and return the function `Model` of a module of `dcvit.models` (late, because it imports this package)."""
    return importlib.import_module(f"dcvit.models.{model_name}").Model


def build(description: Description) -> Any:
    """Return the linen module of a described model, after a check of the types of its fields.

    Raises:
      CheckpointError: the model or a field is unknown, or a value has another type.
    """
    if description.model_name not in MODELS:
        raise CheckpointError(f"model_name={description.model_name!r:.100}; expected {' or '.join(MODELS)}")
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in description.fields.items()}
    model, outputs = _constructor(description.model_name), description.num_outputs
    heads = fields.pop("heads", None)  # in files of 0.2.0: the name of attention that the model no longer has
    try:
        check_call(typing.get_type_hints(model)["return"], fields, "fields", args=(outputs,))
        net = model(outputs, heads=heads, **fields)
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"the description of the model is invalid: {first_line(e):.200}") from None
    return net


def shapes_of(description: Description) -> Mapping[str, Shape]:
    """Return the shape of each parameter by its path; "{}" in a path stands for the number of any unrolled layer.

    A size is None if the description does not determine it: the channels and the number of patches of images.

    Raises:
      CheckpointError: fields are invalid or do not fit each other.
    """
    return _shapes(build(description))


@functools.lru_cache(maxsize=4)  # the links of a model are made several times
def _shapes(net: Any) -> Mapping[str, Shape]:
    is_image_model = hasattr(net, "patch_size")
    if not is_image_model:
        example = jax.ShapeDtypeStruct((1, 2), np.int32)
    else:
        height, width = (*net.patch_size, 1, 1)[:2]  # the model refuses another number of sides
        example = jax.ShapeDtypeStruct((1, height, width, 3), np.float32)
    try:
        # All layers have the same parameters, so that one is traced.
        params = trees.param_shapes(net.clone(depth=min(net.depth, 1), scan=False), example)
    except ConfigError as e:
        raise CheckpointError(str(e).removeprefix("config.model: ")) from None
    found: dict[str, Shape] = {}
    for path, shape in shapes_of_tree(params).items():
        found[path.replace("block_0/", "block_{}/", 1)] = shape
    if is_image_model:
        found["embedding/kernel"] = (height, width, None, net.width)
        found |= {"pos_embedding": (1, None, net.width)} if "pos_embedding" in found else {}
    return found


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


def param_shapes(description: Description, params: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a model by its path; the size of images is inferred from `params`.

    Raises:
      CheckpointError, ConfigError: see `build`, `example` and `dcvit.models.trees.param_shapes`.
    """
    found = example(description, params)
    return _param_shapes(build(description), found.shape, found.dtype)


@functools.lru_cache(maxsize=1)  # the source and the result of a conversion are the same model
def _param_shapes(net: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, tuple[int, ...]]:
    return shapes_of_tree(trees.param_shapes(net, jax.ShapeDtypeStruct(shape, dtype)))


@contextlib.contextmanager
def errors_name_file(path: PurePath) -> Iterator[None]:
    """Context manager that turns a CheckpointError or ConfigError into a CheckpointError that starts with `path`."""
    try:
        yield
    except (CheckpointError, ConfigError) as e:
        raise CheckpointError(f"{path}: {str(e).removeprefix('config.model: ')}") from None
