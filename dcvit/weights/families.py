"""Weights of another library as a model of this project: recognized, described and read.

`FAMILIES` holds the families of models by name; the first whose `matches` is true reads a file. Most are rows of
`dcvit.weights.lm_families` and `dcvit.weights.vit_families`. Those that a row does not describe are modules.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.parallel.trees import MAX_NAMED, check_tree, nested
from dcvit.weights import (
    big_vision,
    dcmha_vit,
    dcvit_hf,
    lm_families,
    names,
    own,
    preprocessing,
    timm_vit,
    vit_families,
)
from dcvit.weights import links as linking
from dcvit.weights.family import Description, errors_name_file, example, param_shapes
from dcvit.weights.tensors import Json, Tensor, Tensors, WeightsFile, of_floats, open_file, tokenizer_of

log = logging.getLogger(__name__)


class Family(Protocol):
    """Functions of a family, which is a module such as `timm_vit`, or a row of `lm_families` or `vit_families`.

    Rows also have `unused`, a pattern of the names of tensors that are not parameters, such as buffers.
    """

    def matches(self, tensors: Tensors, config: Json) -> bool:
        """Return True if names of tensors and the content of config.json belong to the family; reads no tensor."""

    def describe(self, tensors: Tensors, config: Json) -> Description:
        """Return the model's description. Raises CheckpointError for a property that this project's models lack."""

    def links(self, description: Description, tensors: Tensors | None = None) -> list[linking.Link]:
        """Return the links of a model; `tensors` show which release's names a file has, and are None for writing."""

    def config(self, description: Description) -> Json:
        """Return the content of config.json for a model.

        Raises:
          CheckpointError: the other library cannot express the model; the message names the field.
        """


FAMILIES: dict[str, Family] = {
    "own": own,
    **lm_families.ROWS,  # before dcvit_hf, which has the model_type of DCFormer
    "dcmha_vit": dcmha_vit,
    "big_vision": big_vision,
    "dcvit_hf": dcvit_hf,
    "timm": timm_vit,  # before the original DINOv2, which has some of its names
    **vit_families.ROWS,
}
UNSTATED = ("big_vision",)  # families whose files do not state the activation and the preprocessing of their model


class Weights(NamedTuple):
    """The parameters of a model in files, read on demand, and the description of the model.

    Fields:
      path: the file or folder.
      family: the name of the family in `FAMILIES`, or "dcvit" for a run of this project.
      description: the model.
      params: the parameters by path in the tree of unrolled layers.
      record: the content of the run's config.json; empty if the weights are not a run.
      workdir: the folder of the run.
      averaged: paths of the models whose average the parameters are; empty for a single model.
    """

    path: Path
    family: str
    description: Description
    params: Tensors
    record: Mapping[str, Any] = MappingProxyType({})
    workdir: Path | None = None
    averaged: tuple[Path, ...] = ()

    @property
    def size(self) -> int:
        """The number of values in all parameters."""
        return sum(math.prod(tensor.shape) for tensor in self.params.values())

    def read(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the path and the value of each parameter."""
        return ((name, tensor.read()) for name, tensor in self.params.items())

    def tree(self) -> dict[str, Any]:
        """Return all parameters as a nested dict of arrays."""
        return nested(dict(self.read()))

    def config(self) -> Json:
        """Return the entries of a config of this project that follow from the weights and their tokenizer."""
        return names.config(self.description, tokenizer_of(self.path))

    def in_float32(self) -> Weights:
        """Return these weights with parameters that are converted to float32 when they are read."""

        def wide(tensor: Tensor) -> Tensor:
            return Tensor(tensor.shape, lambda: tensor.read().astype(np.float32))

        return self._replace(params={name: wide(tensor) for name, tensor in self.params.items()})


def family_of(file: WeightsFile) -> str:
    """Return the name in `FAMILIES` of the family that the tensors of a file belong to; "" if there is none."""
    return next((name for name, family in FAMILIES.items() if family.matches(file.tensors, file.config)), "")


def open_weights(path: str | Path) -> Weights:
    """Open a file or a folder of another library.

    Raises:
      CheckpointError: see `dcvit.weights.tensors.open_file`; or the tensors belong to no known family, or do not fit
        the model that they describe.
    """
    return recognized(open_file(Path(path)))


def recognized(file: WeightsFile) -> Weights:
    """Return the weights that a file holds.

    Raises:
      CheckpointError: the tensors are those of no known family, or do not fit the model that they describe.
    """
    path, name, tensors = file.path, family_of(file), of_floats(file.tensors, file.path)
    if not name:
        some = ", ".join(list(tensors)[:MAX_NAMED])
        kind = f" (model_type {file.config['model_type']!r:.100})" if "model_type" in file.config else ""
        raise CheckpointError(
            f"{path}: its tensors{kind} are those of no known model ({', '.join(FAMILIES)}), found {some}"
        )
    family = FAMILIES[name]
    try:
        description = names.named(family.describe(tensors, file.config), file.config)
        preprocessing.check(description.pp)
        links = family.links(description, tensors)
    except CheckpointError as e:
        raise CheckpointError(f"{path} ({name}): {e}") from None
    linking.check(links, tensors, f"{path} ({name})", getattr(family, "unused", None))
    params = linking.parameters(links, tensors)
    with errors_name_file(path):
        example(description, params)  # checks the size of the images
    return Weights(path, name, description, params)


def stated(file: WeightsFile) -> Weights | None:
    """Return the weights with the model that a file states; None for unknown tensors, and for families `UNSTATED`."""
    return None if family_of(file) in ("", *UNSTATED) else recognized(file)


def verified(weights: Weights) -> Weights:
    """Return the weights, checked, for conversion; an image model without preprocessing gets the usual one if possible.

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
    size = preprocessing.square((height, width))
    pp = f"{'decode' if channels == 3 else 'decode(1)'}|resize({size})|value_range(-1, 1)"
    log.info("%s names no preprocessing; assumed: %s", weights.path, pp)
    return found._replace(pp=pp)
