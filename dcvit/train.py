"""Training: `python -m dcvit.train --config CONFIG[:argument=value,…] --workdir DIR [--config.KEY=VALUE …]`.

Exit status: 0 completed; 2 an error, explained by one line on stderr; 75 stopped by SIGTERM or SIGHUP, everything is
saved; 130 stopped by Ctrl-C, everything is saved unless Ctrl-C was pressed twice; 143 or 129 a second SIGTERM or
SIGHUP; 1 a bug, the watchdog, or another process of the run failed; 134 JAX lost another process of the run.

`--seeds 0,1,2` trains one run per seed in the folders seed0, seed1, seed2 of the workdir, one after the other. A run
that fails does not stop the others; the exit status is then 2. The same command skips complete runs and resumes others.
At the end it prints mean and 95 % confidence interval of each final metric and writes them to seeds.csv and seeds.md.

In Python, `from dcvit.training import train` trains as a call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dcvit import cli, process
from dcvit.errors import ConfigError, escaped
from dcvit.parallel import multihost
from dcvit.runs.seeds import check_no_seeds, final_metrics, parse_seeds, rounded, summarize, workdir_of, write

if TYPE_CHECKING:
    from dcvit.runs.files import Folder
    from dcvit.runs.stop import StopSignals


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit train",
        extra="train",
        description="Train a model from a config.",
        examples=[
            "dcvit train --config vit_digits --workdir runs/digits",
            "dcvit train --config vit_digits --workdir runs/three --seeds 0,1,2",
            "dcvit train --config vit_i1k:variant=ViT-S/16 --workdir gs://bucket/run --config.lr=0.0005",
        ],
    )
    parser.add_argument("--config", required=True, help="config file or bare name, with :argument=value,…")
    parser.add_argument(
        "--workdir", required=True, type=cli.folder, help="folder, or gs:// or s3:// URL, for all files of the run"
    )
    parser.add_argument(
        "--accept", metavar="KEY", action="append", default=[],
        help="resume the run of the workdir although this config key, or `data`, differs; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=parse_seeds, metavar="SEEDS",
        help="seeds of several runs, such as 0,1,2, or their number; each has a folder in the workdir",
    )  # fmt: skip
    multihost.add_options(parser)
    args, overrides = parser.parse(argv)

    from dcvit.config import load as configs

    workdirs = [workdir_of(args.workdir, seed) for seed in args.seeds] if args.seeds else [args.workdir]
    config = configs.load(args.config, overrides, workdirs)  # before JAX is imported, so that an error is shown at once

    import jax

    from dcvit.runs.progress import stage
    from dcvit.runs.stop import StopSignals
    from dcvit.training import kernels
    from dcvit.training.setup import make_setup
    from dcvit.training.trainer import train

    kernels.check_first(args, {"config": args.config, "overrides": overrides}, policy=config.kernels)
    cli.start_jax(args, preemptible=True)
    with process.ignore_broken_pipe(), StopSignals() as signals:
        devices = f"{jax.device_count()} {jax.default_backend()} device(s)"
        print(escaped(f"dcvit train: {args.config} on {devices}, to {args.workdir}"))
        if args.seeds:
            return _train_seeds(args, overrides, signals, workdirs)
        check_no_seeds(args.workdir)
        with stage("preparing data and model", print, announce=False):
            setup = make_setup(config, workdir=args.workdir)
        train(setup, args.workdir, args.accept, signals)
    return 0


def _train_seeds(
    args: argparse.Namespace, overrides: Sequence[str], signals: StopSignals, workdirs: Sequence[Folder]
) -> int:
    """Train one run per seed, each in its workdir, show and write their final metrics, and return the exit status.

    Raises:
      ConfigError, InputError: the config or the data is invalid, which concerns every seed.
    """
    from dcvit.config import load as configs
    from dcvit.training.setup import make_setup
    from dcvit.training.trainer import train

    if not multihost.is_single_process():
        raise ConfigError("--seeds needs a run of one process; start one run of several processes per seed")
    if any(override.partition("=")[0] == "seed" for override in overrides):
        raise ConfigError("give either --seeds or --config.seed")
    if (args.workdir / "config.json").is_file():
        raise ConfigError(f"{args.workdir} holds a run; --seeds needs a folder for the workdirs of its runs")
    results, failed = {}, []
    loaded = [configs.load(args.config, [*overrides, f"seed={seed}"], workdirs) for seed in args.seeds]
    for seed, workdir, config in zip(args.seeds, workdirs, loaded, strict=True):
        if signals.received:  # in the last step of the seed before
            signals.end(f"seed {seed} has not started")
        print(escaped(f"seed {seed}, to {workdir}"))
        setup = None
        try:
            setup = make_setup(config, workdir=workdir)
            train(setup, workdir, args.accept, signals)
            results[seed] = final_metrics(workdir)
        except cli.EXPECTED as e:
            if setup is None and seed == args.seeds[0]:  # concerns every seed
                raise
            failed.append(seed)
            cli.print_error(f"seed {seed}: {e}")
    if rows := summarize(results):
        write(args.workdir, rows)
        shown = [{key: rounded(value) for key, value in row.items()} for row in rows]
        cli.show(shown, "table", title=f"{len(results)} of {len(args.seeds)} seeds")
        print(escaped(f"table: {args.workdir / 'seeds.md'}, {args.workdir / 'seeds.csv'}"))
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
