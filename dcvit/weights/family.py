"""Interface of a family of models of another library, and the description of a model."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dcvit.weights.links import Link
from dcvit.weights.tensors import Json, Tensors


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
    """Return the defaults of fields of a model, in the order of the names, as a JSON file has them.

    The module is imported by its name, as that of `config.model_name`: its `load` imports this package.
    """
    model: Any = importlib.import_module(f"dcvit.models.{model_name}")
    fields = dataclasses.fields(typing.get_type_hints(model.Model)["return"])
    values = {field.name: field.default for field in fields}
    return {name: list(x) if isinstance(x := values[name], tuple) else x for name in names}


class Family(Protocol):
    """Functions of the module of a family of models."""

    def matches(self, tensors: Tensors, config: Json) -> bool:
        """Return True if tensors and the content of config.json are a model of the family; read no tensor."""

    def describe(self, tensors: Tensors, config: Json) -> Description:
        """Return the model. Raises CheckpointError if it has a property that this project's models lack."""

    def links(self, description: Description, tensors: Tensors | None = None) -> list[Link]:
        """Return the links of a model; `tensors`, if it is read, decides between names of several releases."""

    def unused(self, name: str) -> bool:
        """Return True for a tensor that is not a parameter, such as a buffer of positions."""


class WrittenFamily(Family, Protocol):
    """Functions of the module of a family that models are also exported to."""

    def config(self, description: Description) -> Json:
        """Return the content of config.json for a model.

        Raises:
          CheckpointError: the other library cannot express the model; the message names the field.
        """
