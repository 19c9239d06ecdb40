"""Times of training steps, and speed in training and in decoding, measured in interleaved rounds of one process."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from dcvit.inference.generation import Options, Params, cast_params, generate
from dcvit.models import lm
from dcvit.parallel.sharding import local_rows, prefetch
from dcvit.reproduction.seeded import machine, stored
from dcvit.training.setup import Setup, load_setup
from dcvit.training.step import init_params, initial_state, jit_update, state_shapes

NAME = "step_times.json"
ROUNDS = 30


class StepTimes(NamedTuple):
    """The median time of a step of each arm in milliseconds, and where they were measured."""

    ms: Mapping[str, float]
    machine: str


def step_times(runs: Mapping[str, tuple[str, Sequence[str]]], folder: Path) -> StepTimes:
    """Measure the steps of each arm, or return what an earlier call has measured and stored in the folder.

    The stored times are kept, so that the same command trains for the same numbers of steps again.

    Args:
      runs: the config of each arm, as for `dcvit.config.load.load`.
      folder: the folder of the runs.

    Raises:
      ConfigError: the stored times are damaged, or those of other configs.
    """
    wanted = {arm: [spec, *overrides] for arm, (spec, overrides) in runs.items()}

    def measure() -> dict[str, dict[str, float] | str]:
        seconds = interleaved({arm: stepper(load_setup(*run)) for arm, run in runs.items()}, ROUNDS)
        return {"ms": {arm: 1e3 * statistics.median(times) for arm, times in seconds.items()}, "machine": machine()}

    return StepTimes(**stored(folder / NAME, wanted, measure))  # type: ignore[arg-type]


def device() -> str:
    """Return the machine with its accelerator and the version of JAX in words."""
    kind = jax.devices()[0].device_kind
    return f"{os.cpu_count()} cores, {kind}, {platform.machine()}, jax {jax.__version__}"


def stepper(setup: Setup) -> Callable[[], None]:
    """Compile the training step of a run, and return a function that executes it on the first batch of the data."""
    with jax.set_mesh(setup.model.mesh):
        shapes = state_shapes(setup)
        places = jax.tree.map(lambda s: s.sharding, shapes)
        key = jax.random.key(setup.seed)
        state = jax.jit(lambda: initial_state(setup, init_params(setup, key)), out_shardings=places)()
        batches = setup.data.batches(0, local_rows(setup.model.mesh, setup.data.batch_size))
        (batch,) = prefetch(itertools.islice(batches, 1), setup.model.mesh, setup.data.batch_size)
        batches.close()
        update = jit_update(setup, shapes).lower(state, batch).compile()

    def step() -> None:
        nonlocal state
        state, metrics = update(state, batch)
        jax.block_until_ready((state, metrics))

    return step


def interleaved(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every timed step. A round runs two steps of each arm and times the second."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()  # not timed: it brings the arm's arrays back to the caches, and allocates its memory again
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def training_rates(runs: Mapping[str, tuple[str, Sequence[str]]], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the tokens per second of every timed training step of each arm, without compilation and evaluations.

    Args:
      runs: the config of each arm, as for `dcvit.config.load.load`.
      tokens: those of a step.
      rounds: timed steps of an arm.
    """
    seconds = interleaved({arm: stepper(load_setup(*run)) for arm, run in runs.items()}, rounds)
    return {arm: [tokens / each for each in times] for arm, times in seconds.items()}


def decoding_rates(
    nets: Mapping[str, lm.LM], batch: int, prompt: int, tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Return the tokens per second of a batch in each round for untrained models of each arm.

    A round generates with each arm in turn, from random prompts. The time is that from the first new token to the last,
    so that neither compilation nor the processing of the prompts counts.

    Args:
      nets: the model of each arm.
      batch: rows.
      prompt: tokens of a prompt.
      tokens: new tokens of a row.
      rounds: timed rounds; one more comes before them.
    """
    arms = {arm: decoder(net, batch, prompt, tokens) for arm, net in nets.items()}
    rates: dict[str, list[float]] = {arm: [] for arm in nets}
    for number in range(rounds + 1):
        for arm, decode in arms.items():
            rate = decode()
            if number:
                rates[arm].append(rate)
    return rates


def decoder(net: lm.LM, batch: int, prompt: int, tokens: int) -> Callable[[], float]:
    """Return a function that generates tokens and returns their number per second, over all rows."""
    params: Params = cast_params(net, jax.jit(net.init)(jax.random.key(0), np.zeros((1, 2), np.int32))["params"])
    prompts = np.random.default_rng(0).integers(net.vocab_size, size=(batch, prompt)).tolist()

    def decode() -> float:
        steps = generate(net, params, prompts, Options(tokens))
        next(steps)
        started = time.perf_counter()
        count = sum(batch for _ in itertools.islice(steps, tokens - 1))
        return count / (time.perf_counter() - started)

    return decode
