"""Axes of a mesh of devices, and the sharding of activations over them. Imports JAX only, because models import it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from dcvit.dcmha.device import splits_arrays
from dcvit.dcmha.shapes import Array, Float
from dcvit.versions import shard_alike

Axis = str | Sequence[str] | None  # the mesh axes that split a dimension: one, several or none
AXES = ("data", "fsdp", "context", "tensor")
# The axes that split a batch. In the other order XLA (jax 0.10.2, on CPUs, with all three axes larger than 1) permutes
# the examples of small batches between devices in the backward pass, and the gradients are wrong.
BATCH = ("fsdp", "data")
Result = TypeVar("Result")


def constrain(x: Float[Array, "*shape"], *axes: Axis) -> Float[Array, "*shape"]:
    """Constrain the sharding of an activation inside a compiled function.

    Args:
      x: the activation.
      *axes: for each dimension, the axes of the current mesh (`jax.set_mesh`) that split it. A dimension is replicated
        if its axes do not divide it or are not in the mesh.

    Returns:
      `x` with this sharding; `x` itself if there is no mesh to use, see `active_mesh`.
    """
    if not (mesh := active_mesh()):
        return x
    return jax.lax.with_sharding_constraint(x, P(*divisible_axes(x.shape, axes, mesh)))


def constrain_to(x: Float[Array, "B T H D"], spec: P) -> Float[Array, "B T H D"]:
    """Constrain `x` to the sharding `spec` of an array (*B, T, H, D), whose leading axes are merged to B in `x`."""
    axes: list[Axis] = [*spec, *[None] * (x.ndim - len(spec))]
    examples = [name for axis in axes[:-3] for name in axis_names(axis)]
    axes = divisible_axes(x.shape, [tuple(examples), *axes[-3:]], jax.sharding.get_abstract_mesh())
    return jax.lax.with_sharding_constraint(x, P(*axes))


def active_mesh() -> AbstractMesh | None:
    """Return the current mesh if it has several devices and only automatic axes with names in `AXES`, or else None.

    Under `jax.shard_map` axes are manual. On a mesh with axes of other names, the compiler chooses shardings.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_manual = any(kind != AxisType.Auto for kind in mesh.axis_types)
    return None if mesh.empty or mesh.size == 1 or is_manual or not {*mesh.axis_names} <= {*AXES} else mesh


def context_parts(tokens: int) -> int:
    """Return the number of parts into which `constrain` splits the tokens of a row over the axis "context"."""
    mesh = active_mesh()
    return axis_size(mesh, divisible_axes([tokens], ["context"], mesh)[0]) if mesh else 1


def explicit_mesh(*trees: object) -> AbstractMesh | None:
    """Return the mesh with explicit axes: the current one (`jax.set_mesh`), or that of an array in `trees`, or None."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(trees))
    return next((mesh for mesh in (jax.sharding.get_abstract_mesh(), *meshes) if mesh.explicit_axes), None)


def with_auto_axes(f: Callable[..., Result], mesh: AbstractMesh, specs: object) -> Callable[..., Result]:
    """Return `f` for arrays on a mesh with explicit axes; inside, the compiler chooses shardings, as models expect.

    Args:
      f: function of trees of arrays.
      mesh: returned by `explicit_mesh`.
      specs: a `PartitionSpec` for each result of `f`.
    """

    @jax.jit  # by which arrays of one device join those of the mesh, also where it is not the current one
    def call(*args: object) -> Result:
        with jax.sharding.use_abstract_mesh(mesh):
            # Else the compiler chooses the sharding of an array of one device, also where the program returns it, as
            # `nnx.jit` returns parameters.
            args = jax.tree.map(lambda x: jax.sharding.reshard(x, jax.typeof(x).sharding.spec), args)
            return jax.sharding.auto_axes(f, axes=mesh.explicit_axes, out_sharding=specs)(*args)

    return call


def shard_as(x: Float[Array, "*shape"], like: Float[Array, "..."]) -> Float[Array, "*shape"]:
    """Return `x`, sharded as `like` if they have the same shape and there is no `active_mesh` to constrain them to."""
    if active_mesh() is not None or x.shape != like.shape or not splits_arrays():
        return x
    return shard_alike(x, like)


def divisible_axes(shape: Sequence[int], axes: Sequence[Axis], mesh: Mesh | AbstractMesh) -> list[Axis]:
    """Return `axes` without axes that the mesh lacks, and with None for a dimension that its axes do not divide."""
    found: list[Axis] = []
    for size, axis in zip(shape, axes, strict=True):
        names = tuple(name for name in axis_names(axis) if name in mesh.shape)
        existing = axis if names == axis_names(axis) else names or None
        found.append(existing if size % axis_size(mesh, existing) == 0 else None)
    return found


def axis_size(mesh: Mesh | AbstractMesh, axis: Axis) -> int:
    """Return the number of devices along one mesh axis, along several (the product), or 1 for None."""
    return math.prod(mesh.shape[name] for name in axis_names(axis))


def axis_names(axis: Axis) -> tuple[str, ...]:
    """Return the names of a mesh axis as a tuple: of one axis, of several, or of none for None."""
    return (axis,) if isinstance(axis, str) else tuple(axis or ())
