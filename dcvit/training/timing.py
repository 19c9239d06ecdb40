"""Timing in interleaved rounds, and the name of the machine; imports only JAX, for scripts on machines with no more."""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

Name = TypeVar("Name")


def device() -> str:
    """Return a text with the machine, its accelerator and the version of JAX."""
    kind = jax.devices()[0].device_kind
    return f"{os.cpu_count()} cores, {kind}, {platform.machine()}, jax {jax.__version__}"


def interleaved(
    steps: Mapping[Name, Callable[[], object]], rounds: int, clock: Callable[[], float] | None = None
) -> dict[Name, list[float]]:
    """Return, by key of `steps`, the seconds of one call in each round. A round calls each twice, times the second.

    The order in a round is random, so that no step always follows the same other one; it is the same in every process
    and at every call. With the clock `time.process_time`, the seconds are those of the CPU, of all threads; by default,
    they are those of `time.perf_counter`.
    """
    clock = clock or time.perf_counter
    seconds: dict[Name, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in random.Random(number).sample([*steps], len(steps)):
            steps[name]()  # not timed: it brings the step's arrays back to the caches, and allocates its memory again
            started = clock()
            steps[name]()
            seconds[name].append(clock() - started)
    return seconds
