"""Comparison of runs from the files of their workdirs: results, speed and state, and a picture of training curves."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dcvit import evaluators
from dcvit.config import values
from dcvit.config.durations import Durations
from dcvit.errors import ConfigError, MetricsError, escaped, first_line_with_type, nearest
from dcvit.runs import metrics
from dcvit.runs.files import Folder
from dcvit.runs.lock import is_locked
from dcvit.runs.seeds import workdir_seeds
from dcvit.runs.steps import saved_steps
from input_pipeline.optional import require

DRAWN = ("top1", "mean_ap", "bits_per_byte", "loss")  # metrics of evaluators in the picture, by preference
FORMATS = (".png", ".pdf", ".svg")  # of the picture
LABEL = 40  # characters of a name in the legend
HIGHEST = 1e100  # number in the picture; matplotlib's axes overflow near the largest float

Row: TypeAlias = Mapping[str, Any]  # of a table or a file: strings, numbers and None by name of a column


class RecordedRun(NamedTuple):
    """A run, as the files of its workdir describe it.

    Fields:
      workdir: the folder of the run.
      rows: the rows of metrics.jsonl, at least one.
      timing: the rows of timing.jsonl.
      total: the number of steps of the complete run.
      lower_is_better: the metrics of its evaluators, "EVALUATOR/METRIC", whose lowest value is the best.
    """

    workdir: Folder
    rows: Sequence[Row]
    timing: Sequence[Row]
    total: int | None
    lower_is_better: Sequence[str]

    def column(self, name: str) -> list[float]:
        """Return the finite numbers `name` of the rows."""
        return [row[name] for row in (*self.rows, *self.timing) if row.get(name) is not None]

    def evaluations(self) -> list[str]:
        """Return the metrics of evaluators, "EVALUATOR/METRIC", without numbers of examples, which are integers."""
        return list(dict.fromkeys(k for row in self.rows for k, v in row.items() if "/" in k and type(v) is not int))

    def state(self) -> str:
        """Return "running", "done" or "stopped": by `config.early_stop`, by a signal, or by an error.

        A run in an object store, which has no lock, may still run when it counts as stopped.
        """
        if isinstance(self.workdir, Path) and is_locked(self.workdir):
            return "running"
        last = max([self.rows[-1]["step"], *saved_steps(self.workdir)])
        return "done" if self.total and last >= self.total else "stopped"


def open_runs(folders: Iterable[Folder]) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs that can be read, which may be under way, and an error for each of the others.

    A folder is a workdir, or holds the workdirs of seeds. A workdir that is given twice is one run.
    """
    workdirs: dict[Folder, Folder] = {}
    for folder in folders:
        for workdir in workdir_seeds(folder) or [folder]:
            workdirs.setdefault(workdir.resolve() if isinstance(workdir, Path) else workdir, workdir)
    runs, errors = [], []
    for workdir in workdirs.values():
        try:
            runs.append(_read(workdir))
        except (ConfigError, MetricsError) as e:
            errors.append(str(e))
    return runs, errors


def _read(workdir: Folder) -> RecordedRun:
    rows, timing = (metrics.read(workdir / name) for name in metrics.FILES)
    if not rows:
        raise ConfigError(f"no metrics.jsonl with rows in {workdir}")
    config = values.read_json(workdir / "config.json")
    try:
        examples = json.loads((workdir / "data.json").read_text())["examples"]
        if not examples > 0:
            raise ValueError(f"{examples} examples")
        total = Durations(config.input.batch_size, examples).steps(config, "total")
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
        raise ConfigError(
            f"{workdir}: config.json and data.json do not tell the number of steps: {first_line_with_type(e)}"
        ) from None
    return RecordedRun(workdir, rows, timing, total, _lower_is_better(config.evals.to_dict()))


def _lower_is_better(evals: Mapping[str, object]) -> list[str]:
    """Return the metrics "EVALUATOR/METRIC" of `config.evals` of which a lower value is better."""
    found = []
    for name, options in evals.items():
        kind = options.get("type") if isinstance(options, dict) else None
        if kind in evaluators.NAMES:
            lower = evaluators.module_of(kind, name).Evaluator.lower_is_better
            found += [f"{name}/{metric}" for metric in lower]
    return found


def results(runs: Sequence[RecordedRun], metric: str | None = None) -> list[Row]:
    """Return a row for each run: step, state, parameters, metrics, loss, speed and time.

    Args:
      runs: the runs.
      metric: the only metric of an evaluator in the rows, which are sorted by its best value.

    Raises:
      ConfigError: no run has `metric`.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.evaluations()))
    if metric is None:
        return [_result(run, names) for run in runs]
    if metric not in names:
        raise ConfigError(f"--metric {metric}: no run has it; {nearest(metric, names)}")
    sign, best = 1 if any(metric in run.lower_is_better for run in runs) else -1, f"best {escaped(metric)}"
    rows = [_result(run, [metric]) for run in runs]
    return sorted(rows, key=lambda row: math.inf if row[best] is None else sign * row[best])


def _result(run: RecordedRun, names: Sequence[str]) -> Row:
    """Return the table row of a run, with the last and the best value after step 0 of the metrics `names`."""
    row = {"run": str(run.workdir), "step": run.rows[-1]["step"], "total": run.total, "state": run.state()}
    row["parameters"] = _last(run.column("num_params"))
    for name in names:
        trained = [each[name] for each in run.rows if each["step"] and each.get(name) is not None]
        row[escaped(name)] = _last(run.column(name))
        row[f"best {escaped(name)}"] = (min if name in run.lower_is_better else max)(trained, default=None)
    row["loss"] = _last(run.column("loss"))
    for name in ("examples_per_second", "step_seconds", "mfu"):
        found = run.column(name)
        row[name] = statistics.median(found) if found else None
    row["seconds"] = _last(run.column("seconds"))
    return row


def _last(found: Sequence[float]) -> float | None:
    return found[-1] if found else None


def plot(runs: Sequence[RecordedRun], out: Path, metric: str | None = None) -> None:
    """Draw the training loss of each run, and a metric of its evaluators, over the training step.

    Args:
      runs: the runs.
      out: the picture, whose suffix is one of `FORMATS`.
      metric: the metric, "EVALUATOR/METRIC"; None is the first of `DRAWN` that a run has, of each of its evaluators.
    """
    require("matplotlib").use("Agg")
    plt = require("matplotlib.pyplot")
    plt.rc("text", parse_math=False)  # a name may contain $
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for i, run in enumerate(runs):
        style: dict[str, str] = {"color": f"C{i}", "marker": "."}
        label = _short(str(run.workdir)).lstrip("_")  # matplotlib hides labels that begin with an underscore
        left.plot(*_points(run.rows, "loss"), label=label, **style)
        for drawn, line in zip([metric] if metric else _drawn(run), ("-", "--", ":", "-."), strict=False):
            right.plot(*_points(run.rows, drawn), linestyle=line, label=f"{label} {_short(drawn)}", **style)
    left.set(xlabel="step", ylabel="training loss (nats)")
    right.set(xlabel="step", ylabel="evaluation")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _short(text: str) -> str:
    """Return the printable end of a text, as long as the legend of a picture has room for."""
    shown = escaped(text)
    return shown if len(shown) <= LABEL else f"…{shown[1 - LABEL :]}"


def _drawn(run: RecordedRun) -> list[str]:
    """Return the names "EVALUATOR/METRIC" of the first of `DRAWN` that a run has."""
    found = ([name for name in run.evaluations() if name.endswith(f"/{metric}")] for metric in DRAWN)
    return next(filter(None, found), [])


def _points(rows: Sequence[Row], name: str) -> np.ndarray:
    """Return the steps and values, up to ±`HIGHEST`, of the rows that have a metric; null, not finite, is NaN."""
    found = [(row["step"], math.nan if row[name] is None else row[name]) for row in rows if name in row]
    return np.clip(np.array(found, float).reshape(-1, 2).T, -HIGHEST, HIGHEST)
