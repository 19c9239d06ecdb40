"""Times of the training steps of configs, measured in interleaved rounds of one process."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dcvit.reproduction.seeded import Run, machine, stored
from dcvit.training.benchmark import Program
from dcvit.training.setup import load_setup
from dcvit.training.timing import interleaved

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
        steps = {arm: Program(load_setup(spec, words), "train").start() for arm, (spec, *words) in wanted.items()}
        seconds = interleaved(steps, ROUNDS)
        return {"ms": {arm: 1e3 * statistics.median(times) for arm, times in seconds.items()}, "machine": machine()}

    return StepTimes(**stored(folder / NAME, wanted, measure))  # type: ignore[arg-type]
