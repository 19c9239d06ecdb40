"""Comparison of arms: models that differ in a few fields of one config, trained with the same seeds.

Every arm is trained twice: for the same number of steps, in FOLDER/ARM/seedN, and for the time that the first arm
takes, in FOLDER/ARM=time/seedN. The number of steps of a run at equal time follows from the measured times of a step;
its learning rate has a complete schedule over these steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from dcvit.models import lm
from dcvit.reproduction import speeds
from dcvit.reproduction.seeded import Run, all_finals, folder_of, of_model
from dcvit.reproduction.speeds import StepTimes
from dcvit.reproduction.tables import Cell, Row
from dcvit.runs.seeds import summarize

Values = Mapping[int, Mapping[str, float]]  # by seed and name


class Mean(NamedTuple):
    """The mean over seeds, and half the width of its 95 % confidence interval, which is None for one seed."""

    mean: float
    interval: float | None

    def cells(self, column: str, interval: str = "") -> dict[str, Cell]:
        """Return two table cells by column: the mean in `column`, the interval in `interval` or "COLUMN ± 95 %"."""
        return {column: self.mean, interval or f"{column} ± 95 %": self.interval}


@dataclasses.dataclass(frozen=True)
class Group:
    """Models to compare, called arms, whose training runs are in one folder. All are compared with the first one.

    Fields:
      folder: the folder of the arms' folders.
      arms: the names of the arms.
      run: function (arm, folder, steps) -> the `Run` of an arm.
      timed: the number of steps that `run` gets for the runs of which one training step is timed.
    """

    folder: Path
    arms: Sequence[str]
    run: Callable[[str, Path, int], Run]
    timed: int

    def times(self) -> StepTimes:
        """Return the time of a training step of each arm, measured on the first call and stored in the folder."""
        timed = self._runs(dict.fromkeys(self.arms, self.timed))
        return speeds.step_times(timed, self.folder)

    def steps_at_equal_time(self, steps: int) -> dict[str, int]:
        """Return, for each arm, the number of steps that take as long as `steps` steps of the first arm."""
        ms = self.times().ms
        return {name: max(1, round(steps * ms[self.arms[0]] / ms[name])) for name in self.arms}

    def at_equal_steps(self, steps: int) -> dict[str, Run]:
        """Return, for each arm, a run that trains for `steps` steps."""
        return self._runs(dict.fromkeys(self.arms, steps))

    def at_equal_time(self, steps: int) -> dict[str, Run]:
        """Return, for each arm, a run that takes as long as `steps` steps of the first arm."""
        counts = self.steps_at_equal_time(steps)
        found = self._runs(counts, "=time")  # no arm's own folder ends so
        return {**found, **self._runs({name: count for name, count in counts.items() if count == steps})}

    def plan(self, steps: int) -> list[Run]:
        """Return the runs of all arms without duplicates: of each arm the one at equal steps, then at equal time."""
        timed = self.at_equal_time(steps)
        both = [run for name, run in self.at_equal_steps(steps).items() for run in (run, timed[name])]
        return [*{run.folder: run for run in both}.values()]

    def _runs(self, steps: Mapping[str, int], ending: str = "") -> dict[str, Run]:
        folders = {name: folder_of(self.folder, name) for name in steps}
        return {name: self.run(name, Path(f"{folders[name]}{ending}"), count) for name, count in steps.items()}


class Measured(NamedTuple):
    """The metric of several arms (models that are compared) at the end of training.

    Fields:
      values: the metric by seed and arm.
      means: its mean over seeds by arm.
      differences: by arm, the mean over seeds of the difference to the first arm with the same seed.
    """

    values: Values
    means: Mapping[str, Mean]
    differences: Mapping[str, Mean]

    def cells(self, name: str, column: str) -> dict[str, Cell]:
        """Return table cells of the arm `name`: its mean in `column`, its "difference", and their intervals."""
        return {**self.means[name].cells(column, "± 95 %"), **self.differences[name].cells("difference")}


class Comparison(NamedTuple):
    """Measurements of the arms (models that are compared) of a `Group`.

    Fields:
      seeds: the seeds, the same for all arms.
      at_steps: the metric after equal steps.
      at_time: the metric of the runs that take as long as those of the first arm.
      steps: the number of steps of the runs at equal time, by arm.
      times: the time of a training step, by arm.
      parameters: the number of parameters, by arm.
    """

    seeds: Sequence[int]
    at_steps: Measured
    at_time: Measured
    steps: Mapping[str, int]
    times: StepTimes
    parameters: Mapping[str, int]


class Claim(NamedTuple):
    """A statement, `text`, that is true if the arm `better` has a lower loss than the arm `worse`."""

    text: str
    better: str
    worse: str

    def verdict(self, found: Comparison) -> str:
        """Return `decision` on the losses after equal steps: "holds …", "does not hold …" or "undecided …"."""
        return decision(over_seeds(differences(found.at_steps.values, self.worse))[self.better])


def measure(runs: Mapping[str, Run], seeds: Sequence[int], scale: int = 1) -> Measured:
    """Return the final metrics of runs, each multiplied by `scale`; the keys of `runs` name the arms.

    Raises:
      ConfigError: a run is not complete, or the runs of an arm differ in more than their seed.
    """
    found = all_finals(runs, seeds)
    values = {seed: {name: scale * value for name, value in each.items()} for seed, each in found.items()}
    return Measured(values, over_seeds(values), over_seeds(differences(values, next(iter(runs)))))


def compare(group: Group, seeds: Sequence[int], steps: int, scale: int = 1) -> Comparison:
    """Return the measurements of a group's complete runs; each metric is multiplied by `scale`.

    Raises:
      ConfigError: a run is not complete, or the runs of an arm differ in more than their seed.
    """
    runs = group.at_equal_steps(steps)
    at_steps, at_time = (measure(each, seeds, scale) for each in (runs, group.at_equal_time(steps)))
    parameters = {name: run.parameters(seeds[0]) for name, run in runs.items()}
    return Comparison(seeds, at_steps, at_time, group.steps_at_equal_time(steps), group.times(), parameters)


def over_seeds(values: Values) -> dict[str, Mean]:
    """Return the mean over seeds, with Student's t interval, by name; `values` has a number for each seed and name."""
    return {
        str(row["metric"]): Mean(cast(float, row["mean"]), cast("float | None", row["± 95 %"]))
        for row in summarize(values)
    }


def differences(values: Values, first: str) -> dict[int, dict[str, float]]:
    """Return, by seed and name, each value minus the value of the name `first` with the same seed."""
    return {seed: {name: value - each[first] for name, value in each.items()} for seed, each in values.items()}


def decision(difference: Mean, *, lower: bool = True, decimals: int = 4) -> str:
    """Return "holds (…)", "does not hold (…)" or "undecided (…)" for the statement that a difference is below 0.

    Args:
      difference: the mean difference; undecided if its interval contains 0 or is None (one seed).
      lower: the statement is that the difference is below 0, not above.
      decimals: number of decimals in the text.
    """
    rounded = Mean(round(difference.mean, decimals) + 0.0, difference.interval)  # no negative zero
    words = {"gain": "holds", "loss": "does not hold", "not shown": "undecided"}[verdict(rounded, lower=lower)]
    width = "" if rounded.interval is None else f" ± {rounded.interval:.{decimals}f}"
    return f"{words} ({rounded.mean:+.{decimals}f}{width})"


def verdict(difference: Mean, *, lower: bool, least: float = 0) -> str:
    """Return "gain" or "loss" for a difference, or "not shown" if its interval contains 0 or is None (one seed).

    Args:
      difference: the mean difference, with its interval.
      lower: a gain is a difference below 0, not above.
      least: a difference with a smaller absolute value is "not shown".
    """
    mean, interval = difference
    if interval is None or abs(mean) <= interval or abs(mean) < least:
        return "not shown"
    return "gain" if (mean < 0) == lower else "loss"


# Small language models of bytes, trained on the text of Python's standard library.
METRIC = "validation/bits_per_byte"
CONTEXT, STEPS, VOCABULARY = 64, 600, 257
MODEL = {"width": 64, "depth": 2, "mlp_dim": 176, "num_heads": 8}


def language_models(folder: Path, arms: Mapping[str, Mapping[str, object]]) -> Group:
    """Return the group of the language models `arms`: for each name, the fields in which it differs from `MODEL`."""

    def run(name: str, folder: Path, steps: int) -> Run:
        return language_model_run(folder, {**MODEL, **arms[name]}, steps)

    return Group(folder, [*arms], run, timed=1)


def language_model_run(folder: Path, fields: Mapping[str, object], steps: int) -> Run:
    """Return the training run, in `folder`, of a language model with the fields of `MODEL`, updated by `fields`."""
    contexts = {f"{data}.context": CONTEXT for data in ("input.data", "evals.validation.data")}
    return Run(folder, f"lm_stdlib:steps={steps}", {**of_model(fields), **contexts}, METRIC)


def language_model(fields: Mapping[str, Any]) -> lm.LM:
    """Return the language model of bytes, untrained, with the fields of `MODEL`, updated by `fields`."""
    return lm.Model(VOCABULARY, **{**fields, "context": CONTEXT})


def row(name: str, found: Comparison, more: Mapping[str, Cell]) -> Row:
    """Return the table row of the language model `name`: its measurements in `found`, and the cells `more`."""
    return {
        "config": name, "parameters": found.parameters[name], **found.at_steps.cells(name, "bits per byte"),
        **found.at_time.means[name].cells("at equal time"), "steps at equal time": found.steps[name],
        "step ms": found.times.ms[name], **more,
    }  # fmt: skip


def about(found: Comparison, steps: int, first: str = "the first row") -> str:
    """Return a note below a table: the settings of its runs; `first` names the arm that others are compared with."""
    size = ", ".join(f"{key} {value}" for key, value in MODEL.items())
    return (
        f"Models of configs/lm_stdlib.py ({size}) after {steps} steps of 16×{CONTEXT} bytes of Python's standard "
        f"library, evaluated on its validation split. Seeds {', '.join(map(str, found.seeds))}; intervals of Student's "
        f"t distribution. Differences are to {first} with the same seed. “At equal time” are other runs, for as "
        f"many steps as take the time of {first}, each with a complete schedule of the learning rate. Times of a "
        f"step are medians of {speeds.ROUNDS} interleaved rounds, without compilation, data and evaluations, on "
        f"{found.times.machine}; other processes on the machine change them."
    )
