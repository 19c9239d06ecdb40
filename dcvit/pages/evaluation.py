"""Evaluation of a checkpoint: rows of results, also of each class, and the report."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dcvit.config.values import defaults
from dcvit.errors import NOT_FINITE, CheckpointError, ConfigError, nearest
from dcvit.evaluators import multilabel as multilabels
from dcvit.hub.open import Opened
from dcvit.models.trees import param_shapes
from dcvit.pages.html import check_path
from dcvit.pages.outcomes import Outcomes
from dcvit.pages.report import Evaluation, observe, render
from dcvit.parallel import multihost
from dcvit.parallel.trees import check_tree, shapes_of
from dcvit.runs.identity import is_free
from dcvit.runs.workdir import Thresholds, numbered, write_thresholds
from dcvit.training.evaluation import open_evaluators
from dcvit.versions import __version__

LOG = logging.getLogger(__name__)
COLUMNS = ("evaluation", "model", "step", "parameters")  # the first columns of every row
MEASURES = ("predictions", "recall", "precision", "f1", "average_precision", "threshold")  # of a class
Row = dict[str, object]


class Results(NamedTuple):
    """Results of an evaluation.

    Fields:
      rows: those of all evaluators with the same keys, `COLUMNS` and the columns of all evaluators; values that do not
        exist, such as the step of a checkpoint without one, are None.
      page: the report as HTML; empty without one and in all processes except the first.
      classes: a row for each class and evaluator, with `MEASURES`; empty unless asked for. The top-1 accuracy of a
        class is its recall.
    """

    rows: list[Row]
    page: str
    classes: list[Row]


def evaluate(
    trained: Opened, report: Path | None = None, thresholds: str | None = None, *, per_class: bool = False
) -> Results:
    """Run every evaluator of a trained model, and return rows of results and a report.

    Args:
      trained: the model and its checkpoint.
      report: the HTML file for a report of the classification and multi-label evaluators. The path is checked before
        the evaluation; the report is not written.
      thresholds: the multi-label evaluator on whose data thresholds are chosen, stored in the workdir, and then used by
        all multi-label evaluators.
      per_class: also return the measures of each class.

    Raises:
      ConfigError: the config has no evaluator whose data is present, the report cannot be written or has no
        evaluator to show, or `thresholds` names no multi-label evaluator.
      CheckpointError: the checkpoint is missing, damaged, or does not fit the model, or a metric is not finite.
      InputError: the data is unusable.
    """
    if report and multihost.is_first():
        check_path(report, "--report")
    mesh, strategy, evaluators = open_evaluators(trained)
    if not evaluators:
        raise ConfigError("config.evals has no evaluator whose data is present")
    multilabel = _multilabel(trained, evaluators, thresholds)
    observed = observe(evaluators) if report or per_class else {}
    multihost.agree({"evaluations": list(evaluators), "examples": [len(e.data.source) for e in evaluators.values()]})
    columns = tuple(dict.fromkeys([*COLUMNS, *(key for e in evaluators.values() for key in e.columns)]))
    first, *others = evaluators.values()
    params = trained.load_params(mesh, strategy, first.data.example)
    for evaluator in others:
        expected = shapes_of(param_shapes(trained.module, evaluator.data.example))
        check_tree(shapes_of(params), expected, str(trained))
    shared = {
        "model": trained.label,
        "step": trained.step,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }
    metrics = {}
    for name, evaluator in evaluators.items():
        metrics[name] = evaluator.run(params)
        if wrong := [key for key, value in metrics[name].items() if not math.isfinite(value)]:
            raise CheckpointError(f"{trained}: {name}/{wrong[0]} is {NOT_FINITE}")
    if thresholds is not None:
        _choose_thresholds(trained, thresholds, multilabel)
        metrics |= {name: evaluator.result() for name, evaluator in multilabel.items()}
    rows: list[Row] = []
    for name, evaluator in evaluators.items():
        found = [shared | row for row in evaluator.rows(name, metrics[name], trained.module)]
        rows += [{key: row.get(key) for key in columns} for row in found]
    page = _report(trained, evaluators, observed, rows) if report and multihost.is_first() else ""
    return Results(rows, page, _class_rows(trained, evaluators, observed) if per_class else [])


def _class_rows(trained: Opened, evaluators: Mapping[str, Any], observed: Mapping[str, Outcomes]) -> list[Row]:
    """Return the rows of classes, in their order: of the multi-label evaluators, and of the outcomes of others.

    Of the latter, classes that are neither a label nor a prediction of an example have no row.
    """
    rows: list[Row] = []
    for name, evaluator in evaluators.items():
        names = numbered(evaluator.data.source.class_names or (), trained.num_outputs)
        if name in observed:
            found = [(each.number, each.examples, each) for each in observed[name].classes()]
        else:
            found = [(number, each.positives, each) for number, each in enumerate(getattr(evaluator, "classes", ()))]
        for number, examples, each in found:
            measured = {key: getattr(each, key, None) for key in MEASURES}
            rows.append({"evaluation": name, "class": names[number], "examples": examples, **measured})
    return rows


def _multilabel(
    trained: Opened, evaluators: Mapping[str, object], thresholds: str | None
) -> dict[str, multilabels.Evaluator]:
    """Return the multi-label evaluators by name.

    Raises:
      ConfigError: `thresholds` is none of them, or the model is not one for which the workdir stores thresholds.
    """
    if thresholds is not None and not trained.is_of_run:
        raise ConfigError(
            "--thresholds are stored for the checkpoints of a run at its image size: give --workdir without "
            "--image-size and without a --checkpoint of another run"
        )
    found = {name: e for name, e in evaluators.items() if isinstance(e, multilabels.Evaluator)}
    if thresholds is not None and thresholds not in found:
        hint = f"; {nearest(thresholds, found)}" if found else " in config.evals"
        raise ConfigError(f"--thresholds {thresholds}: no evaluator of type 'multilabel'{hint}")
    return found


def _choose_thresholds(trained: Opened, name: str, evaluators: Mapping[str, multilabels.Evaluator]) -> None:
    """Choose thresholds on the data of evaluator `name`, set those of all evaluators, and write them to the workdir.

    A class without images keeps its threshold, and a warning names it.
    """
    chosen, chooser = [], evaluators[name]
    best = multilabels.best_thresholds(chooser.logits, chooser.labels)
    for class_name, value, each in zip(trained.classes, best, chooser.classes, strict=True):
        if value is None and multihost.is_first():
            LOG.warning("%s has no images of class %r, which keeps the threshold %g", name, class_name, each.threshold)
        chosen.append(each.threshold if value is None else value)
    found = Thresholds(tuple(chosen), name, trained.step)
    for evaluator in evaluators.values():
        evaluator.set_thresholds(found.values, found.origin)
    if trained.workdir is not None and multihost.is_first():
        write_thresholds(trained.workdir, found, trained.classes)


def _report(
    trained: Opened, evaluators: Mapping[str, Any], observed: Mapping[str, Outcomes], rows: Sequence[Row]
) -> str:
    """Return the HTML report of the multi-label evaluators, and of those in `observed`, with their outcomes by name."""
    by_name = {row["evaluation"]: row for row in rows}
    evaluations = []
    for name, evaluator in evaluators.items():
        several = isinstance(evaluator, multilabels.Evaluator)
        if name not in observed and not several:
            continue
        found = Evaluation(
            name=name,
            row=by_name[name],
            class_names=numbered(evaluator.data.source.class_names or (), trained.num_outputs),
            options=json.loads(trained.config.evals[name].to_json()),
            describe=evaluator.data.source.describe,
            outcomes=observed.get(name),
            labels=evaluator.classes if several else (),
            thresholds_from=evaluator.thresholds_from if several else "",
        )
        evaluations.append(found)
    row = by_name[evaluations[0].name]
    facts = {
        "Checkpoint": str(trained.path if trained.step is not None else trained),
        "Parameters": f"{row['parameters']:,}",
        "Operations": "unknown" if row["gflops"] is None else f"{row['gflops']} GFLOPs for an image",
        "Image size": str(row["image_size"]),
        "Software": f"dcvit {__version__}, jax {jax.__version__}",
    }
    title = trained.label if row["step"] is None else f"{trained.label}, step {row['step']:,}"
    return render(title, facts, _settings(trained), rows, evaluations)


def _settings(trained: Opened) -> dict[str, Any]:
    """Return the entries of a config that determine the parameters, except those with the default value."""
    config, usual = json.loads(trained.config.to_json()), json.loads(json.dumps(defaults()))
    return {key: value for key, value in config.items() if not is_free(key) and value != usual.get(key)}
