"""Evaluation: `python -m dcvit.evaluate --workdir DIR [--checkpoint CHECKPOINT] [--format FORMAT] [--out FILE]`.

Runs every evaluator of a config on a checkpoint: by default the workdir's own config and its newest one. Each row
says all that a table of results needs, and `--out` collects the rows of many models in one CSV file.
"""

from __future__ import annotations

import csv
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dcvit import cli
from dcvit.checkpoint.checkpointer import load_params
from dcvit.checkpoint.files import Folder
from dcvit.checkpoint.steps import step_folder
from dcvit.errors import ConfigError
from dcvit.parallel import multihost
from dcvit.parallel.sharding import shardings
from dcvit.training.trained import TrainedModel, open_trained

COLUMNS = ("evaluation", "model", "step", "parameters")  # of every row, before its evaluator's own


def evaluate(trained: TrainedModel, out: Path | None = None) -> list[dict[str, Any]]:
    """The rows of each evaluator of the config, all with the same keys: COLUMNS and those of the evaluators.

    `step` is None for a checkpoint that knows none, and so is what an evaluator does not say. `out` is the CSV file
    that the rows are for: what is wrong with it is said before the work.

    Raises:
      ConfigError, InputError, CheckpointError: see `dcvit.training.setup`, `dcvit.checkpoint` and `append_csv`.
    """
    mesh, strategy, evaluators = trained.evaluators()
    checkpoint = trained.checkpoint
    if not evaluators:
        raise ConfigError("config.evals names no evaluator whose data is there")
    multihost.agree({"evaluations": list(evaluators), "examples": [len(e.source) for e in evaluators.values()]})
    columns = tuple(dict.fromkeys([*COLUMNS, *(key for e in evaluators.values() for key in e.columns)]))
    if out and multihost.is_first():
        append_csv(out, columns)
    params = load_params(checkpoint, functools.partial(shardings, mesh=mesh, strategy=strategy))
    for evaluator in evaluators.values():
        trained.check_params(params, evaluator.example, str(checkpoint))
    about = {
        "model": trained.label,
        "step": None if checkpoint.is_file() else _step(checkpoint),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }
    rows: list[dict[str, Any]] = []
    for name, evaluator in evaluators.items():
        rows += [about | row for row in evaluator.rows(name, evaluator.run(params), trained.model)]
    return [{key: row.get(key) for key in columns} for row in rows]


def _step(checkpoint: Folder) -> int | None:
    """The training step of a checkpoint's folder, which is its name."""
    name = step_folder(checkpoint).name
    return int(name) if name.isdigit() else None


def append_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]] = ()) -> None:
    """Appends rows of `columns` to a CSV file, which gets its header first where it is new or empty.

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


def add_options(parser: cli.Parser) -> None:
    """The options that say which model."""
    parser.add_argument("--workdir", type=cli.folder, help="folder of a training run")
    parser.add_argument("--config", help="config file or bare name, instead of the workdir's own")
    parser.add_argument(
        "--checkpoint", type=cli.folder, help="checkpoint folder, workdir or .npz, instead of the newest"
    )
    parser.add_argument("--format", choices=cli.FORMATS, default="table")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = cli.Parser(prog="dcvit evaluate", description="Run a config's evaluators on a checkpoint.")
    add_options(parser)
    parser.add_argument("--out", type=cli.path, help="CSV file to append the rows to")
    multihost.add_options(parser)
    args, overrides = parser.parse(argv)
    multihost.initialize(args)
    rows = evaluate(open_trained(args.workdir, args.config, args.checkpoint, overrides), args.out)
    cli.show(rows, args.format)
    if args.out and multihost.is_first():
        append_csv(args.out, list(rows[0]), rows)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
