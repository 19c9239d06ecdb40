"""Comparison of runs: results, speed and state, from the files of their workdirs."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from dcvit.config import values
from dcvit.config.durations import Durations
from dcvit.errors import ConfigError, MetricsError, nearest
from dcvit.runs import curves, metrics
from dcvit.runs.files import Folder
from dcvit.runs.lock import is_locked
from dcvit.runs.seeds import workdir_seeds
from dcvit.runs.steps import saved_steps

# Metrics of evaluators that are better if lower; all others are better if higher.
LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "nats_per_document")
CELLS = {"img/s": "{:,.0f}", "tok/s": "{:,.0f}", "ms/step": "{:,.1f}", "MFU": "{:.1%}"}  # formats of columns

Facts: TypeAlias = Mapping[str, Any]  # values by name of a column, or by key of a config
Row: TypeAlias = dict[str, Any]  # of a table: strings, numbers and None by name of a column


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run, as the files of its workdir describe it.

    Fields:
      name: the last parts of the path, as many as distinguish the compared runs.
      workdir: the folder of the run.
      config: the config; empty without config.json.
      rows: the rows of metrics.jsonl, at least one.
      timing: the rows of timing.jsonl.
      total: the number of steps of the complete run; None if it is not known.
    """

    name: str
    workdir: Folder
    config: Facts
    rows: Sequence[Facts]
    timing: Sequence[Facts]
    total: int | None

    def column(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of each row with a finite number `name`."""
        return [(row["step"], row[name]) for row in (*self.rows, *self.timing) if row.get(name) is not None]

    def last(self, name: str) -> float | None:
        """Return the last value of `name`; None if there is none."""
        found = self.column(name)
        return found[-1][1] if found else None

    def median(self, name: str) -> float | None:
        """Return the median of the values of `name`; None if there are none."""
        found = self.column(name)
        return statistics.median(value for _, value in found) if found else None

    def best(self, name: str) -> float | None:
        """Return the best value of a metric after step 0, or of step 0 if there are no other."""
        found = [value for step, value in self.column(name) if step] or [value for _, value in self.column(name)]
        return (min if lower_is_better(name) else max)(found) if found else None

    @property
    def evaluations(self) -> list[str]:
        """The names of metrics of evaluators, "EVALUATOR/METRIC", without numbers of examples, which are integers."""
        return list(dict.fromkeys(k for row in self.rows for k, v in row.items() if "/" in k and type(v) is not int))


def open_runs(folders: Iterable[Folder]) -> tuple[list[RecordedRun], list[str]]:
    """Read runs, which may be under way.

    Args:
      folders: workdirs, and folders that hold the workdirs of seeds.

    Returns:
      The runs that can be read, and an error for each of the others.

    Raises:
      ConfigError, MetricsError: no run can be read.
    """
    workdirs = [workdir for folder in folders for workdir in workdir_seeds(folder) or [folder]]
    runs, errors = list[RecordedRun](), list[ConfigError | MetricsError]()
    for name, workdir in zip(curves.labels(workdirs), workdirs, strict=True):
        try:
            runs.append(_read(name, workdir))
        except (ConfigError, MetricsError) as e:
            errors.append(e)
    if not runs:
        raise errors[0]
    return runs, [str(e) for e in errors]


def _read(name: str, workdir: Folder) -> RecordedRun:
    rows = metrics.read(workdir / "metrics.jsonl")
    if not rows:
        raise ConfigError(f"no metrics.jsonl with rows in {workdir}")
    timing = metrics.read(workdir / "timing.jsonl")
    if not (workdir / "config.json").is_file():
        return RecordedRun(name, workdir, {}, rows, timing, None)
    config = values.read_json(workdir / "config.json").to_dict()
    examples = 0
    if (workdir / "data.json").is_file():
        try:
            examples = int(json.loads((workdir / "data.json").read_text())["examples"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
            raise ConfigError(f"cannot read examples of {workdir / 'data.json'}: {e}") from None
    total = Durations(config["input"]["batch_size"], examples).steps(config, "total")
    return RecordedRun(name, workdir, config, rows, timing, total or None)


def lower_is_better(metric: str) -> bool:
    """Return True for a metric of an evaluator, "EVALUATOR/METRIC", whose best value is the lowest."""
    return metric.rpartition("/")[2] in LOWER_IS_BETTER


def results(runs: Sequence[RecordedRun], metric: str | None = None) -> list[Row]:
    """Return a row for each run: step, state, parameters, metrics, loss, speed and time.

    Args:
      runs: the runs.
      metric: the only metric of an evaluator in the rows, which are sorted by its best value.

    Raises:
      ConfigError: no run has `metric`.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.evaluations))
    if metric is None:
        return [_result(run, names) for run in runs]
    if metric not in names:
        raise ConfigError(f"--metric {metric}: no run has it; {nearest(metric, names)}")
    sign, best = 1 if lower_is_better(metric) else -1, f"best {metric}"
    rows = [_result(run, [metric]) for run in runs]
    return sorted(rows, key=lambda row: math.inf if row[best] is None else sign * row[best])


def state(run: RecordedRun) -> str:
    """Return "running", "done" or "stopped": by `config.early_stop`, by a signal, or by an error.

    A run in an object store, which has no lock, may still run when it counts as stopped.
    """
    last = max([run.rows[-1]["step"], *saved_steps(run.workdir)])
    if isinstance(run.workdir, Path) and is_locked(run.workdir):
        return "running"
    if run.total and last >= run.total:
        return "done"
    return "stopped"


def _result(run: RecordedRun, names: Sequence[str]) -> Row:
    language = run.config.get("model_name") == "lm"
    context = run.config["model"].get("context") if language else None
    rate, step = run.median("examples_per_second"), run.median("step_seconds")
    row: Row = {
        "run": run.name, "step": run.rows[-1]["step"], "total": run.total, "state": state(run),
        "parameters": run.last("num_params"),
    }  # fmt: skip
    for name in names:
        row |= {name: run.last(name), f"best {name}": run.best(name)}
    return row | {
        "loss": run.last("loss"), "img/s": None if language else rate, "tok/s": context and rate and context * rate,
        "ms/step": step and 1000 * step, "MFU": run.median("mfu"), "seconds": run.last("seconds"),
    }  # fmt: skip


def cells(rows: Iterable[Row]) -> list[Row]:
    """Return rows of `results` for reading: rounded numbers."""
    shown = []
    for row in rows:
        cell: Row = {}
        for key, value in row.items():
            if key == "total":
                cell["step"] = f"{cell['step']}/{_cell(key, value)}" if value is not None else cell["step"]
            elif key == "seconds":
                cell["time"] = None if value is None else str(datetime.timedelta(seconds=round(value)))
            else:
                cell[key] = _cell(key, value)
        shown.append(cell)
    return shown


def _cell(key: str, value: str | float | None) -> str | None:
    if isinstance(value, float):
        return CELLS.get(key, "{:.4f}").format(value)
    return f"{value:,}" if isinstance(value, int) else value
