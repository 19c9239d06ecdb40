"""Evaluation: `python -m dcvit.evaluate --workdir DIR [--checkpoint CHECKPOINT] [--format FORMAT] [--out FILE]`.

Runs every evaluator of a config on a checkpoint: by default the workdir's own config and its newest one. Each row
says all that a table of results needs, and `--out` collects the rows of many models in one CSV file.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from dcvit import build, cli
from dcvit import config as configs
from dcvit.checkpoint import check_tree, load_params, shapes_of, step_folder
from dcvit.config import ConfigError
from dcvit.flops import vit_flops
from dcvit.models.vit import ViT
from dcvit.sharding import data_mesh, replicated

COLUMNS = (
    "evaluation", "model", "step", "parameters", "gflops", "image_size",
    "top1", "top5", "loss", "n", "images_per_second",
)  # fmt: skip


def evaluate(config: ConfigDict, checkpoint: Path) -> list[dict[str, Any]]:
    """A row of COLUMNS for each evaluation set of the config, and for each number of shots of few-shot ones.

    `gflops` are those of one image's forward pass (see `dcvit.flops`), `step` is None for a file that knows none.

    Raises:
      ConfigError, InputError, CheckpointError: see `dcvit.build` and `dcvit.checkpoint`.
    """
    mesh = data_mesh()
    net = build.model(config)
    evaluators = build.evaluators(config, build.predictor(net), mesh)
    if not evaluators:
        raise ConfigError("config.evals names no evaluator whose data is there")
    params = load_params(checkpoint)
    for evaluator in evaluators.values():
        check_tree(shapes_of(params), shapes_of(build.param_shapes(net, evaluator.image_shape)), str(checkpoint))
    params = jax.device_put(params, replicated(mesh))
    about = {
        "model": config.model.get("variant") or config.model_name,
        "step": None if checkpoint.is_file() else _step(checkpoint),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }
    rows: list[dict[str, Any]] = []
    for name, evaluator in evaluators.items():
        numbers = evaluator.run(params)
        shape = evaluator.image_shape
        flops = vit_flops(net, shape) if isinstance(net, ViT) else None
        size = {"gflops": flops and round(flops / 1e9, 3), "image_size": f"{shape[0]}x{shape[1]}"}
        speed = {"images_per_second": round(evaluator.images_per_second, 1)}
        if "top1" in numbers:
            found = {name: numbers}
        else:  # few-shot: an accuracy for each number of shots
            found = {f"{name}/{k}": {"top1": v, "n": numbers["n"]} for k, v in numbers.items() if k != "n"}
        for each, values in found.items():
            rows.append({k: ({"evaluation": each} | about | size | values | speed).get(k) for k in COLUMNS})
    return rows


def _step(checkpoint: Path) -> int | None:
    """The training step of a checkpoint's folder, which is its name."""
    name = step_folder(checkpoint).name
    return int(name) if name.isdigit() else None


def append_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends rows of COLUMNS to a CSV file, which gets its header first where it is new or empty.

    Raises:
      ConfigError: the file has other columns.
    """
    with path.open("a+", newline="") as file:
        file.seek(0)
        content = file.read()
        header = content.partition("\n")[0].strip()
        if header and header != ",".join(COLUMNS):
            raise ConfigError(f"{path} has other columns, {header[:60]}…; expected {','.join(COLUMNS)}")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not header:
            writer.writeheader()
        elif not content.endswith("\n"):
            file.write("\n")
        writer.writerows(rows)


def run_config(args: Any, overrides: Sequence[str]) -> tuple[ConfigDict, Path]:
    """The config and the checkpoint that `--workdir`, `--config` and `--checkpoint` name together."""
    if args.workdir is None and (args.config is None or args.checkpoint is None):
        raise ConfigError("give --workdir DIR, or both --config CONFIG and --checkpoint CHECKPOINT")
    if args.workdir is not None and not args.workdir.is_dir():
        raise ConfigError(f"no workdir {args.workdir}")
    if args.config:
        config = configs.load(args.config, overrides)
    elif overrides:
        raise ConfigError("--config.KEY=VALUE needs --config: a workdir's own config is used as it is")
    else:
        config = configs.read_json(args.workdir / "config.json")
    classes = config.num_classes
    if classes is None and args.workdir:
        classes = configs.read_json(args.workdir / "config.json").num_classes
    if classes is None:
        raise ConfigError("config.num_classes=None: give --workdir of the training run, or --config.num_classes=NUMBER")
    return configs.with_classes(config, classes), args.checkpoint or args.workdir


def add_options(parser: cli.Parser) -> None:
    """The options that say which model."""
    parser.add_argument("--workdir", type=cli.path, help="folder of a training run")
    parser.add_argument("--config", help="config file or bare name, instead of the workdir's own")
    parser.add_argument("--checkpoint", type=cli.path, help="checkpoint folder, workdir or .npz, instead of the newest")
    parser.add_argument("--format", choices=cli.FORMATS, default="table")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = cli.Parser(prog="dcvit evaluate", description="Run a config's evaluators on a checkpoint.")
    add_options(parser)
    parser.add_argument("--out", type=cli.path, help="CSV file to append the rows to")
    args, overrides = parser.parse(argv)
    if args.out:
        append_csv(args.out, [])  # what is wrong with the file is said now, not after the work
    rows = evaluate(*run_config(args, overrides))
    cli.show(rows, args.format)
    if args.out:
        append_csv(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
