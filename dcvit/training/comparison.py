"""Comparison of runs: results, speed, state and differences of their configs, from the files of their workdirs."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from dcvit.config import values
from dcvit.config.durations import Durations
from dcvit.errors import ConfigError, MetricsError, nearest
from dcvit.parallel.trees import flattened
from dcvit.runs import curves, metrics
from dcvit.runs.files import Folder
from dcvit.runs.lock import is_locked
from dcvit.runs.seeds import half_width, workdir_seeds
from dcvit.runs.steps import saved_steps

# Metrics of evaluators that are better if lower; all others are better if higher.
LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "nats_per_document")
INTERVAL = " ± 95 %"  # end of the name of a column with the half width of a confidence interval
MAX_CHARACTERS = 40  # of a value of a config in a table
CONTEXT = 8  # characters that are shown before the difference of long values
DESCRIBING = ("step", "total", "state", "parameters")  # columns of which a group has no mean
CELLS = {"img/s": "{:,.0f}", "tok/s": "{:,.0f}", "ms/step": "{:,.1f}", "MFU": "{:.1%}"}  # formats of columns

Facts: TypeAlias = Mapping[str, Any]  # values by name of a column, or by key of a config
Row: TypeAlias = dict[str, Any]  # of a table: strings, numbers and None by name of a column


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run, as the files of its workdir describe it.

    Fields:
      name: the last parts of the path, as many as distinguish the compared runs.
      workdir: the folder of the run.
      config: the config, flattened, with dotted keys; empty without config.json.
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


Group: TypeAlias = tuple[str, list[RecordedRun]]  # a name, and runs whose results are averaged


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
    return RecordedRun(name, workdir, flattened(config), rows, timing, total or None)


def lower_is_better(metric: str) -> bool:
    """Return True for a metric of an evaluator, "EVALUATOR/METRIC", whose best value is the lowest."""
    return metric.rpartition("/")[2] in LOWER_IS_BETTER


def shown_metrics(runs: Sequence[RecordedRun], metric: str | None = None) -> list[str]:
    """Return the metrics of evaluators to compare: `metric`, or else those of two runs or more, or else all.

    Raises:
      ConfigError: no run has `metric`.
    """
    counts: dict[str, int] = {}
    for run in runs:
        for name in run.evaluations:
            counts[name] = counts.get(name, 0) + 1
    if metric is not None:
        if metric not in counts:
            raise ConfigError(f"--metric {metric}: no run has it; {nearest(metric, counts)}")
        return [metric]
    return [name for name, count in counts.items() if count > 1] or list(counts)


def grouped(runs: Iterable[RecordedRun], *, by_seed: bool) -> list[Group]:
    """Return groups of runs, with a name: of one run, or `by_seed` of runs whose configs differ only in the seed."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        config = {key: value for key, value in run.config.items() if key != "seed"}
        alone = not by_seed or not config
        groups.setdefault(str(run.workdir) if alone else json.dumps(config, sort_keys=True), []).append(run)
    names = [_common_name(found) for found in groups.values()]
    unique = [
        found[0].name if names.count(name) > 1 else name for name, found in zip(names, groups.values(), strict=True)
    ]
    return list(zip(unique, groups.values(), strict=True))


def results(groups: Sequence[Group], metric: str | None = None) -> list[Row]:
    """Return a row for each group of runs: step, state, parameters, metrics, loss, speed and time.

    Where a group has several runs, all rows have the number of runs, means, and half widths of their 95 % confidence
    intervals, None for one run.

    Args:
      groups: the runs.
      metric: the only metric of an evaluator in the rows, which are sorted by its best value.
    """
    names = shown_metrics([run for _, runs in groups for run in runs], metric)
    rows = [(name, [_result(run, names) for run in runs]) for name, runs in groups]
    several = any(len(found) > 1 for _, found in rows)
    merged = [_mean(name, found) if several else {"run": name, **found[0]} for name, found in rows]
    if metric is not None:
        sign, best = 1 if lower_is_better(metric) else -1, f"best {metric}"
        merged.sort(key=lambda row: math.inf if row[best] is None else sign * row[best])
    return merged


def state(run: RecordedRun) -> str:
    """Return "running", "done", "stopped early" (by `config.early_stop`), "failed" (by non-finite values) or "stopped".

    A stopped run was interrupted, killed or ended by an error; the same command resumes it.
    """
    last = max([run.rows[-1]["step"], *saved_steps(run.workdir)])
    if is_locked(run.workdir):
        return "running"
    if run.total and last >= run.total:
        return "done"
    if run.config.get("early_stop"):
        from dcvit.training.progress import EarlyStop  # imports JAX

        early = EarlyStop(run.config["early_stop"])
        for row in run.rows:
            early.update(row["step"], row)
        if early.reason:
            return "stopped early"
    found = [re.fullmatch(r"nonfinite-(\d+)\.json", path.name) for path in run.workdir.glob("nonfinite-*.json")]
    failed = len(found) > (run.config.get("nonfinite_skip") or 0)
    return "failed" if failed and any(match and int(match[1]) > last for match in found) else "stopped"


def _result(run: RecordedRun, names: Sequence[str]) -> Row:
    language = run.config.get("model_name") == "lm"
    rate, step = run.median("examples_per_second"), run.median("step_seconds")
    count = run.column("num_params")
    row: Row = {
        "step": run.rows[-1]["step"], "total": run.total, "state": state(run),
        "parameters": count[0][1] if count else None,
    }  # fmt: skip
    for name in names:
        row |= {name: run.last(name), f"best {name}": run.best(name)}
    tokens = (run.config.get("model.context") or 0) * rate if language and rate else None
    return row | {
        "loss": run.last("loss"), "img/s": None if language else rate, "tok/s": tokens or None,
        "ms/step": step and 1000 * step, "MFU": run.median("mfu"), "seconds": run.last("seconds"),
    }  # fmt: skip


def _mean(name: str, rows: Sequence[Row]) -> Row:
    """Return one row for a group of runs with these rows."""
    merged: Row = {"run": name, "n": len(rows)}
    for key in rows[0]:
        found = [row[key] for row in rows if row[key] is not None]
        if key in DESCRIBING:
            merged[key] = found[0] if len({*found}) == 1 else ", ".join(map(str, dict.fromkeys(found))) or None
        else:
            merged |= {key: statistics.fmean(found) if found else None, key + INTERVAL: half_width(found)}
    return merged


def _common_name(runs: Sequence[RecordedRun]) -> str:
    prefix = re.sub(r"[/_.-]*(seed)?$", "", _common_prefix([run.name for run in runs]))
    return runs[0].name if len(runs) == 1 else prefix or runs[0].workdir.parent.name


def differences(groups: Sequence[Group]) -> dict[str, Row]:
    """Return the config keys whose values differ between groups, each with its value by name of the group.

    Runs without a config are omitted. Among models of several kinds, so are keys that only some of the configs have.
    """
    configs = {name: runs[0].config for name, runs in groups if runs[0].config}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    if len({config["model_name"] for config in configs.values()}) > 1:
        keys = {key: None for key in keys if all(key in config for config in configs.values())}
    if any(len(runs) > 1 for _, runs in groups):
        keys.pop("seed")
    found = {key: {name: config.get(key) for name, config in configs.items()} for key in keys}
    return {key: by_run for key, by_run in found.items() if len({*map(json.dumps, by_run.values())}) > 1}


def difference_table(different: Mapping[str, Facts]) -> list[Row]:
    """Return rows for reading `differences`: key, value, and the runs with this value."""
    rows = []
    for key, by_run in different.items():
        runs: dict[str, list[str]] = {}
        for name, value in by_run.items():
            runs.setdefault(value if isinstance(value, str) and value else json.dumps(value), []).append(name)
        common = len(_common_prefix(runs)) - CONTEXT
        for i, (text, names) in enumerate(runs.items()):
            shown = f"…{text[common:]}" if common > CONTEXT else text
            rows.append({"key": "" if i else key, "value": _shortened(shown), "runs": ", ".join(names)})
    return rows


def joined(rows: Iterable[Row], different: Mapping[str, Facts]) -> list[Row]:
    """Return the rows of `results` with the columns of `differences`, as "config.KEY"; lists are JSON."""

    def text(value: object) -> object:
        return json.dumps(value) if isinstance(value, list | tuple | dict) else value

    return [row | {f"config.{key}": text(by_run.get(row["run"])) for key, by_run in different.items()} for row in rows]


def cells(rows: Iterable[Row]) -> list[Row]:
    """Return rows of `results` for reading: rounded numbers, with the intervals of means."""
    shown = []
    for row in rows:
        cell: Row = {}
        for key, value in row.items():
            if key == "total":
                cell["step"] = f"{cell['step']}/{_cell(key, value)}" if value is not None else cell["step"]
            elif key == "seconds":
                cell["time"] = None if value is None else str(datetime.timedelta(seconds=round(value)))
            elif not key.endswith(INTERVAL):
                width = row.get(key + INTERVAL)
                cell[key] = _cell(key, value) if width is None else f"{_cell(key, value)} ± {_cell(key, width)}"
        shown.append(cell)
    return shown


def _cell(key: str, value: str | float | None) -> str | None:
    if isinstance(value, float):
        return CELLS.get(key.removesuffix(INTERVAL), "{:.4f}").format(value)
    return f"{value:,}" if isinstance(value, int) else value


def _common_prefix(texts: Iterable[str]) -> str:
    """Return the characters with which all texts begin."""
    ordered = sorted(texts)
    first, last = ordered[0], ordered[-1]  # the others are between these
    return next((first[:i] for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), first)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"
