"""Checked values of the config.json of a model of Hugging Face transformers, and tables of them for both directions.

A property that the models of this project lack raises an error that names it. A key that the file does not have has the
default of transformers. A table is a list of `Key`, in the order in which they are written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dcvit.errors import CheckpointError
from dcvit.weights.tensors import Json

ORIGINAL = "original_max_position_embeddings"
# Activations by their names in transformers. "gelu_new" and the like are all the approximation by a tanh.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip
ABSENT = object()  # value of a key that is not written


class Key(NamedTuple):
    """A key of config.json, with the functions that convert its value to fields of a model, and back.

    Fields:
      name: the key.
      read: function (content of config.json, fields read from earlier keys) -> fields read from this key; {} for a key
        that is only checked. Raises CheckpointError for a value that is not supported.
      write: function from the fields of a model to the value of the key, or `ABSENT`, which is the default.
    """

    name: str
    read: Callable[[Json, Json], Json]
    write: Callable[[Json], object] = lambda _: ABSENT


def check_type(config: Json, *known: str) -> str:
    """Return `model_type`. Raises CheckpointError without config.json, for another type or for a quantized model."""
    if not config:
        raise CheckpointError("no config.json beside the weights; it gives the number of heads and other sizes")
    found = config.get("model_type")
    if found not in known:
        raise CheckpointError(f"config.json: model_type={found!r} is not supported; supported: {', '.join(known)}")
    check_only(config, quantization_config=None)
    return str(found)


def text(config: Json, name: str, default: str | None = None) -> str:
    """Return the value of the key `name`, a string; a key that is absent or null has the default, if there is one."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, str):
        raise CheckpointError(f"config.json: {name}={value!r:.100}; expected a string")
    return value


def size(config: Json, name: str, default: int | None = None) -> int:
    """Return the key's value, a positive integer; if absent or null, the default, if there is one."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name}={value!r:.100}; expected a positive integer")
    return value


def number(config: Json, name: str, default: float | None = None) -> float:
    """Return the value of the key `name`, a positive number; a key that is absent has the default, if there is one."""
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json: {name}={value!r:.100}; expected a positive number")
    return float(value)


def flag(config: Json, name: str, default: bool) -> bool:
    """Return the value of the key `name`, a boolean; a key that is absent has the default."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name}={value!r}; expected true or false")
    return value


def check_only(config: Json, **supported: Any) -> None:
    """Check that each key in `supported` is absent or has the value given there, the only one that is supported.

    Raises:
      CheckpointError: a key has another value.
    """
    for name, value in supported.items():
        if config.get(name, value) != value:
            raise CheckpointError(f"config.json: {name}={config[name]!r} is not supported, only {value!r}")


def field(
    name: str,
    ours: str,
    kind: Callable[..., object] = size,
    default: object = None,
    write: Callable[..., object] = lambda value: value,
) -> Key:
    """Return a `Key` that holds the value of one field of a model.

    Args:
      name: the key.
      ours: the field.
      kind: the function of this module that reads the value.
      default: the value of an absent key, or a function of the fields from earlier keys; None: the key is required.
      write: function from the value of the field to that of the key, if they differ.
    """

    def read(config: Json, found: Json) -> Json:
        value = default(found) if callable(default) else default
        return {ours: kind(config, name) if value is None else kind(config, name, value)}

    return Key(name, read, lambda fields: write(fields[ours]))


def only(name: str, value: object, *, written: bool = True) -> Key:
    """Return a `Key` with one supported value, also its default; unless `written`, exports omit the key."""

    def read(config: Json, _: Json) -> Json:
        check_only(config, **{name: value})
        return {}

    return Key(name, read, lambda _: value if written else ABSENT)


def written(name: str, value: object) -> Key:
    """Return a `Key` that is never read, only written for other libraries: `value`, or its result on the fields."""
    return Key(name, lambda *_: {}, lambda fields: value(fields) if callable(value) else value)


def read(keys: Sequence[Key], config: Json) -> Json:
    """Return the fields of a model from the content of a config.json; CheckpointError for an unsupported value."""
    found: Json = {}
    for key in keys:
        found |= key.read(config, found)
    return found


def write(keys: Sequence[Key], fields: Json) -> Json:
    """Return the content of a config.json for the fields of a model."""
    values = {key.name: key.write(fields) for key in keys}
    return {name: value for name, value in values.items() if value is not ABSENT}


def activation(config: Json, name: str, default: str) -> str:
    """Return the activation that the key `name` holds, as `dcvit.models.layers.ACTIVATIONS` names it."""
    found = text(config, name, default)
    if found not in ACTIVATIONS:
        raise CheckpointError(f"config.json: {name}={found!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[found]


def activation_name(ours: str) -> str:
    """Return transformers' name of "gelu" or "gelu_tanh": "gelu" or "gelu_new". Callers refuse other activations."""
    return "gelu" if ours == "gelu" else "gelu_new"


def check_head_dim(config: Json, found: Json) -> Json:
    """Return {}. Raise CheckpointError if `head_dim` is not the model's width divided by its number of heads."""
    width, heads = found["width"], found["num_heads"]
    if size(config, "head_dim", width // heads) * heads != width:
        raise CheckpointError(
            f"config.json: head_dim={config.get('head_dim', width // heads)!r} is not supported, "
            f"only hidden_size / num_attention_heads, {width}/{heads}"
        )
    return {}


def rotary(config: Json, context: int, name: str = "rope_theta") -> Json:
    """Return the model's fields `rotary_base` and `rotary_scaling`.

    Args:
      config: the content of config.json, in the form of transformers 5 or of earlier releases.
      context: the context before scaling (of pretraining), unless the file says it.
      name: the key of the base in earlier releases.

    Raises:
      CheckpointError: the scaling is neither by a factor ("linear") nor that of LLaMA 3.
    """
    key, values = _rope(config)
    found = {"rotary_base": number(values, "rope_theta", number(config, name, 10_000.0))}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return found
    if kind not in ("linear", "llama3"):
        raise CheckpointError(f"config.json: {key} of type {kind!r} is not supported, only default, linear and llama3")
    scaling = [number(values, "factor")]
    if kind == "llama3":
        scaling += [number(values, f"{end}_freq_factor") for end in ("low", "high")]
        scaling.append(size(config, ORIGINAL, size(values, ORIGINAL, context)))
    return {**found, "rotary_scaling": scaling}


def rotary_fraction(config: Json, name: str, default: float) -> float:
    """Return the fraction of a head's numbers to which the rotary embedding applies."""
    return number(_rope(config)[1], "partial_rotary_factor", number(config, name, default))


def _rope(config: Json) -> tuple[str, Json]:
    """Return the key and the value of the rotary embedding's properties: `rope_scaling`, or else `rope_parameters`."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values: Json = config.get(key) or {}
    if not isinstance(values, dict):
        raise CheckpointError(f"config.json: {key}={values!r}; expected an object")
    nested = next((name for name, value in values.items() if isinstance(value, dict)), None)
    if nested:
        raise CheckpointError(f"config.json: {key} for each kind of layer ({nested}) is not supported")
    return key, values


def rope_parameters(fields: Json, **others: float) -> Json:
    """Return the value of `rope_parameters` of transformers 5 for the fields of a model, with the entries `others`."""
    numbers = fields["rotary_scaling"] or []
    kind = {0: "default", 1: "linear"}.get(len(numbers), "llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
    scaling = zip(names, [*numbers[:3], *map(int, numbers[3:])], strict=False)
    return {"rope_type": kind, "rope_theta": fields["rotary_base"], **dict(scaling), **others}
