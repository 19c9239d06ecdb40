"""Two-way tables between the keys of another library's config.json and the fields of a model of this project.

A table is a list of `Key`, in the order in which they are written; `read` and `write` use the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dcvit.weights import hf_config
from dcvit.weights.tensors import Json

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


def field(
    name: str,
    ours: str,
    kind: Callable[..., object] = hf_config.size,
    default: object = None,
    write: Callable[..., object] = lambda value: value,
) -> Key:
    """Return a `Key` that holds the value of one field of a model.

    Args:
      name: the key.
      ours: the field.
      kind: the function of `dcvit.weights.hf_config` that reads the value.
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
        hf_config.check_only(config, **{name: value})
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
