"""A loop over the examples of a batch, which the compiler splits over devices on a mesh with any axes.

The compiler does not split loops: each device would run the loop for all examples, and the result would be replicated.
`custom_partitioning` states that each device can run the loop for its own examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = TypeVar("Tree")  # a tree of arrays


@runtime_checkable
class Shaped(Protocol):
    """The type of an array in the compiler's program."""

    @property
    def shape(self) -> Sequence[int]: ...


def map_examples(f: Callable[..., Tree], static: Hashable, *trees: object) -> Tree:
    """Return f(static, *trees) for each example, one after the other on each device.

    Args:
      f: function of static options and of trees of arrays without the axis B.
      static: static options.
      *trees: trees of arrays with B as their first axis.
    """
    leaves, structure = jax.tree.flatten(trees)

    def loop(*leaves: jax.Array) -> Tree:
        out: Tree = jax.lax.map(lambda each: f(static, *jax.tree.unflatten(structure, each)), leaves)
        return out

    if not splits_arrays():
        return loop(*leaves)
    # The partitioned loop has no derivatives and no rule for `jax.vmap`; those of the plain loop take their place.
    split = custom_partitioning(loop)
    split.def_partition(lambda mesh, args, results: _partition(loop, mesh, args, results), sharding_rule=_sharding_rule)
    batched = jax.custom_batching.custom_vmap(lambda *leaves: split(*leaves))

    @batched.def_vmap
    def _(size: int, is_batched: Sequence[bool], *leaves: jax.Array) -> tuple[Tree, object]:
        out = jax.vmap(loop, in_axes=[0 if b else None for b in is_batched], axis_size=size)(*leaves)
        return out, jax.tree.map(lambda _: True, out)

    differentiable = jax.custom_jvp(lambda *leaves: batched(*leaves))
    differentiable.defjvp(lambda primals, tangents: jax.jvp(loop, primals, tangents))
    result: Tree = differentiable(*leaves)
    return result


def splits_arrays() -> bool:
    """Return True if the compiler may split arrays: there are several devices, and `jax.shard_map` does not do it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() > 1
    return any(
        size > 1 and kind != AxisType.Manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def _partition(
    loop: Callable[..., Tree], mesh: Mesh, args: object, results: object
) -> tuple[Mesh, Callable[..., Tree], object, object]:
    """Return the program of one device and the shardings of its arguments and results: the first axis is split."""
    sharding = jax.tree.leaves(results)[0].sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(mesh, P(*sharding.spec[:1]))
    else:  # no array of the program has named axes: all of them are replicated
        mesh = Mesh(sorted(sharding.device_set, key=lambda device: device.id), ("device",))
        sharding = NamedSharding(mesh, P())
    return mesh, loop, jax.tree.map(lambda _: sharding, results), jax.tree.map(lambda _: sharding, args)


def _sharding_rule(
    mesh: Mesh, args: Sequence[Shaped], results: Sequence[Shaped]
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Return the sharding rule for Shardy: all arrays share the first axis, and no other axis is split."""
    others = itertools.count()

    def axes(array: Shaped) -> str:
        return " ".join(["example", *(f"other{next(others)}" for _ in array.shape[1:])])

    rule = f"{', '.join(map(axes, args))} -> {', '.join(map(axes, results))}"
    return rule, {"need_replication_factors": tuple(f"other{i}" for i in range(next(others)))}
