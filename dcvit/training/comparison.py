"""Comparison of runs from the files of their workdirs: a table of results and speed, and a picture of curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dcvit import evaluators
from dcvit.config import values
from dcvit.errors import ConfigError, MetricsError, escaped, nearest
from dcvit.runs import metrics
from dcvit.runs.files import Folder
from dcvit.runs.seeds import run_folders
from input_pipeline.optional import require

DRAWN = ("top1", "mean_ap", "bits_per_byte", "loss")  # metrics of evaluators in the picture, by preference
FORMATS = (".png", ".pdf", ".svg")  # of the picture
LABEL = 40  # last characters of a name that the legend shows
HIGHEST = 1e100  # number in the picture; matplotlib's axes overflow near the largest float

Row: TypeAlias = Mapping[str, Any]  # of a table or a file: strings, numbers and None by name of a column


class RecordedRun(NamedTuple):
    """A run as its files describe it: its workdir, the rows of metrics.jsonl and timing.jsonl, and the metrics of its
    evaluators, "EVALUATOR/METRIC", whose lowest value is the best."""

    workdir: Folder
    rows: Sequence[Row]
    timing: Sequence[Row]
    lower_is_better: Sequence[str]

    def column(self, name: str) -> list[float]:
        """Return the finite numbers `name` of the rows."""
        return [row[name] for row in (*self.rows, *self.timing) if row.get(name) is not None]

    def evaluations(self) -> list[str]:
        """Return the metrics of evaluators, "EVALUATOR/METRIC", without numbers of examples, which are integers."""
        return list(dict.fromkeys(k for row in self.rows for k, v in row.items() if "/" in k and type(v) is not int))


def open_runs(folders: Iterable[Folder]) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs that can be read, which may be under way, and an error for each of the others.

    A folder is a workdir, or holds the workdirs of seeds. A workdir that is given twice is one run.
    """
    workdirs: dict[Folder, Folder] = {}
    for folder in folders:
        for workdir in run_folders(folder) or [folder]:
            workdirs.setdefault(workdir.resolve() if isinstance(workdir, Path) else workdir, workdir)
    runs, errors = [], []
    for workdir in workdirs.values():
        try:
            rows, timing = (metrics.read(workdir / name) for name in metrics.FILES)
            if not rows:
                raise ConfigError(f"no metrics.jsonl with rows in {workdir}")
            evals = values.read_json(workdir / "config.json").evals.to_dict()
            runs.append(RecordedRun(workdir, rows, timing, _lower_is_better(evals)))
        except (ConfigError, MetricsError) as e:
            errors.append(str(e))
    return runs, errors


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
    """Return a row for each run: step, parameters, metrics, loss, speed and time.

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

    def last(name: str) -> float | None:
        return next(reversed(run.column(name)), None)

    row = {"run": str(run.workdir), "step": run.rows[-1]["step"], "parameters": last("num_params")}
    for name in names:
        trained = [each[name] for each in run.rows if each["step"] and each.get(name) is not None]
        row[escaped(name)] = last(name)
        row[f"best {escaped(name)}"] = (min if name in run.lower_is_better else max)(trained, default=None)
    row["loss"] = last("loss")
    for name in ("examples_per_second", "step_seconds", "mfu"):
        found = run.column(name)
        row[name] = statistics.median(found) if found else None
    return {**row, "seconds": last("seconds")}


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
        label = escaped(str(run.workdir))[-LABEL:].lstrip("_")  # matplotlib hides labels that begin with an underscore
        left.plot(*_points(run.rows, "loss"), label=label, **style)
        found = ([name for name in run.evaluations() if name.endswith(f"/{drawn}")] for drawn in DRAWN)
        drawn = [metric] if metric else next(filter(None, found), [])
        for name, line in zip(drawn, ("-", "--", ":", "-."), strict=False):
            right.plot(*_points(run.rows, name), linestyle=line, label=f"{label} {escaped(name)[-LABEL:]}", **style)
    for axes, name in ((left, "training loss (nats)"), (right, "evaluation")):
        axes.set(xlabel="step", ylabel=name)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _points(rows: Sequence[Row], name: str) -> np.ndarray:
    """Return the steps and values, up to ±`HIGHEST`, of the rows that have a metric; null, not finite, is NaN."""
    found = [(row["step"], math.nan if row[name] is None else row[name]) for row in rows if name in row]
    return np.clip(np.array(found, float).reshape(-1, 2).T, -HIGHEST, HIGHEST)
