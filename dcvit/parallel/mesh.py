"""The axes of a mesh of devices, and which of them split an activation. Imports jax only, as the models do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from dcvit.dcmha.shapes import Array, Float

AXES = ("data", "fsdp", "tensor")
# The axes that share a batch. In the other order XLA (of jax 0.10.2, on CPUs, with all three axes at work) permutes the
# examples of small batches between devices in the backward pass, and the gradients are wrong.
BATCH = ("fsdp", "data")


def constrain(x: Float[Array, "*shape"], *axes: Any) -> Float[Array, "*shape"]:
    """`x` inside a compiled function, each dimension split over the given axes of the mesh in force (`jax.set_mesh`).

    A dimension stays whole where its axes do not divide it, or are not the mesh's. Without a mesh to place on (see
    `active_mesh`) `x` as it is.
    """
    if not (mesh := active_mesh()):
        return x
    return jax.lax.with_sharding_constraint(x, P(*divisible_axes(x.shape, axes, mesh)))


def active_mesh() -> AbstractMesh | None:
    """The mesh in force, or None where there is nothing to place: no mesh, one device, or axes that are placed by hand,
    as inside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    by_hand = any(kind != AxisType.Auto for kind in mesh.axis_types)
    return None if mesh.empty or mesh.size == 1 or by_hand else mesh


def divisible_axes(shape: Sequence[int], axes: Sequence[Any], mesh: Mesh | AbstractMesh) -> list[Any]:
    """`axes`, but None for a dimension that they do not divide, and without those that the mesh has not."""
    found: list[Any] = []
    for size, axis in zip(shape, axes, strict=True):
        names = tuple(name for name in axis_names(axis) if name in mesh.shape)
        known = axis if names == axis_names(axis) else names or None
        found.append(known if size % axis_size(mesh, known) == 0 else None)
    return found


def axis_size(mesh: Mesh | AbstractMesh, axis: Any) -> int:
    """Devices along a mesh axis, along several, or along none."""
    return math.prod(mesh.shape[name] for name in axis_names(axis))


def axis_names(axis: Any) -> tuple[str, ...]:
    """One mesh axis, several or None, as a tuple."""
    return (axis,) if isinstance(axis, str) else tuple(axis or ())
