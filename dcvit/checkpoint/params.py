"""Trees of parameters: comparison of names and shapes, and merging."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax
from jaxtyping import PyTree

from dcvit.errors import CheckpointError, check_regex

Shapes = Mapping[str, tuple[int, ...]]  # shapes of arrays by their path in a tree
MAX_NAMED = 6  # parameters in a message


def merge_params(
    loaded: Mapping[str, PyTree], initial: Mapping[str, PyTree], dont_load: Sequence[str] = ()
) -> dict[str, Any]:
    """Return `initial` with the values of `loaded`, except parameters whose whole name matches a regex of `dont_load`.

    Raises:
      CheckpointError: a name or shape occurs on one side only; both sides are listed.
      ConfigError: a pattern of `dont_load` is not a regular expression.
    """
    old, new = (flax.traverse_util.flatten_dict(dict(tree), sep="/") for tree in (loaded, initial))
    for pattern in dont_load:
        check_regex(pattern, "dont_load")

    def is_loaded(name: str) -> bool:
        return not any(re.fullmatch(pattern, name) for pattern in dont_load)

    old = {name: value for name, value in old.items() if is_loaded(name)}
    kept = {name: value for name, value in new.items() if not is_loaded(name)}
    check_tree(shapes_of(old), {n: s for n, s in shapes_of(new).items() if n not in kept}, "checkpoint")
    merged = {name: jax.numpy.asarray(value, new[name].dtype) for name, value in old.items()}
    tree: dict[str, Any] = flax.traverse_util.unflatten_dict(merged | kept, sep="/")
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


def shapes_of(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array of a tree by its path, such as "head/kernel"."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in flat}
