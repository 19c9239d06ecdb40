"""Comparison of runs: `python -m dcvit.compare RUN … [--metric val/top1] [--out curves.png]`.

Prints a table of the results and the speed of runs, also while they train. A folder of `dcvit train --seeds` stands
for its runs. `--out` draws the training curves. A run that cannot be read is reported on stderr, and the exit status is
then 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dcvit import cli
from dcvit.errors import ConfigError, escaped


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        "dcvit compare",
        extra="train",
        examples=[
            "dcvit compare runs/*",
            "dcvit compare runs/a runs/b --out curves.png",
            "dcvit compare runs/vit runs/dcvit --metric val/top1 --format markdown",
        ],
    )
    parser.add_argument("runs", nargs="+", type=cli.folder, help="folders of training runs, or of seeds of a run")
    parser.add_argument("--metric", help="metric of an evaluator, such as val/top1: show only it, and sort by its best")
    parser.add_argument("--out", type=cli.path, help="picture of the training curves: .png, .pdf or .svg")
    parser.add_argument("--format", choices=cli.FORMATS, default="table", help="format of the output")
    args, _ = parser.parse(argv)

    from dcvit.training import comparison

    if args.out and args.out.suffix not in comparison.FORMATS:
        raise ConfigError(f"--out {args.out}: expected a name ending in {', '.join(comparison.FORMATS)}")
    runs, errors = comparison.open_runs(args.runs)
    for error in errors:
        cli.print_error(error)
    if not runs:
        return 2
    cli.show(comparison.results(runs, args.metric), args.format)
    if args.out:
        comparison.plot(runs, args.out, args.metric)
        print(escaped(f"curves: {args.out}"), file=sys.stderr)
    return 2 if errors else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
