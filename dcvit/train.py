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

import functools
import sys
from collections.abc import Sequence

from dcvit import cli
from dcvit.errors import ConfigError
from dcvit.parallel import multihost
from dcvit.process import say
from dcvit.runs.seeds import check_no_seeds, parse_seeds, summarize, workdir_of, write


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        "dcvit train",
        extra="train",
        examples=[
            "dcvit train --config vit_digits --workdir runs/digits",
            "dcvit train --config vit_digits --workdir runs/three --seeds 0,1,2",
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
    multihost.add_options(parser)
    args, overrides = parser.parse(argv)

    from dcvit.config import load as configs

    if args.seeds and any(override.partition("=")[0] == "seed" for override in overrides):
        raise ConfigError("give either --seeds or --config.seed")
    words = [[*overrides, f"seed={seed}"] for seed in args.seeds] or [overrides]
    workdirs = [workdir_of(args.workdir, seed) for seed in args.seeds] or [args.workdir]
    loaded = [configs.load(args.config, given, workdirs) for given in words]  # before JAX is imported: it takes long

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
        if not args.seeds:
            check_no_seeds(args.workdir)
            with stage("preparing data and model", say, announce=False):
                setup = makers[0]()
            train(setup, args.workdir, args.accept, signals)
            return 0
        from dcvit.training.seeds import train_seeds

        by_seed = dict(zip(args.seeds, makers, strict=True))
        results = train_seeds(by_seed, args.workdir, args.accept, signals)
        if rows := summarize(results):
            write(args.workdir, rows)
            cli.show(rows, "table", title=f"{len(results)} of {len(args.seeds)} seeds")
            say(f"table: {args.workdir / 'seeds.md'}, {args.workdir / 'seeds.csv'}")
        return 0 if len(results) == len(args.seeds) else 2


if __name__ == "__main__":
    sys.exit(cli.run(main))
