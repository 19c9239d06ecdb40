"""Evaluation of a checkpoint: rows of results, and the CSV file that collects them."""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from dcvit.checkpoint.checkpointer import load_params
from dcvit.checkpoint.files import Folder
from dcvit.checkpoint.steps import is_step, step_folder
from dcvit.errors import ConfigError
from dcvit.parallel import multihost
from dcvit.parallel.sharding import shardings
from dcvit.training.trained import TrainedModel

COLUMNS = ("evaluation", "model", "step", "parameters")  # the first columns of every row
Row = dict[str, object]


def evaluate(trained: TrainedModel, out: Path | None = None) -> list[Row]:
    """Run every evaluator of a trained model.

    Args:
      trained: the model and its checkpoint.
      out: the CSV file for the rows. Its columns are checked before the evaluation; the rows are not written.

    Returns:
      The rows of all evaluators with the same keys: `COLUMNS` and the columns of the evaluators. `step` is None for a
      checkpoint without a step, and so is a value that an evaluator does not have.

    Raises:
      ConfigError: the config has no evaluator whose data is present, or `out` has other columns.
      CheckpointError: the checkpoint is missing, damaged, or does not fit the model.
      InputError: the data is unusable.
    """
    mesh, strategy, evaluators = trained.evaluators()
    if not evaluators:
        raise ConfigError("config.evals has no evaluator whose data is present")
    multihost.agree({"evaluations": list(evaluators), "examples": [len(e.source) for e in evaluators.values()]})
    columns = tuple(dict.fromkeys([*COLUMNS, *(key for e in evaluators.values() for key in e.columns)]))
    if out and multihost.is_first():
        append_csv(out, columns)
    checkpoint = trained.checkpoint
    params = load_params(checkpoint, functools.partial(shardings, mesh=mesh, strategy=strategy))
    for evaluator in evaluators.values():
        trained.check_params(params, evaluator.example, str(checkpoint))
    shared = {
        "model": trained.label,
        "step": None if checkpoint.is_file() else _step(checkpoint),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }
    rows: list[Row] = []
    for name, evaluator in evaluators.items():
        rows += [shared | row for row in evaluator.rows(name, evaluator.run(params), trained.model)]
    return [{key: row.get(key) for key in columns} for row in rows]


def _step(checkpoint: Folder) -> int | None:
    """Return the training step of a checkpoint folder, which is the folder's name."""
    name = step_folder(checkpoint).name
    return int(name) if is_step(name) else None


def append_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]] = ()) -> None:
    """Append rows to a CSV file. A new or empty file first gets its header.

    Raises:
      ConfigError: the file has other columns.
    """
    header, last = "", b"\n"
    with path.open("a+b") as file:
        if file.tell():
            file.seek(0)
            header = file.readline().decode(errors="replace").strip()
            file.seek(-1, os.SEEK_END)
            last = file.read()
    if header and header != ",".join(columns):
        raise ConfigError(f"{path} has other columns, {header[:60]}…; expected {','.join(columns)}")
    with path.open("a", newline="") as text:
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        if not header:
            writer.writeheader()
        elif last != b"\n":
            text.write("\n")
        writer.writerows(rows)
