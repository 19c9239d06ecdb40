"""Trees of parameters: names and shapes, and their comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
from jaxtyping import PyTree

from dcvit.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]  # shapes of arrays by their path in a tree
MAX_NAMED = 6  # parameters in a message


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
