"""Memory that a run needs, compared with what its devices, or the host of CPU devices, have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from dcvit.errors import ConfigError
from input_pipeline import memory


class TooLargeError(ConfigError):
    """A program that needs more memory than the devices have free."""


def check_step(mesh: Mesh, compiled: jax.stages.Compiled) -> None:
    """Raise TooLargeError if a compiled training step needs more memory than is free in addition to its arguments."""
    _check(mesh, program_bytes(compiled)[1], "activations and other temporary arrays of a training step")


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
    _check(
        mesh, sum(held) + max(more), "the arrays of a compiled program" if len(held) == 1 else "all programs together"
    )


def shard_bytes(tree: object) -> int:
    """Return the number of bytes that a tree of arrays, given as shapes with shardings, needs on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


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
    sizes = [device.memory_stats() for device in devices]
    if all(sizes):
        return min(size["bytes_limit"] - size["bytes_in_use"] for size in sizes)
    free = memory.available() if devices[0].platform == "cpu" else None
    return None if free is None else free // len(devices)
