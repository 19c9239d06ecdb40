"""Memory that a run needs, compared with what its devices, or the host of CPU devices, have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from dcvit.errors import ConfigError
from dcvit.training.setup import Setup
from dcvit.training.step import TrainState
from input_pipeline import memory


def check_state(setup: Setup, shapes: TrainState) -> None:
    """Raise ConfigError if the state of a run and its gradients need more memory than there is."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(setup.model.shapes))
    needed = shard_bytes(shapes) + shard_bytes(shapes.params)
    _check(setup, needed, f"{parameters:,} parameters with gradients and optimizer state need")


def check_step(setup: Setup, compiled: jax.stages.Compiled) -> None:
    """Raise ConfigError if a compiled training step needs more memory than there is beside its arguments."""
    sizes = compiled.memory_analysis()
    if sizes is not None:  # some platforms report none
        needed = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        _check(setup, needed, "activations and other temporary arrays of a training step need")


def shard_bytes(tree: object) -> int:
    """Return the bytes of one device's shards of a tree of shapes."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _check(setup: Setup, needed: int, what: str) -> None:
    devices = setup.model.mesh.local_devices
    free = _free(devices)
    if setup.options.check_memory and free is not None and needed > free:
        raise ConfigError(
            f"{what} {needed / 1e9:.2f} GB of memory on each of {len(devices)} {devices[0].platform} device(s), "
            f"which has {free / 1e9:.2f} GB free; --config.check_memory=False trains all the same"
        )


def _free(devices: Sequence[jax.Device]) -> int | None:
    """Return the bytes that each of some devices of this process has free; None if unknown. CPU devices share them."""
    sizes = [device.memory_stats() for device in devices]
    if all(sizes):
        return min(size["bytes_limit"] - size["bytes_in_use"] for size in sizes)
    free = memory.available() if devices[0].platform == "cpu" else None
    return None if free is None else free // len(devices)
