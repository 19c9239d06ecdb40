"""Evaluation of a checkpoint: rows of results, the CSV file to which they are appended, and the report."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dcvit.errors import NOT_FINITE, CheckpointError, ConfigError
from dcvit.hub.model import TrainedModel
from dcvit.pages import report as reports
from dcvit.pages.report.outcomes import Outcomes
from dcvit.pages.report.page import Evaluation, render
from dcvit.parallel import multihost
from dcvit.runs.steps import is_step, step_folder
from dcvit.versions import __version__

COLUMNS = ("evaluation", "model", "step", "parameters")  # the first columns of every row
Row = dict[str, object]


def evaluate(trained: TrainedModel, out: Path | None = None, report: Path | None = None) -> tuple[list[Row], str]:
    """Run every evaluator of a trained model, and return rows of results and a report.

    Args:
      trained: the model and its checkpoint.
      out: the CSV file for the rows. Its columns are checked before the evaluation; the rows are not written.
      report: the HTML file for a report of the classification evaluators. The path is checked before the evaluation;
        the report is not written.

    Returns:
      The rows of all evaluators with the same keys, `COLUMNS` and the columns of all evaluators; values that do not
      exist, such as the step of a checkpoint without one, are None. The second result is the report as HTML, which is
      empty without `report` and in all processes except the first.

    Raises:
      ConfigError: the config has no evaluator whose data is present, `out` has other columns, or the report cannot be
        written or has no classification evaluator.
      CheckpointError: the checkpoint is missing, damaged, or does not fit the model, or a metric is not finite.
      InputError: the data is unusable.
    """
    if report and multihost.is_first():
        reports.check_path(report)
    mesh, strategy, evaluators = trained.evaluators()
    if not evaluators:
        raise ConfigError("config.evals has no evaluator whose data is present")
    observed = reports.observe(evaluators) if report else {}
    multihost.agree({"evaluations": list(evaluators), "examples": [len(e.source) for e in evaluators.values()]})
    columns = tuple(dict.fromkeys([*COLUMNS, *(key for e in evaluators.values() for key in e.columns)]))
    if out and multihost.is_first():
        append_csv(out, columns)
    source = trained.source
    step = step_folder(source.path).name if source.is_checkpoint else ""
    first, *others = evaluators.values()
    params = trained.params(first.example, mesh, strategy)
    for evaluator in others:
        trained.check_params(params, evaluator.example, str(source))
    shared = {
        "model": trained.label,
        "step": int(step) if is_step(step) else None,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }
    rows: list[Row] = []
    for name, evaluator in evaluators.items():
        metrics = evaluator.run(params)
        if wrong := [key for key, value in metrics.items() if not math.isfinite(value)]:
            raise CheckpointError(f"{source}: {name}/{wrong[0]} is {NOT_FINITE}")
        rows += [shared | row for row in evaluator.rows(name, metrics, trained.model)]
    page = _report(trained, evaluators, observed, rows) if report and multihost.is_first() else ""
    return [{key: row.get(key) for key in columns} for row in rows], page


def _report(
    trained: TrainedModel, evaluators: Mapping[str, Any], observed: Mapping[str, Outcomes], rows: Sequence[Row]
) -> str:
    """Return the HTML report of the evaluators in `observed`: by name, the outcomes of a classification evaluator."""
    by_name = {row["evaluation"]: row for row in rows}
    evaluations = []
    for name, outcomes in observed.items():
        source = evaluators[name].source
        names = source.class_names or ()
        names = [*names, *map(str, range(len(names), trained.num_outputs))]
        options = trained.evaluator_options(name)
        evaluations.append(Evaluation(name, by_name[name], outcomes, names, source.describe, options))
    row, source = by_name[evaluations[0].name], trained.source
    folder = step_folder(source.path) if source.is_checkpoint else source
    facts = {
        "Checkpoint": str(folder),
        "Parameters": f"{row['parameters']:,}",
        "Operations": "unknown" if row["gflops"] is None else f"{row['gflops']} GFLOPs for an image",
        "Image size": str(row["image_size"]),
        "Software": f"dcvit {__version__}, jax {jax.__version__}",
    }
    title = trained.label if row["step"] is None else f"{trained.label}, step {row['step']:,}"
    return render(title, facts, trained.settings(), rows, evaluations)


def append_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]] = ()) -> None:
    """Append rows to a CSV file. A new or empty file first gets its header.

    Raises:
      ConfigError: the file has other columns.
    """
    with path.open("a+", newline="", encoding="utf-8", errors="replace") as file:
        file.seek(0)
        written = file.read()
        header = written.partition("\n")[0].strip()
        if header and header != ",".join(columns):
            raise ConfigError(f"{path} has other columns, {header[:60]}…; expected {','.join(columns)}")
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not header:
            writer.writeheader()
        elif not written.endswith("\n"):
            file.write("\n")
        writer.writerows(rows)
