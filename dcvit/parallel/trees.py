"""Trees of arrays by name: names, shapes and their comparison, and tensors that are read on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import flax.traverse_util
import jax
import numpy as np

from dcvit.errors import CheckpointError

if TYPE_CHECKING:
    from jaxtyping import PyTree

Shapes = Mapping[str, tuple[int, ...]]  # shapes of arrays by their path in a tree
MAX_NAMED = 6  # parameters in a message


class Tensor(NamedTuple):
    """An array in a file: its shape, and a function that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


Tensors: TypeAlias = Mapping[str, Tensor]


def names_of(tree: PyTree) -> PyTree:
    """Return the names of arrays, such as "Transformer/encoderblock_0/…/kernel", in the structure of their tree."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), tree
    )


def shapes_of(tree: object) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array of a tree by its path, such as "head/kernel"."""
    return {name: tuple(leaf.shape) for name, leaf in by_name(tree).items()}


def by_name(tree: object) -> dict[str, Any]:
    """Return the leaves of a tree by their path, such as "head/kernel"."""
    return dict(zip(jax.tree.leaves(names_of(tree)), jax.tree.leaves(tree), strict=True))


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a dict of arrays by path, such as "head/kernel", to a tree of nested dicts."""
    tree: dict[str, Any] = flax.traverse_util.unflatten_dict(dict(flat), sep="/")
    return tree


def check_tree(found: Shapes, expected: Shapes, what: str) -> None:
    """Raise CheckpointError, listing the differences, if the names or shapes of two trees differ."""
    different = [n for n in found if n in expected and found[n] != expected[n]]
    differences = {
        "only in the checkpoint": [n for n in found if n not in expected],
        "only in the model": [n for n in expected if n not in found],
        "of another shape": [f"{n} (checkpoint {found[n]}, model {expected[n]})" for n in different],
    }
    parts = [f"{len(names)} {title}: {_some(names)}" for title, names in differences.items() if names]
    if parts:
        raise CheckpointError(f"{what} does not fit the model; {'; '.join(parts)}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def flattened(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested mappings as one dict; a key is `prefix` and the nested keys, joined by dots. {} is a value, too."""
    found: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
