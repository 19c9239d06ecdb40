"""Memory that a run needs, compared with what its devices, or the host of CPU devices, have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from dcvit.errors import ConfigError
from dcvit.models.trees import param_shapes
from input_pipeline import memory

MANY_LAYERS = 24  # whose tracing takes seconds


class TooLargeError(ConfigError):
    """A model, training state or program that needs more memory than the devices have free."""


def check_layers(mesh: Mesh, model: nn.Module, example: jax.ShapeDtypeStruct) -> None:
    """Raise ConfigError if the parameters of a model of many layers, with their gradients, exceed the memory.

    The size is extrapolated from models of one and two layers, which are traced quickly. It is a lower bound: the
    parameters are split over all devices, and compositions do not count if only a part of the layers has them.
    """
    depth = getattr(model, "depth", 0)
    if depth > MANY_LAYERS:
        some = getattr(model, "compose_layers", None) is not None
        model = model.clone(compose=None, compose_layers=None) if some else model
        one, two = (_size(param_shapes(model.clone(depth=layers), example)) for layers in (1, 2))
        size = one + (depth - 1) * (two - one)
        _check(mesh, 2 * 4 * size // mesh.size, f"about {size:,} parameters with gradients")


def check_state(mesh: Mesh, state: object, trained: object) -> None:
    """Raise ConfigError if a training state and the gradients of `trained` need more memory than there is.

    Both are trees of shapes with shardings; `trained` are the parameters with gradients.
    """
    needed = shard_bytes(state) + shard_bytes(trained)
    _check(mesh, needed, f"{_size(trained):,} trained parameters with gradients and optimizer state")


def check_step(mesh: Mesh, compiled: jax.stages.Compiled) -> None:
    """Raise ConfigError if a compiled training step needs more memory than is free in addition to its arguments."""
    sizes = compiled.memory_analysis()
    if sizes is not None:  # some platforms report none
        needed = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        _check(mesh, needed, "activations and other temporary arrays of a training step")


def program_bytes(compiled: jax.stages.Compiled) -> tuple[int, int]:
    """Return the bytes of a device that a program needs for its arguments, and in addition to them while it runs.

    The second number counts results that do not reuse the memory of an argument, temporary arrays and the code.
    """
    sizes: Any = compiled.memory_analysis()
    more = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes, more + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes


def check_programs(mesh: Mesh, programs: Iterable[jax.stages.Compiled]) -> None:
    """Raise TooLargeError if the arguments of all programs, and what one of them needs more, exceed the free memory."""
    held, more = zip(*map(program_bytes, programs), strict=True)
    _check(mesh, sum(held) + max(more), "the arrays of a compiled program" if len(held) == 1 else "all programs")


def is_exhausted(error: BaseException) -> bool:
    """Return True if an exception says that a device, the compiler or the host has too little memory."""
    return isinstance(error, MemoryError | TooLargeError) or (
        isinstance(error, jax.errors.JaxRuntimeError)
        and ("RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower())
    )


def shard_bytes(tree: object) -> int:
    """Return the number of bytes that a tree of arrays, given as shapes with shardings, needs on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size(tree: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _check(mesh: Mesh, needed: int, what: str) -> None:
    devices = mesh.local_devices
    free = _free(devices)
    if free is not None and needed > free:
        raise TooLargeError(
            f"{what} need {needed / 1e9:.2f} GB of memory on each of {len(devices)} {devices[0].platform} device(s), "
            f"which has {free / 1e9:.2f} GB free; --config.check_memory=False trains all the same"
        )


def _free(devices: Sequence[jax.Device]) -> int | None:
    """Return the free bytes of the fullest of the devices; None if unknown. CPU devices share the host's memory."""
    if not {*devices} & {*jax.local_devices()}:  # of a slice that is not here
        return None
    sizes = [device.memory_stats() for device in devices]
    if all(sizes):
        return min(size["bytes_limit"] - size["bytes_in_use"] for size in sizes)
    free = memory.available() if devices[0].platform == "cpu" else None
    return None if free is None else free // len(devices)
