"""Two-way tables of config.json: which key holds which field of a model.

A table is a list of `Key`, in the order in which they are written. It reads the config.json of another library and
writes it; a family of models states it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dcvit.weights import hf_config
from dcvit.weights.tensors import Json

ABSENT = object()  # value of a key that is not written


class Key(NamedTuple):
    """A key of config.json.

    Fields:
      name: the key.
      read: function from the content of config.json, and the fields that the keys before this one hold, to the fields
        that it holds; {} for a key that is checked only. Raises CheckpointError for a value that is not supported.
      write: function from the fields of a model to the value of the key, or `ABSENT`.
    """

    name: str
    read: Callable[[Json, Json], Json]
    write: Callable[[Json], object]


def field(
    name: str,
    ours: str,
    kind: Callable[..., object] = hf_config.size,
    default: object = None,
    write: Callable[..., object] = lambda value: value,
) -> Key:
    """Return the key of one field.

    Args:
      name: the key.
      ours: the field.
      kind: the function of `dcvit.weights.hf_config` that reads such a value.
      default: the value of an absent key, or a function to it from the fields of the keys before; None: it is required.
      write: function from the value of the field to that of the key, if they differ.
    """

    def read(config: Json, found: Json) -> Json:
        value = default(found) if callable(default) else default
        return {ours: kind(config, name) if value is None else kind(config, name, value)}

    return Key(name, read, lambda fields: write(fields[ours]))


def only(name: str, value: object, *, written: bool = True) -> Key:
    """Return a key that has one supported value, which an absent key has too."""

    def read(config: Json, _: Json) -> Json:
        hf_config.check_only(config, **{name: value})
        return {}

    return Key(name, read, lambda _: value if written else ABSENT)


def written(name: str, value: object) -> Key:
    """Return a key that other libraries read and that has no effect here: its value, or a function of the fields."""
    return Key(name, lambda *_: {}, lambda fields: value(fields) if callable(value) else value)


def read(keys: Sequence[Key], config: Json) -> Json:
    """Return the fields that the content of a config.json holds. Raises CheckpointError if one is not supported."""
    found: Json = {}
    for key in keys:
        found |= key.read(config, found)
    return found


def write(keys: Sequence[Key], fields: Json) -> Json:
    """Return the content of a config.json for the fields of a model."""
    values = {key.name: key.write(fields) for key in keys}
    return {name: value for name, value in values.items() if value is not ABSENT}
