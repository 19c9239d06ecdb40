"""Training: `python -m dcvit.train --config CONFIG[:argument=value,…] --workdir DIR [--config.KEY=VALUE …]`.

Exit status: 0 completed; 2 an error, explained by one line on stderr; 75 stopped by SIGTERM, everything is saved; 124
ended by the watchdog; 130 stopped by Ctrl-C, everything is saved unless Ctrl-C was pressed twice; 143 a second SIGTERM;
1 a bug, or another process of the run failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dcvit import cli
from dcvit.errors import escaped
from dcvit.parallel import multihost


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit train",
        description="Train a model from a config.",
        examples=[
            "dcvit train --config vit_digits --workdir runs/digits",
            "dcvit train --config vit_i1k:variant=ViT-S/16 --workdir gs://bucket/run --config.lr=0.0005",
        ],
    )
    parser.add_argument("--config", required=True, help="config file or bare name, with :argument=value,…")
    parser.add_argument(
        "--workdir", required=True, type=cli.folder, help="folder, or gs:// URL, for all files of the run"
    )
    parser.add_argument(
        "--accept", metavar="KEY", action="append", default=[],
        help="resume the run of the workdir although this config key, or `data`, differs; may be repeated",
    )  # fmt: skip
    multihost.add_options(parser)
    args, overrides = parser.parse(argv)

    import jax

    from dcvit import config as configs
    from dcvit.parallel import runtime
    from dcvit.runs.preemption import Preemption
    from dcvit.training.setup import make_setup
    from dcvit.training.trainer import train

    runtime.configure()
    config = configs.load(args.config, overrides)
    multihost.initialize(args)
    runtime.check_devices()
    with cli.continue_without_reader(), Preemption() as preemption:
        devices = f"{jax.device_count()} {jax.default_backend()} device(s)"
        print(escaped(f"dcvit train: {args.config} on {devices}, to {args.workdir}"))
        train(make_setup(config, workdir=args.workdir), args.workdir, args.accept, preemption)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
