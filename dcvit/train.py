"""Training: `python -m dcvit.train --config CONFIG[:argument=value,…] --workdir DIR [--config.KEY=VALUE …]`.

Exit status: 0 completed; 2 an error, explained by one line on stderr; 75 stopped by SIGTERM or SIGHUP, everything is
saved; 130 stopped by Ctrl-C, everything is saved unless Ctrl-C was pressed twice; 143 or 129 a second SIGTERM or
SIGHUP; 1 a bug, the watchdog, or another process of the run failed; 134 JAX lost another process of the run.

`--seeds 0,1,2` trains one run per seed in the folders seed0, seed1, seed2 of the workdir, one after the other. A run
that fails does not stop the others; the exit status is then 2. The same command skips complete runs and resumes others.
At the end it prints mean and 95 % confidence interval of each final metric and writes them to seeds.csv and seeds.md.
`--folds 5` cross-validates in the same way: the run in fold1 holds out the first fifth of the training images, which
the evaluator `val` reads, and so on; see `dcvit.config.values.with_fold`.

In Python, `from dcvit.training import train` trains as a call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dcvit import cli
from dcvit.errors import ConfigError
from dcvit.parallel import multihost
from dcvit.process import say
from dcvit.runs.files import Folder
from dcvit.runs.seeds import check_no_runs, parse_seeds, summarize, workdir_of, write

if TYPE_CHECKING:
    from argparse import Namespace

    from ml_collections import ConfigDict

    from dcvit.runs.stop import StopSignals
    from dcvit.training.setup import Setup


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        "dcvit train",
        extra="train",
        examples=[
            "dcvit train --config vit_digits --workdir runs/digits",
            "dcvit train --config vit_digits --workdir runs/three --seeds 0,1,2",
            "dcvit train --config vit_folder:data_dir=pets --workdir runs/five --folds 5",
            "dcvit train --config vit_i1k:variant=ViT-S/16 --workdir gs://bucket/run --config.lr=0.0005",
        ],
    )
    add = parser.add_argument
    add("--config", required=True, help="config file or bare name, with :argument=value,…")
    add("--workdir", required=True, type=cli.folder, help="folder, or gs:// or s3:// URL, for all files of the run")
    text = "resume the run of the workdir although this config key, or `data`, differs; may be repeated"
    add("--accept", metavar="KEY", action="append", default=[], help=text)
    text = "seeds of several runs, such as 0,1,2, or their number; each has a folder in the workdir"
    add("--seeds", type=parse_seeds, metavar="SEEDS", default=[], help=text)
    text = "train this number of runs, each without another fold of the images, and evaluate it on that fold"
    add("--folds", type=cli.at_least(2), metavar="K", help=text)
    multihost.add_options(parser)
    args, overrides = parser.parse(argv)
    kind, numbers = ("fold", list(range(1, args.folds + 1))) if args.folds else ("seed", args.seeds)
    workdirs = [workdir_of(args.workdir, number, kind) for number in numbers] or [args.workdir]
    loaded = _configs(args, overrides, workdirs)  # before JAX is imported: it takes long

    import jax

    from dcvit.runs.progress import stage
    from dcvit.runs.stop import StopSignals
    from dcvit.training import kernels
    from dcvit.training.loop import train
    from dcvit.training.setup import make_setup

    kernels.check_first(args, {"config": args.config, "overrides": overrides}, policy=loaded[0].kernels)
    cli.start_jax(args, preemptible=True)
    with StopSignals() as signals:
        devices = f"{jax.device_count()} {jax.default_backend()} device(s)"
        say(f"dcvit train: {args.config} on {devices}, to {args.workdir}")
        makers = [functools.partial(make_setup, c, workdir=w) for c, w in zip(loaded, workdirs, strict=True)]
        if numbers:
            return _train_runs(kind, dict(zip(numbers, makers, strict=True)), args.workdir, args.accept, signals)
        check_no_runs(args.workdir)
        with stage("preparing data and model", say, announce=False):
            setup = makers[0]()
        train(setup, args.workdir, args.accept, signals)
        return 0


def _configs(args: Namespace, overrides: Sequence[str], workdirs: Sequence[Folder]) -> list[ConfigDict]:
    """Return the config of each run: of the seeds, of the folds, or of one run."""
    from dcvit.config import load as configs
    from dcvit.config.values import with_fold

    if args.seeds and any(override.partition("=")[0] == "seed" for override in overrides):
        raise ConfigError("give either --seeds or --config.seed")
    if args.seeds and args.folds:
        raise ConfigError("give either --seeds or --folds, of which each has its own --workdir")
    words = [[*overrides, f"seed={seed}"] for seed in args.seeds] or [[*overrides]]
    loaded = [configs.load(args.config, given, workdirs) for given in words]
    if not args.folds:
        return loaded
    if loaded[0].input.data.get("val_fraction"):
        say("config.input.data.val_fraction is not used: the folds cover all images")
    return [with_fold(loaded[0], f"fold {number} of {args.folds}") for number in range(1, args.folds + 1)]


def _train_runs(
    kind: str,
    makers: Mapping[int, Callable[[], Setup]],
    folder: Folder,
    accept: Sequence[str],
    signals: StopSignals,
) -> int:
    """Train the runs of `dcvit.training.seeds.train_runs`, print and write their table, and return the exit status."""
    from dcvit.training.seeds import train_runs

    results = train_runs(kind, makers, folder, accept, signals)
    if rows := summarize(results):
        write(folder, rows, f"{kind}s")
        held = "; the number of held-out examples is in brackets" if kind == "fold" else ""
        cli.show(rows, "table", title=f"{len(results)} of {len(makers)} {kind}s{held}")
        say(f"table: {folder / f'{kind}s.md'}, {folder / f'{kind}s.csv'}")
    return 0 if len(results) == len(makers) else 2


if __name__ == "__main__":
    sys.exit(cli.run(main))
