"""Interface of a family of models of another library, and the description of a model."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from dcvit.errors import CheckpointError, ConfigError, check_call, first_line
from dcvit.models.fields import check_largest
from dcvit.models.trees import param_shapes
from dcvit.parallel import trees
from dcvit.weights.links import Link, Shape
from dcvit.weights.tensors import Json, Tensors

MODELS = ("vit", "lm")


class Description(NamedTuple):
    """A model of this project.

    Fields:
      model_name: "vit" or "lm".
      num_outputs: the number of classes or tokens; None for a model without a head.
      fields: fields of the model that differ from their defaults; see `dcvit.models`.
      pp: preprocessing of an image file, for `config.pp_predict`.
      class_names: a name for each class; empty if they have none.
      end_tokens: tokens that end a text, besides the field `end_of_text`.
    """

    model_name: str
    num_outputs: int | None
    fields: Mapping[str, Any]
    pp: str = ""
    class_names: tuple[str, ...] = ()
    end_tokens: tuple[int, ...] = ()


def defaults(model_name: str, names: Sequence[str]) -> Json:
    """Return the default values of the fields `names` of a model, as JSON values."""
    fields = dataclasses.fields(typing.get_type_hints(_constructor(model_name))["return"])
    values = {field.name: field.default for field in fields}
    return {name: list(x) if isinstance(x := values[name], tuple) else x for name in names}


def _constructor(model_name: str) -> Any:
    """Import and return the function `Model` of a module of `dcvit.models` (late, because it imports this package)."""
    return importlib.import_module(f"dcvit.models.{model_name}").Model


def build(description: Description) -> Any:
    """Return the module of a described model, whose fields have values of their types.

    Raises:
      CheckpointError: the model or a field is unknown, or a value has another type or is absurdly large.
    """
    if description.model_name not in MODELS:
        raise CheckpointError(f"model_name={description.model_name!r:.100}; expected {' or '.join(MODELS)}")
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in description.fields.items()}
    model, outputs = _constructor(description.model_name), description.num_outputs
    try:
        check_call(typing.get_type_hints(model)["return"], fields, "fields", args=(outputs,))
        net = model(outputs, **fields)
        check_largest(net)
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
    is_lm = hasattr(net, "vocab_size")
    if is_lm:
        example = jax.ShapeDtypeStruct((1, 2), np.int32)
    else:
        height, width = (*net.patch_size, 1, 1)[:2]  # the model refuses another number of sides
        example = jax.ShapeDtypeStruct((1, height, width, 3), np.float32)
    try:
        # All layers have the same parameters, so that one is traced.
        params = param_shapes(net.clone(depth=min(net.depth, 1), scan=False), example)
    except ConfigError as e:
        raise CheckpointError(str(e).removeprefix("config.model: ")) from None
    found: dict[str, Shape] = {}
    for path, shape in trees.shapes_of(params).items():
        found[path.replace("block_0/", "block_{}/", 1)] = shape
    if not is_lm:
        found["embedding/kernel"] = (height, width, None, net.width)
        found |= {"pos_embedding": (1, None, net.width)} if "pos_embedding" in found else {}
    return found


class Family(Protocol):
    """Functions of the module of a family of models.

    The module may also have `UNUSED`, a pattern of the names of tensors that are not parameters, such as buffers.
    """

    def matches(self, tensors: Tensors, config: Json) -> bool:
        """Return True if names of tensors and the content of config.json belong to the family; reads no tensor."""

    def describe(self, tensors: Tensors, config: Json) -> Description:
        """Return the model's description. Raises CheckpointError for a property that this project's models lack."""

    def links(self, description: Description, tensors: Tensors | None = None) -> list[Link]:
        """Return the links of a model; `tensors` (None for writing) tell which release's names a file has."""


class WrittenFamily(Family, Protocol):
    """Functions of the module of a family to which models can also be exported."""

    def config(self, description: Description) -> Json:
        """Return the content of config.json for a model.

        Raises:
          CheckpointError: the other library cannot express the model; the message names the field.
        """
