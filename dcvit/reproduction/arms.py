"""Comparison of small language models that differ in their attention, trained on embedded text with several seeds.

Every arm is trained twice: for the same number of steps, in RUNS/ARM/seedN, and for the time that the first arm takes,
in RUNS/ARM=time/seedN. A run at equal time has its own number of steps, from the times of a step, and the complete
schedule of the learning rate over them. See `dcvit.reproduction.seeded` for how runs are skipped and resumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dcvit.models import lm
from dcvit.reproduction import seeded, step_times
from dcvit.reproduction.seeded import Train
from dcvit.training.seeds import summarize, workdir_of

METRIC = "validation/bits_per_byte"
CONTEXT, STEPS, VOCABULARY = 64, 600, 257
MODEL = {"width": 64, "depth": 2, "mlp_dim": 176, "num_heads": 8}


class Arm(NamedTuple):
    """One model: the fields in which it differs from `MODEL`, and the paper's value."""

    fields: Mapping[str, object]
    paper: float | None = None


class Claim(NamedTuple):
    """A statement of the paper that one arm has a lower loss than another."""

    text: str
    better: str
    worse: str


class Comparison(NamedTuple):
    """Measurements of each arm; all arms have the same seeds.

    Fields:
      means, intervals: METRIC after all steps, and half the width of its 95 % interval.
      differences, difference_intervals: to the first arm with the same seed.
      equal_time, equal_time_intervals: METRIC of the runs that take as long as those of the first arm, and half the
        width of its 95 % interval.
      equal_steps: the steps of these runs.
      step_ms: the median time of a step.
      machine: where the steps were timed.
      parameters: their number.
      values: METRIC after all steps, by seed and arm.
    """

    seeds: Sequence[int]
    means: Mapping[str, float]
    intervals: Mapping[str, float | None]
    differences: Mapping[str, float]
    difference_intervals: Mapping[str, float | None]
    equal_time: Mapping[str, float]
    equal_time_intervals: Mapping[str, float | None]
    equal_steps: Mapping[str, int]
    step_ms: Mapping[str, float]
    machine: str
    parameters: Mapping[str, int]
    values: Mapping[int, Mapping[str, float]]


def folder_of(runs: Path, arm: str) -> Path:
    """Return the folder of an arm's runs."""
    return runs / re.sub(r"[^A-Za-z0-9.=+-]+", "_", arm).strip("_")


def timed_folder_of(runs: Path, arm: str) -> Path:
    """Return the folder of an arm's runs at equal time; no arm's own folder ends so."""
    return runs / f"{folder_of(runs, arm).name}=time"


def train_arms(arms: Mapping[str, Arm], runs: Path, seeds: Sequence[int], train: Train, steps: int = STEPS) -> int:
    """Train all arms, seed by seed, and return the exit status of the first run that fails, or 0.

    Raises:
      ConfigError, MetricsError: see `dcvit.reproduction.seeded.run`.
    """
    each = steps_at_equal_time(times_of(arms, runs), steps)
    for seed in seeds:
        for name, arm in arms.items():
            length = {folder_of(runs, name): steps}
            if each[name] != steps:
                length[timed_folder_of(runs, name)] = each[name]
            for folder, count in length.items():
                words = words_of(arm, seed)
                if status := seeded.run(train, spec_of(count), workdir_of(folder, seed), words, METRIC):
                    return status
    return 0


def times_of(arms: Mapping[str, Arm], runs: Path) -> step_times.StepTimes:
    """Return the times of a step of all arms, measured when they are first needed."""
    return step_times.step_times({name: (spec_of(1), words_of(arm, 0)) for name, arm in arms.items()}, runs)


def steps_at_equal_time(times: step_times.StepTimes, steps: int) -> dict[str, int]:
    """Return the steps of each arm that take as long as `steps` steps of the first arm."""
    first = next(iter(times.ms.values()))
    return {name: max(1, round(steps * first / ms)) for name, ms in times.ms.items()}


def spec_of(steps: int) -> str:
    """Return the config of a run."""
    return f"lm_stdlib:steps={steps}"


def model_of(fields: Mapping[str, Any]) -> lm.LM:
    """Return the language model of bytes with these fields."""
    return lm.Model(VOCABULARY, **{**fields, "context": CONTEXT})


def words_of(arm: Arm, seed: int) -> list[str]:
    """Return the overrides of an arm's config."""
    return overrides({**MODEL, **arm.fields}, seed)


def overrides(fields: Mapping[str, object], seed: int) -> list[str]:
    """Return the overrides of the config of a model with these fields."""
    values: dict[str, object] = {f"model.{key}": value for key, value in fields.items()}
    values |= {f"{data}.context": CONTEXT for data in ("input.data", "evals.validation.data")}
    values |= {"seed": seed, "tensorboard": False, "evals.validation.log_percent": 100}
    return [f"{key}={value}" for key, value in values.items()]


def compare(arms: Mapping[str, Arm], runs: Path, seeds: Sequence[int], steps: int = STEPS) -> Comparison:
    """Return the measurements of complete runs.

    Raises:
      ConfigError: a run is not complete, or the runs of an arm differ in more than their seed.
    """
    first, times = next(iter(arms)), times_of(arms, runs)
    equal_steps = steps_at_equal_time(times, steps)
    folders = {name: folder_of(runs, name) for name in arms}
    timed = {name: folders[name] if equal_steps[name] == steps else timed_folder_of(runs, name) for name in arms}
    values, at_equal_time = (seeded.all_finals(runs, found, seeds, METRIC) for found in (folders, timed))
    differences = {seed: {name: x - each[first] for name, x in each.items()} for seed, each in values.items()}
    sizes = {name: seeded.parameters(workdir_of(folder, seeds[0])) for name, folder in folders.items()}
    return Comparison(
        seeds, *summary(values), *summary(differences), *summary(at_equal_time), equal_steps, times.ms,
        times.machine, sizes, values,
    )  # fmt: skip


def summary(values: Mapping[int, Mapping[str, float]]) -> tuple[dict[str, float], dict[str, float | None]]:
    """Return the mean over seeds and half the width of the 95 % interval of each arm."""
    rows = {str(row["metric"]): row for row in summarize(values)}
    means = {name: float(row["mean"] or 0) for name, row in rows.items()}
    return means, {name: None if (w := row["± 95 %"]) is None else float(w) for name, row in rows.items()}


def verdict(claim: Claim, found: Comparison) -> str:
    """Return "holds", "does not hold" or "undecided", by the 95 % interval of the difference of paired seeds."""
    ((mean, interval),) = [
        (row["mean"], row["± 95 %"])
        for row in summarize({s: {"d": v[claim.better] - v[claim.worse]} for s, v in found.values.items()})
    ]
    assert isinstance(mean, float)
    return decision(mean, interval if isinstance(interval, float) else None)


def decision(mean: float, interval: float | None, *, lower: bool = True, decimals: int = 4) -> str:
    """Return "holds", "does not hold" or "undecided" for the statement that a difference is below (or above) 0.

    Args:
      mean: the mean difference.
      interval: half the width of its 95 % interval; None for a single seed, which decides nothing.
      lower: the statement is that the difference is below 0, not above.
      decimals: of the numbers in the text.
    """
    mean = round(mean, decimals) + 0.0  # no negative zero
    if interval is None or abs(mean) <= interval:
        width = "" if interval is None else f" ± {interval:.{decimals}f}"
        return f"undecided ({mean:+.{decimals}f}{width})"
    return f"{'holds' if (mean < 0) == lower else 'does not hold'} ({mean:+.{decimals}f} ± {interval:.{decimals}f})"


def ordered_pairs(arms: Mapping[str, Arm], found: Comparison) -> tuple[int, int]:
    """Return how many pairs of arms with different values in the paper have the same order here, and their number."""
    known = [(arm.paper, found.means[name]) for name, arm in arms.items() if arm.paper is not None]
    pairs = [(a, b) for i, a in enumerate(known) for b in known[:i] if a[0] != b[0]]
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs), len(pairs)
