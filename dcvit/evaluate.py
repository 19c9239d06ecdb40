"""Evaluation: `python -m dcvit.evaluate --workdir DIR [--checkpoint CHECKPOINT] [--report FILE]
[--per-class [FILE]] [--thresholds NAME]`.

Runs every evaluator of a config on a checkpoint; by default the workdir's own config and its latest checkpoint.
`--report` writes an HTML page about a classifier: accuracy, calibration, confusions, classes, and the most confident
mistakes; or, with several labels, the measures of each class. `--per-class` prints recall, which is the top-1 accuracy
of a class, precision, F1 and, with several labels, average precision of each class, or writes them to a .csv or .json
file. `--thresholds` chooses the probability from which each class of a multi-label classifier is predicted, so that its
F1 on the data of one evaluator is the highest, and stores it in the workdir, where `dcvit predict` and `dcvit evaluate`
read it.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

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
            "dcvit evaluate --workdir runs/digits --per-class classes.csv",
            "dcvit evaluate --workdir runs/i1k --image-size 384",
            "dcvit evaluate --workdir runs/labels --thresholds val",
        ],
    )
    cli.add_model_options(parser, weights=False, image_size=True)
    parser.add_argument("--report", type=cli.path, help="HTML file for a report of a classifier, replaced if it exists")
    text = "also print the results of each class of a classifier, or write them to FILE.csv or FILE.json"
    parser.add_argument("--per-class", nargs="?", const=True, type=cli.path, metavar="FILE", help=text)
    text = "multi-label evaluator on whose data thresholds are chosen, which the workdir then stores"
    parser.add_argument("--thresholds", metavar="NAME", help=text)
    multihost.add_options(parser)
    args, overrides = parser.parse(argv)
    if args.thresholds is not None and args.workdir is None:
        raise ConfigError("--thresholds are stored in the folder of the run: give --workdir")
    if args.per_class is True and args.format in ("csv", "json"):
        raise ConfigError(f"--format {args.format} prints one table: give --per-class FILE.{args.format}")
    config = cli.check_model(args, overrides)

    from dcvit.pages.evaluation import evaluate
    from dcvit.pages.html import check_path
    from dcvit.runs.files import replace
    from dcvit.training import kernels
    from input_pipeline.huggingface import cached

    names = {name: value and str(value) for name, value in (("place", args.workdir), ("checkpoint", args.checkpoint))}
    kernels.check_first(args, {**names, "config": args.config, "overrides": overrides, "image_size": args.image_size})
    cli.start_jax(args)
    trained = cli.open_model(args, config, overrides)
    multihost.agree({"model": str(cached(trained.place))})  # of several commits, if one came meanwhile
    table = args.per_class if isinstance(args.per_class, Path) else None
    if table and multihost.is_first():
        check_path(table, "--per-class", (".csv", ".json"))
    found = evaluate(trained, args.report, args.thresholds, per_class=bool(args.per_class))
    cli.show(found.rows, args.format)
    if args.per_class is True:
        print()
        cli.show(found.classes, args.format)
    if table and multihost.is_first():
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            cli.show(found.classes, table.suffix[1:].lower())
        replace(table, printed.getvalue())
        print(f"classes: {table}", file=sys.stderr)
    if found.page:
        replace(args.report, found.page)
        print(f"report: {args.report}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
