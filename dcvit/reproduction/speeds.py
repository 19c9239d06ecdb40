"""Times of the training steps of configs, measured in interleaved rounds of one process."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from dcvit.parallel.sharding import local_rows, prefetch
from dcvit.reproduction.rounds import interleaved
from dcvit.reproduction.seeded import Run, machine, stored
from dcvit.training.setup import Setup, load_setup
from dcvit.training.step import init_params, initial_state, jit_update, state_shapes

NAME = "step_times.json"
ROUNDS = 30


class StepTimes(NamedTuple):
    """The median time of a training step in milliseconds, by name of the model, and the machine that measured it."""

    ms: Mapping[str, float]
    machine: str


def step_times(runs: Mapping[str, Run], folder: Path) -> StepTimes:
    """Return the time of a training step of each run: measured now, or stored in the folder by an earlier call.

    The stored times are kept, so that the same command trains for the same numbers of steps again.

    Args:
      runs: the runs by name of the model.
      folder: the folder of the runs.

    Raises:
      ConfigError: the stored times are damaged, or of other configs.
    """
    wanted = {arm: [run.spec, *run.words(0)] for arm, run in runs.items()}

    def measure() -> dict[str, dict[str, float] | str]:
        steps = {arm: stepper(load_setup(spec, words)) for arm, (spec, *words) in wanted.items()}
        seconds = interleaved(steps, ROUNDS)
        return {"ms": {arm: 1e3 * statistics.median(times) for arm, times in seconds.items()}, "machine": machine()}

    return StepTimes(**stored(folder / NAME, wanted, measure))  # type: ignore[arg-type]


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
