"""Evaluation: `python -m dcvit.evaluate --workdir DIR [--checkpoint CHECKPOINT] [--format table|csv|json]`.

Runs every evaluator of a config on a checkpoint: by default the workdir's own config and its newest one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from dcvit import build, cli
from dcvit import config as configs
from dcvit.checkpoint import check_tree, load_params, shapes_of
from dcvit.config import ConfigError
from dcvit.sharding import data_mesh, replicated


def evaluate(config: ConfigDict, checkpoint: Path) -> list[dict[str, Any]]:
    """One row of numbers for each evaluator of the config.

    Raises:
      ConfigError, InputError, CheckpointError: see `dcvit.build` and `dcvit.checkpoint`.
    """
    mesh = data_mesh()
    net = build.model(config)
    evaluators = build.evaluators(config, build.predictor(net), mesh)
    if not evaluators:
        raise ConfigError("config.evals names no evaluator")
    params = load_params(checkpoint)
    for name, evaluator in evaluators.items():
        shape = build.example_shape(evaluator.source, evaluator.pp, config, f"config.evals.{name}.pp")
        check_tree(shapes_of(params), shapes_of(build.param_shapes(net, shape)), str(checkpoint))
    params = jax.device_put(params, replicated(mesh))
    return [{"evaluator": name, **evaluator.run(params)} for name, evaluator in evaluators.items()]


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
    return config, args.checkpoint or args.workdir


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
    args, overrides = parser.parse(argv)
    cli.show(evaluate(*run_config(args, overrides)), args.format)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
