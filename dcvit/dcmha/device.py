"""Device for which a program is traced: its platform and kind, and whether it is attached to this process."""

from __future__ import annotations

import jax


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
    """Return the first device of this process, or None if the current mesh is of devices of another kind."""
    mesh, device = jax.sharding.get_abstract_mesh(), jax.local_devices()[0]
    found = None if mesh.empty else mesh.abstract_device
    return device if found is None or found.device_kind == device.device_kind else None
