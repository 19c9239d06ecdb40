"""Description of a model: its module, inputs and parameter shapes, and its form in config files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from dcvit.errors import CheckpointError, ConfigError, check_call, first_line
from dcvit.models import lm, trees, vit
from dcvit.models.fields import TRAINING_ONLY_FIELDS
from dcvit.parallel.trees import Tensors
from dcvit.parallel.trees import shapes_of as shapes_of_tree
from dcvit.weights import preprocessing
from dcvit.weights.tensors import OWN_KEY, Json

MODELS: dict[str, Any] = {"vit": vit.Model, "lm": lm.Model}
Shape: TypeAlias = tuple[int | None, ...]  # None stands for any size
# Activations by their names in transformers. "gelu_new" and the like are all the approximation by a tanh.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip
SIZES = ("vocab_size", "image_size", "patch_size")  # keys of config.json that `Row.keys` does not list
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
    class_names: Sequence[str] = ()
    end_tokens: Sequence[int] = ()
    multilabel: bool = False


def to_json(description: Description) -> Json:
    """Return a description as JSON data, for the entry `OWN_KEY` of this project's files."""
    found: Json = {**description._asdict(), "fields": dict(description.fields)}
    return {key: value for key, value in found.items() if key != "multilabel" or value}


def metadata(description: Description) -> dict[str, str]:
    """Return the metadata, with the description, for the header of a safetensors file."""
    return {"format": "np", OWN_KEY: json.dumps(to_json(description))}


def from_json(found: object) -> Description:
    """Return the description in JSON data. Raises CheckpointError if it is none, or describes no model."""
    if not isinstance(found, dict):
        raise CheckpointError(f"{OWN_KEY}={found!r:.100}; expected the description of a model")
    values: Json = {key: tuple(x) if isinstance(x, list) else x for key, x in found.items()}
    try:
        check_call(Description, values, OWN_KEY)
        description = Description(**values)
    except ConfigError as e:
        raise CheckpointError(f"the description of the model is invalid: {e}") from None
    names, outputs = description.class_names, description.num_outputs
    if names and len(names) != outputs:
        raise CheckpointError(f"{OWN_KEY} has {len(names)} class_names; expected {outputs}, a name per class")
    build(description)  # checks the fields
    return description


def defaults(model_name: str, *others: str) -> Json:
    """Return the defaults of the fields that determine the function of a model, except `others`, as JSON data."""
    fields = dataclasses.fields(typing.get_type_hints(MODELS[model_name])["return"])
    values = {field.name: field.default for field in fields if field.name not in (*NOT_IN_FILES, *others)}
    return {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}


def build(description: Description) -> Any:
    """Return the linen module of a described model, after a check of the types of its fields.

    Raises:
      CheckpointError: the model or a field is unknown, or a value has another type.
    """
    if description.model_name not in MODELS:
        raise CheckpointError(f"model_name={description.model_name!r:.100}; expected {' or '.join(MODELS)}")
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in description.fields.items()}
    model, outputs = MODELS[description.model_name], description.num_outputs
    heads = fields.pop("heads", None)  # in files of 0.2.0: the name of attention that the model no longer has
    try:
        check_call(typing.get_type_hints(model)["return"], fields, "fields", args=(outputs,))
        return model(outputs, heads=heads, **fields)
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"the description of the model is invalid: {first_line(e):.200}") from None


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
    return shapes_of_tree(trees.param_shapes(build(description), example(description, params)))


@contextlib.contextmanager
def errors_name_file(path: PurePath) -> Iterator[None]:
    """Context manager that turns a CheckpointError or ConfigError into a CheckpointError that starts with `path`."""
    try:
        yield
    except (CheckpointError, ConfigError) as e:
        raise CheckpointError(f"{path}: {str(e).removeprefix('config.model: ')}") from None


def check_only(config: Json, **supported: object) -> None:
    """Raise CheckpointError unless each key in `supported` is absent or has the value given there."""
    for name, value in supported.items():
        if config.get(name, value) != value:
            raise CheckpointError(f"config.json: {name}={config[name]!r} is not supported, only {value!r}")


def activation(config: Json, key: str) -> str:
    """Return the activation that a key of config.json names. Raises CheckpointError for another one than GELU."""
    if config[key] not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise CheckpointError(f"config.json: {key}={config[key]!r} is not supported; supported: {known}")
    return ACTIVATIONS[config[key]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A family of transformers: the names of its tensors, and how the keys of its config.json are fields of a model.

    Fields:
      marks: tensors of which all files of the family have one, and those of other families have none.
      prefixes: beginnings of the names, by release or for models inside of others.
      defaults: the values of absent keys, by `model_type`; a key without one is required.
      keys: the field of a model that has the value of a key; of the field `mlp`, the activation.
      fixed: keys with one supported value.
      constants: fields that are the same for all models.
      read: function (config.json with defaults, fields read from `keys`) -> further fields.
      write: function (fields, `model_type`) -> further keys.
      unused: matches the names of tensors that are not parameters of the model, such as buffers.
    """

    marks: Sequence[str]
    prefixes: Sequence[str] = ("",)
    defaults: Mapping[str, Json]
    keys: Mapping[str, str]
    fixed: Json = dataclasses.field(default_factory=dict)
    constants: Json = dataclasses.field(default_factory=dict)
    read: Callable[[Json, Json], Json] = lambda config, found: {}
    write: Callable[[Json, str], Json] = lambda fields, kind: {}
    unused: re.Pattern[str] | None = None

    def prefix(self, tensors: Tensors) -> str | None:
        """Return the beginning of the names in a file; None for a file of another family."""
        return next((x for x in self.prefixes if any(f"{x}{mark}" in tensors for mark in self.marks)), None)

    def matches(self, tensors: Tensors, config: Json) -> bool:
        """Return True if the tensors have the family's names."""
        return self.prefix(tensors) is not None

    def fields_of(self, config: Json) -> tuple[Json, Json]:
        """Return the content of config.json with defaults, and the fields of its model.

        Raises:
          CheckpointError: there is no config.json, or a value that the models of this project lack.
        """
        if not config:
            raise CheckpointError("no config.json beside the weights; it gives the number of heads and other sizes")
        kind = config.get("model_type")
        if not isinstance(kind, str) or kind not in self.defaults:
            known = ", ".join(self.defaults)
            raise CheckpointError(f"config.json: model_type={kind!r} is not supported; supported: {known}")
        check_only(config, quantization_config=None, **self.fixed)
        default = self.defaults[kind]
        null = [key for key in (*self.keys, *SIZES) if config.get(key) is None]  # of other keys, null has a meaning
        config = {**default, **config, **{key: default[key] for key in null if key in default}}
        found = dict(self.constants)
        for key, ours in self.keys.items():
            value = config.get(key)
            if value is None and key not in default:
                raise CheckpointError(f"config.json has no {key}")
            if isinstance(value, float) and not math.isfinite(value):
                raise CheckpointError(f"config.json: {key}={value} is not finite")
            found[ours] = activation(config, key) if ours == "mlp" else value
        return config, {**found, **self.read(config, found)}

    def keys_of(self, fields: Json, kind: str) -> Json:
        """Return the content of config.json for the fields of a model."""
        values = {key: fields[ours] for key, ours in self.keys.items()}
        names = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
        values |= {key: names.get(fields["mlp"]) for key, ours in self.keys.items() if ours == "mlp"}
        return {"model_type": kind, **values, **self.fixed, **self.write(fields, kind)}
