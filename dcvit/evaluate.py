"""Evaluation: `python -m dcvit.evaluate --workdir DIR [--checkpoint CHECKPOINT] [--report FILE]
[--thresholds NAME]`.

Runs every evaluator of a config on a checkpoint; by default the workdir's own config and its latest checkpoint.
`--report` writes an HTML page about a classifier: accuracy, calibration, confusions, classes, and the most confident
mistakes; or, with several labels, the measures of each class. `--thresholds` chooses the probability from which each
class of a multi-label classifier is predicted, so that its F1 on the data of one evaluator is the highest, and stores
it in the workdir, where `dcvit predict` and `dcvit evaluate` read it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dcvit import cli
from dcvit.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    from dcvit.parallel import multihost

    parser = cli.Parser(
        "dcvit evaluate",
        examples=[
            "dcvit evaluate --workdir runs/digits",
            "dcvit evaluate --workdir runs/digits --checkpoint runs/digits/checkpoints/500 --format csv",
            "dcvit evaluate --workdir runs/digits --report report.html",
            "dcvit evaluate --workdir runs/i1k --image-size 384",
            "dcvit evaluate --workdir runs/labels --thresholds val",
        ],
    )
    cli.add_model_options(parser, weights=False, image_size=True)
    parser.add_argument("--report", type=cli.path, help="HTML file for a report of a classifier, replaced if it exists")
    text = "multi-label evaluator on whose data thresholds are chosen, which the workdir then stores"
    parser.add_argument("--thresholds", metavar="NAME", help=text)
    multihost.add_options(parser)
    args, overrides = parser.parse(argv)
    if args.thresholds is not None and args.workdir is None:
        raise ConfigError("--thresholds are stored in the folder of the run: give --workdir")
    config = cli.check_model(args, overrides)

    from dcvit.pages.evaluation import evaluate
    from dcvit.runs.files import replace
    from dcvit.training import kernels
    from input_pipeline.huggingface import cached

    names = {name: value and str(value) for name, value in (("place", args.workdir), ("checkpoint", args.checkpoint))}
    kernels.check_first(args, {**names, "config": args.config, "overrides": overrides, "image_size": args.image_size})
    cli.start_jax(args)
    trained = cli.open_model(args, config, overrides)
    multihost.agree({"model": str(cached(trained.place))})  # of several commits, if one came meanwhile
    rows, page = evaluate(trained, args.report, args.thresholds)
    cli.show(rows, args.format)
    if page:
        replace(args.report, page)
        print(f"report: {args.report}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
