"""Trees of parameters: what they must share to fit each other, how one fills another, and big_vision's files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax

from dcvit.checkpoint import npz
from dcvit.checkpoint.files import Folder
from dcvit.config import check_regex
from dcvit.errors import CheckpointError


def merge_params(loaded: Mapping[str, Any], inited: Mapping[str, Any], dont_load: Sequence[str] = ()) -> dict[str, Any]:
    """`inited` with all values of `loaded`, but for parameters whose whole name matches a regex of `dont_load`.

    Raises:
      CheckpointError: a name or shape stands on one side only; both sides are listed.
      ConfigError: a pattern of `dont_load` is no regular expression.
    """
    old, new = (flax.traverse_util.flatten_dict(dict(tree), sep="/") for tree in (loaded, inited))
    for pattern in dont_load:
        check_regex(pattern, "dont_load")

    def wanted(name: str) -> bool:
        return not any(re.fullmatch(pattern, name) for pattern in dont_load)

    old = {name: value for name, value in old.items() if wanted(name)}
    kept = {name: value for name, value in new.items() if not wanted(name)}
    check_tree(shapes_of(old), {n: s for n, s in shapes_of(new).items() if n not in kept}, "checkpoint")
    merged = {name: jax.numpy.asarray(value, new[name].dtype) for name, value in old.items()}
    tree: dict[str, Any] = flax.traverse_util.unflatten_dict(merged | kept, sep="/")
    return tree


def check_tree(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """Raises CheckpointError, listing both sides, where two maps from names to shapes differ."""
    sides = (
        ("only in the checkpoint", [n for n in found if n not in expected]),
        ("only in the model", [n for n in expected if n not in found]),
        (
            "of another shape",
            [
                f"{n} (checkpoint {found[n]}, model {expected[n]})"
                for n in found
                if n in expected and found[n] != expected[n]
            ],
        ),
    )
    parts = [f"{len(names)} {title}: {_some(names)}" for title, names in sides if names]
    if parts:
        raise CheckpointError(f"{what} does not fit the model; {'; '.join(parts)}")


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Each array of a tree by its path, as a shape."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in flat}


def read_npz(path: Folder) -> dict[str, Any]:
    """big_vision's format: arrays named by their path in the tree, at times below `params`. Never unpickles."""
    try:
        flat = npz.read(path)
    except npz.NpzError as e:
        raise CheckpointError(str(e)) from None
    tree: dict[str, Any] = flax.traverse_util.unflatten_dict(flat, sep="/")
    params: dict[str, Any] = tree.get("params", tree)
    return params
