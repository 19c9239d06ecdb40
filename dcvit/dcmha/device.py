"""Devices for which a program is traced: platform and kind, and how the compiler may split arrays over them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import jax
from jax.sharding import AxisType

Tree = TypeVar("Tree")  # a tree of arrays


def platform() -> str:
    """Return "cpu", "gpu" or "tpu": the platform of the current mesh (`jax.set_mesh`), or of JAX's default device.

    The devices of a mesh may be those of a topology that is not attached to this host.
    """
    mesh = jax.sharding.get_abstract_mesh()
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # of `jax.default_device`
    device = default if mesh.empty else mesh.abstract_device
    name = device if isinstance(device, str) else getattr(device, "platform", None) or jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def device_kind() -> str:
    """Return the kind of the devices of the current mesh, or of this host's devices without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    device = getattr(mesh, "abstract_device", None) or jax.devices()[0]
    return str(device.device_kind)


def compute_capability() -> str | None:
    """Return the compute capability of this process's GPU, such as "8.0"; None on a host without a GPU."""
    capability: str | None = getattr(jax.devices()[0], "compute_capability", None)
    return capability


def attached() -> jax.Device | None:
    """Return the first device of this process; None if the current mesh has devices of another kind."""
    mesh, device = jax.sharding.get_abstract_mesh(), jax.local_devices()[0]
    found = None if mesh.empty else mesh.abstract_device
    return device if found is None or found.device_kind == device.device_kind else None


def splits_arrays() -> bool:
    """Return True if the compiler may split arrays over devices: there are several, outside of `jax.shard_map`."""
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


def map_examples(f: Callable[..., Tree], static: Hashable, *trees: object, at_once: int = 1) -> Tree:
    """Return the results of f(static, *trees) for each example, stacked along a new first axis B.

    The compiler does not split loops: each device would run a loop over the examples for all of them, and the result
    would be replicated. Where it may split arrays, all examples are therefore computed at once.

    Args:
      f: function of static options and of trees of arrays without the axis B.
      static: static options.
      *trees: trees of arrays with B as their first axis.
      at_once: limit of the examples that are computed at once; the loop takes the largest divisor of B up to it.
    """
    batch = len(jax.tree.leaves(trees)[0])
    count = max(n for n in range(1, min(at_once, batch) + 1) if batch % n == 0)
    if splits_arrays() or count == batch > 1:
        return jax.vmap(lambda *each: f(static, *each))(*trees)
    out: Tree = jax.lax.map(lambda each: f(static, *each), trees, batch_size=count if count > 1 else None)
    return out
