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

from dcvit.errors import CheckpointError, first_line_with_type
from dcvit.parallel.trees import MAX_NAMED, Tensor, Tensors, nested
from dcvit.weights import big_vision, dcvit_hf, lm_families, preprocessing, timm_vit, vit_families
from dcvit.weights import links as linking
from dcvit.weights.family import Description, defaults, errors_name_file, example
from dcvit.weights.tensors import GENERATION, Json, WeightsFile, of_floats, open_file, read_json, tokenizer_of

MULTILABEL = "multi_label_classification"  # transformers' `problem_type` of a sigmoid for each class
PROBLEMS = (None, "single_label_classification", MULTILABEL)
log = logging.getLogger(__name__)


class Family(Protocol):
    """Functions of a family: a module such as `timm_vit`, or a row of a table.

    A family may also have `unused`, a pattern of the names of tensors that are not parameters, such as buffers.
    """

    def matches(self, tensors: Tensors, config: Json, /) -> bool:
        """Return True if names of tensors and the content of config.json belong to the family; reads no tensor."""

    def describe(self, tensors: Tensors, config: Json, /) -> Description:
        """Return the model's description. Raises CheckpointError for a property that this project's models lack."""

    def links(self, description: Description, tensors: Tensors | None = None, /) -> list[linking.Link]:
        """Return the links of a model; `tensors` show which release's names a file has, and are None for writing."""

    def config(self, description: Description, /) -> Json:
        """Return the content of config.json for a model.

        Raises:
          CheckpointError: the other library cannot express the model; the message names the field.
        """


FAMILIES: dict[str, Family] = {
    "own": big_vision.OWN,
    **lm_families.ROWS,  # before dcvit_hf, which has the model_type of DCFormer
    "dcmha_vit": big_vision.AUTHORS,
    "big_vision": big_vision.BIG_VISION,
    "dcvit_hf": dcvit_hf,
    "timm": timm_vit,
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
        return config_of(self.description, tokenizer_of(self.path))

    def in_float32(self) -> Weights:
        """Return these weights with parameters that are converted to float32 when they are read."""

        def wide(tensor: Tensor) -> Tensor:
            return Tensor(tensor.shape, lambda: tensor.read().astype(np.float32))

        return self._replace(params={name: wide(tensor) for name, tensor in self.params.items()})


def family_of(file: WeightsFile) -> str:
    """Return the name in `FAMILIES` of the family that the tensors of a file belong to; "" if there is none."""
    return next((name for name, family in FAMILIES.items() if family.matches(file.tensors, file.config)), "")


def open_weights(path: str | Path) -> Weights:
    """Open a file or a folder of another library; see `dcvit.weights.tensors.open_file` and `recognized`."""
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
        description = named(family.describe(tensors, file.config), file.config)
        preprocessing.check(description.pp)
        links = family.links(description, tensors)
    except CheckpointError as e:
        raise CheckpointError(f"{path} ({name}): {e}") from None
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as e:
        why = first_line_with_type(e)
        raise CheckpointError(f"{path} ({name}): config.json lacks a value or is damaged: {why}") from None
    linking.check(links, tensors, f"{path} ({name})", getattr(family, "unused", None))
    params = linking.parameters(links, tensors)
    with errors_name_file(path):
        example(description, params)  # checks the size of the images
    return Weights(path, name, description, params)


def stated(file: WeightsFile) -> Weights | None:
    """Return the weights with the model that a file states; None for unknown tensors, and for families `UNSTATED`."""
    return None if family_of(file) in ("", *UNSTATED) else recognized(file)


def verified(weights: Weights) -> Weights:
    """Return the weights for conversion: with big_vision's usual preprocessing if they have none.

    Other libraries need an image size, which is part of the preprocessing. It is that of the position embeddings, if
    they are a square grid and images have 1 or 3 channels; otherwise the description stays without preprocessing.
    """
    found, params = weights.description, weights.params
    if found.model_name != "vit" or found.pp or "pos_embedding" not in params:
        return weights
    _, height, width, channels = example(found, params).shape
    patch_height, patch_width = params["embedding/kernel"].shape[:2]
    if height * patch_width != width * patch_height or channels not in (1, 3):
        return weights
    size = preprocessing.square((height, width))
    pp = f"{'decode' if channels == 3 else 'decode(1)'}|resize({size})|value_range(-1, 1)"
    log.info("%s names no preprocessing; assumed: %s", weights.path, pp)
    return weights._replace(description=found._replace(pp=pp))


def named(description: Description, config: Json) -> Description:
    """Return a description with class names, end tokens and `multilabel` from config files, unless it already has them.

    Raises:
      CheckpointError: class names or tokens do not fit the model, or its outputs are no classes.
    """
    outputs = description.num_outputs
    if description.model_name == "lm":
        return description._replace(end_tokens=description.end_tokens or end_tokens(config, outputs or 0))
    if (problem := config.get("problem_type")) not in PROBLEMS:
        raise CheckpointError(f"config.json: problem_type={problem!r} is not supported, only classification")
    multilabel = description.multilabel or config.get("problem_type") == MULTILABEL
    names = description.class_names or class_names(config, outputs or 0)
    return description._replace(class_names=names, multilabel=multilabel)


def class_names(config: Json, count: int) -> tuple[str, ...]:
    """Return the names of `count` classes from `id2label` (transformers) or `label_names` (timm); () without names.

    "LABEL_0" and so on, which transformers writes for classes without names, count as no names.
    """
    timm = {**(config.get("pretrained_cfg") or {}), **config}
    key = next((key for key in ("id2label", "label_names") if timm.get(key)), None)
    if not count or not key:
        return ()
    found = timm[key]
    names = {int(i): name for i, name in (enumerate(found) if isinstance(found, list) else found.items())}
    complete = len(names) == count or (key == "label_names" and isinstance(found, dict))  # timm's may have gaps
    if not complete or not all(isinstance(x, str) and 0 <= i < count for i, x in names.items()):
        raise CheckpointError(f"config.json: {key}={found!r:.100}; expected a name for each of the {count} classes")
    if all(name == f"LABEL_{i}" for i, name in names.items()):
        return ()
    texts = (timm.get("label_descriptions") or {}) if key == "label_names" else {}  # such as of ImageNet's synsets
    names = {i: texts.get(name, name) for i, name in names.items()}
    return tuple(names.get(i, str(i)) for i in range(count))


def special_token(tokenizer: Json, number: int) -> str | None:
    """Return the text of special token `number` in the content of a tokenizer.json; None if it is not a special one."""
    tokens = tokenizer.get("added_tokens") or []
    return next((token["content"] for token in tokens if token["id"] == number and token.get("special")), None)


def config_of(description: Description, tokenizer: Path | None) -> Json:
    """Return the entries of a config of this project that describe a model and its tokens.

    A config has one token that ends a text; it is the first if the model has several.
    """
    outputs = {"vit": "num_classes", "lm": "vocab_size"}[description.model_name]
    found: Json = {
        "model_name": description.model_name, "model": dict(description.fields), outputs: description.num_outputs,
    }  # fmt: skip
    if description.model_name == "vit":
        found |= {"loss": "sigmoid_xent"} if description.multilabel else {}
        return found | ({"pp_predict": description.pp} if description.pp else {})
    found["model"].setdefault("context", defaults("lm")["context"])  # otherwise that of the data
    # Without a tokenizer, the text is not known to be bytes.
    data: Json = {"kind": "text", "tokenizer": str(tokenizer)} if tokenizer else {"kind": "input_ids"}
    if description.end_tokens:
        end = description.end_tokens[0]
        data["end_of_text"] = special_token(read_json(tokenizer), end) if tokenizer else end
    return {**found, "input": {"data": {key: value for key, value in data.items() if value is not None}}}


def end_tokens(config: Json, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a text, from generation_config.json or else config.json; () if neither has them."""
    values = [part.get("eos_token_id") for part in (config.get(GENERATION, {}), config)]
    given = [value for value in values if value is not None and value != []][:1]
    tokens: list[int] = given[0] if given and isinstance(given[0], list) else given
    if not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise CheckpointError(f"eos_token_id={given[0]!r:.100}; expected a token or a list of tokens")
    return tuple(token for token in tokens if token < vocab_size)  # others are never generated
