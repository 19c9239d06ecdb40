"""Training runs of the tables: several seeds of each model, at equal steps and at equal time.

`dcvit train` resumes interrupted runs, leaves complete ones as they are, and refuses a workdir with another config.
"""

import contextlib
import io
import itertools
import json
import os
import platform
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dcvit.errors import ConfigError, MetricsError
from dcvit.runs import metrics
from dcvit.runs.files import replace
from dcvit.runs.seeds import half_width, workdir_of
from dcvit.train import main as train_command
from dcvit.training.measure import Program
from dcvit.training.setup import load_setup
from dcvit.training.timing import interleaved

ROUNDS = 30  # of the measurement of a step's time
Finals = dict[str, list[float]]  # by name of a model: the final metric of each seed


class Run(NamedTuple):
    """A config that is trained with several seeds, in FOLDER/seedN, and the metric that tables compare."""

    folder: Path
    spec: str  # of the config, with its arguments
    overrides: Mapping[str, object]  # by key
    metric: str  # EVALUATOR/METRIC after the last step

    def words(self, seed: int) -> list[str]:
        """Return overrides "KEY=VALUE" of a seed's run; its evaluator runs before the first step and at the end."""
        last = {"seed": seed, "tensorboard": False, f"evals.{self.metric.partition('/')[0]}.log_percent": 100}
        return [f"{key}={value}" for key, value in {**self.overrides, **last}.items()]


def folder_of(folder: Path, name: str) -> Path:
    """Return the folder below `folder` for the runs of `name`; characters unfit for file names are replaced."""
    return folder / re.sub(r"[^A-Za-z0-9.=+-]+", "_", name).strip("_")


def train(runs: Mapping[str, Run], seeds: Sequence[int]) -> Finals:
    """Train the runs that are not complete, seed by seed, and return final metrics in the order of `seeds`.

    Raises:
      ConfigError: a config is invalid, or a workdir holds a run of another config.
      MetricsError: a run diverged; a table without it would look better than it is.
    """
    found: Finals = {name: [] for name in runs}
    for seed, (name, run) in itertools.product(seeds, runs.items()):
        workdir = workdir_of(run.folder, seed)
        words = ["--config", run.spec, "--workdir", str(workdir), *(f"--config.{word}" for word in run.words(seed))]
        with contextlib.redirect_stdout(io.StringIO()):
            status = train_command(words)
        if status:
            raise ConfigError(f"{workdir}: training ended with status {status}; re-run the same command to resume")
        value = metrics.read(workdir / "metrics.jsonl")[-1][run.metric]
        if value is None:
            raise MetricsError(f"{workdir}: {run.metric} is not a number after the last step; the run has diverged")
        found[name].append(float(value))
        print(f"{workdir}: {run.metric} {value:.4f}", flush=True)
    return found


def stored(path: Path, compute: Callable[[], Any]) -> Any:
    """Return the JSON value in a file; if there is none, compute and store it."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps(compute(), indent=1, allow_nan=False) + "\n")
    return json.loads(path.read_text())


class Comparison(NamedTuple):
    """Final metrics of arms, that is models that are compared, in the order of the seeds; the first is the control.

    Fields:
      at_steps: after equal steps.
      at_time: of other runs, which take as long as that of the first arm.
      steps: the number of steps of the runs at equal time, by arm.
      ms: the milliseconds of a training step, by arm.
      parameters: the number of parameters, by arm.
    """

    at_steps: Finals
    at_time: Finals
    steps: Mapping[str, int]
    ms: Mapping[str, float]
    parameters: Mapping[str, int]


def compare(make: Callable[[str, int], Run], arms: Sequence[str], seeds: Sequence[int], steps: int) -> Comparison:
    """Train every arm for `steps` steps and, in the folder ARM=time, for the time that the first arm takes for them.

    The times of a step are measured once and stored beside the arms, so that the same command trains the same steps.
    `make(arm, steps)` returns the run of an arm, with a complete schedule of the learning rate.
    """
    runs = {name: make(name, steps) for name in arms}
    ms = stored(runs[arms[0]].folder.parent / "step_times.json", lambda: step_times(runs))
    counts = {name: max(1, round(steps * ms[arms[0]] / ms[name])) for name in arms}
    others = {f"{name}=time": make(name, count) for name, count in counts.items() if count != steps}
    others = {name: run._replace(folder=Path(f"{run.folder}=time")) for name, run in others.items()}
    found = train({**runs, **others}, seeds)
    first = {name: metrics.read(workdir_of(run.folder, seeds[0]) / "metrics.jsonl")[0] for name, run in runs.items()}
    at_time = {name: found.get(f"{name}=time", found[name]) for name in arms}
    return Comparison(found, at_time, counts, ms, {name: row["num_params"] for name, row in first.items()})


def step_times(runs: Mapping[str, Run]) -> dict[str, float]:
    """Return the median milliseconds of a training step of each run, measured in interleaved rounds of one process."""
    steps = {name: Program(load_setup(run.spec, run.words(0)), "train").start() for name, run in runs.items()}
    return {name: 1e3 * statistics.median(times) for name, times in interleaved(steps, ROUNDS).items()}


def minus(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the differences of values with the same seed."""
    return [a - b for a, b in zip(first, second, strict=True)]


def cells(values: Sequence[float], column: str, interval: str = "") -> dict[str, float | None]:
    """Return two table cells: the mean in `column`, half the width of its 95 % interval in `interval`."""
    return {column: statistics.fmean(values), interval or f"{column} ± 95 %": half_width(values)}


def decision(differences: Sequence[float], *, lower: bool = True, decimals: int = 4) -> str:
    """Return "holds (…)", "does not hold (…)" or "undecided (…)" for the statement that the mean over seeds is below 0.

    It is undecided if the 95 % interval of the mean contains 0, or for one seed. Without `lower` it is "above 0".
    """
    mean, interval = round(statistics.fmean(differences), decimals) + 0.0, half_width(differences)  # no negative zero
    if interval is None or abs(mean) <= interval:
        word = "undecided"
    else:
        word = "holds" if (mean < 0) == lower else "does not hold"
    width = "" if interval is None else f" ± {interval:.{decimals}f}"
    return f"{word} ({mean:+.{decimals}f}{width})"


def settings(steps: int, seeds: Sequence[int]) -> str:
    """Return the first note below a table: steps, seeds, intervals and the machine."""
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    return f"{steps} steps; seeds {', '.join(map(str, seeds))}, in pairs; 95 % intervals of Student's t; {machine}."


# Small language models of bytes, trained on the text of Python's standard library.
METRIC = "validation/bits_per_byte"
CONTEXT, VOCABULARY = 64, 257


def language_model(folder: Path, fields: Mapping[str, object], steps: int) -> Run:
    """Return the run of a small language model with the given fields."""
    contexts = {f"{data}.context": CONTEXT for data in ("input.data", "evals.validation.data")}
    model = {f"model.{key}": value for key, value in fields.items()}
    return Run(folder, f"lm_stdlib:steps={steps}", {**model, **contexts}, METRIC)
