"""A loop over the examples of a batch, in a form that the compiler can split over devices on a mesh with any axes.

The compiler does not split loops: each device would run a loop over the examples for all of them, and the result would
be replicated. Where it may split arrays, all examples are therefore computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import jax
from jax.sharding import AxisType

Tree = TypeVar("Tree")  # a tree of arrays


def map_examples(f: Callable[..., Tree], static: Hashable, *trees: object, at_once: int = 1) -> Tree:
    """Return f(static, *trees) for each example.

    Args:
      f: function of static options and of trees of arrays without the axis B.
      static: static options.
      *trees: trees of arrays with B as their first axis.
      at_once: most examples that are computed at once; the loop takes the largest divisor of B up to it.
    """
    batch = len(jax.tree.leaves(trees)[0])
    count = max(n for n in range(1, min(at_once, batch) + 1) if batch % n == 0)
    if splits_arrays() or count == batch > 1:
        return jax.vmap(lambda *each: f(static, *each))(*trees)
    out: Tree = jax.lax.map(lambda each: f(static, *each), trees, batch_size=count if count > 1 else None)
    return out


def splits_arrays() -> bool:
    """Return True if the compiler may split arrays: there are several devices, and `jax.shard_map` does not do it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() > 1
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in sizes)


def splits_heads() -> bool:
    """Return True if the compiler splits heads over devices: the mesh has an axis "tensor" of several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(name == "tensor" and size > 1 and kind != AxisType.Manual for name, size, kind in axes)
