"""Training curves: `python -m dcvit.plot WORKDIR … --out curves.png`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dcvit import cli
from dcvit.errors import escaped


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit plot",
        description="Draw the training curves of one or more runs.",
        examples=["dcvit plot runs/a runs/b --out curves.png"],
    )
    parser.add_argument("workdirs", nargs="+", type=cli.folder, help="folders of training runs")
    parser.add_argument("--out", type=cli.path, default=Path("curves.png"), help="picture: .png, .pdf or .svg")
    args = parser.parse_without_config(argv)

    from dcvit.runs.curves import plot

    plot(args.workdirs, args.out)
    print(escaped(f"curves: {args.out}"))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
