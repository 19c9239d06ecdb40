"""Family of this project's own files: tensors have the parameters' names; the header or config.json describes them."""

from __future__ import annotations

import json

from dcvit.errors import CheckpointError, type_name
from dcvit.weights.family import Description, build
from dcvit.weights.links import Link, tensor
from dcvit.weights.tensors import OWN_KEY, Json, Tensors

ROOT = "params/"  # before each name in the files that big_vision reads


def to_json(description: Description) -> Json:
    """Return a description as JSON data."""
    return {**description._asdict(), "fields": dict(description.fields)}


def metadata(description: Description) -> dict[str, str]:
    """Return the entries of the header of a safetensors file."""
    return {"format": "np", OWN_KEY: json.dumps(to_json(description))}


def matches(tensors: Tensors, config: Json) -> bool:
    """Return True for a file of this project."""
    return OWN_KEY in config


def describe(tensors: Tensors, config: Json) -> Description:
    """Return the description in the file's header or config.json."""
    found = config[OWN_KEY]
    expected = {"model_name": str, "num_outputs": int | None, "fields": dict, "pp": str}
    lists: dict[str, type] = {"class_names": str, "end_tokens": int}  # which older files do not have
    if not isinstance(found, dict) or found.keys() - lists.keys() != expected.keys():
        raise CheckpointError(f"the entry {OWN_KEY!r} should have {', '.join(expected)}")
    for key, kind in expected.items():
        if not isinstance(found[key], kind):
            raise CheckpointError(f"the entry {OWN_KEY!r} has {key}={found[key]!r:.100}; expected {type_name(kind)}")
    for key, item in lists.items():
        values = found.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, item) for value in values):
            raise CheckpointError(
                f"the entry {OWN_KEY!r} has {key}={values!r:.100}; expected a list of {type_name(item)}"
            )
        found = {**found, key: tuple(values)}
    names, outputs = found["class_names"], found["num_outputs"]
    if names and len(names) != outputs:
        raise CheckpointError(
            f"the entry {OWN_KEY!r} has {len(names)} class_names; expected {outputs}, a name per class"
        )
    description = Description(**found)
    build(description)  # checks the fields
    return description


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    """Return a link for each tensor, whose name is the path of the parameter, optionally below `params/`."""
    return [tensor(name, name.removeprefix(ROOT)) for name in tensors or ()]


def config(description: Description) -> Json:
    """Return the content of config.json."""
    return {OWN_KEY: to_json(description)}
