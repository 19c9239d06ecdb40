"""Family of this project's own files: tensors have the parameters' names; the header or config.json describes them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dcvit.errors import CheckpointError, has_type, type_name
from dcvit.weights.family import Description, build, shapes_of
from dcvit.weights.links import Link, in_all_layers, tensor
from dcvit.weights.tensors import OWN_KEY, Json, Tensors

ROOT = "params/"  # before each name in the files that big_vision reads
# The types of a description. Older files do not have the lists, and `multilabel` is written if it is true.
LISTS = {"class_names": Sequence[str], "end_tokens": Sequence[int]}
OPTIONAL = {**LISTS, "multilabel": bool}
TYPES = {"model_name": str, "num_outputs": int | None, "fields": dict, "pp": str, **OPTIONAL}


def to_json(description: Description) -> Json:
    """Return a description as JSON data."""
    found: Json = {**description._asdict(), "fields": dict(description.fields)}
    return {key: value for key, value in found.items() if key != "multilabel" or value}


def metadata(description: Description) -> dict[str, str]:
    """Return the metadata, with the description, for the header of a safetensors file."""
    return {"format": "np", OWN_KEY: json.dumps(to_json(description))}


def matches(tensors: Tensors, config: Json) -> bool:
    """Return True for a file of this project: config.json or the header has the entry `OWN_KEY`."""
    return OWN_KEY in config


def describe(tensors: Tensors, config: Json) -> Description:
    """Return the model's description, which is the entry `OWN_KEY` of the file's header or config.json."""
    what, found = f"the entry {OWN_KEY!r}", config[OWN_KEY]
    if not isinstance(found, dict) or found.keys() | OPTIONAL.keys() != TYPES.keys():
        raise CheckpointError(f"{what} should have {', '.join(key for key in TYPES if key not in OPTIONAL)}")
    for key, value in found.items():
        if not has_type(value, TYPES[key]):
            raise CheckpointError(f"{what} has {key}={value!r:.100}; expected {type_name(TYPES[key])}")
    values: Json = {key: tuple(value) if key in LISTS else value for key, value in found.items()}
    description = Description(**values)
    names, outputs = description.class_names, description.num_outputs
    if names and len(names) != outputs:
        raise CheckpointError(f"{what} has {len(names)} class_names; expected {outputs}, a name per class")
    build(description)  # checks the fields
    return description


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    """Return a link for each parameter, whose path is the name of the tensor, optionally below `params/`."""
    names = {name.removeprefix(ROOT): name for name in tensors or ()}
    same = in_all_layers([tensor(path, path, shape) for path, shape in shapes_of(description).items()], description)
    return [link._replace(theirs=(names.get(link.ours[0], link.ours[0]),)) for link in same]


def config(description: Description) -> Json:
    """Return the content of config.json: the description of the model."""
    return {OWN_KEY: to_json(description)}
