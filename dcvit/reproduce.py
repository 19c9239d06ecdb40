"""Tables and figures of the paper: `python -m dcvit.reproduce --list`, or `TABLE [--scale desk|full] --out DIR`.

At scale "desk" everything runs here, on embedded data; at scale "full" the runs of the paper are printed as commands
with slices and estimated hours. TABLE.md, TABLE.csv and, at scale "desk", mostly TABLE.png have the paper's numbers
beside ours. The same command resumes training runs that were interrupted, and skips complete ones.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from dcvit import cli
from dcvit.errors import ConfigError, escaped
from dcvit.runs.seeds import parse_seeds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit reproduce",
        extra="train",
        description="Compute a table or figure of the paper, or list them.",
        examples=[
            "dcvit reproduce --list",
            "dcvit reproduce table2 --out runs/reproduction",
            "dcvit reproduce table9 --seeds 3 --out runs/reproduction",
            "dcvit reproduce table9 --scale full --out runs/reproduction",
        ],
    )
    parser.add_argument("name", nargs="?", metavar="TABLE", help="name of a table or figure; see --list")
    parser.add_argument("--list", action="store_true", help="list all tables and figures")
    parser.add_argument("--scale", choices=("desk", "full"), default="desk", help="here, or the runs of the paper")
    parser.add_argument("--out", type=cli.path, default=Path("runs/reproduction"), help="folder of tables and runs")
    parser.add_argument("--seeds", type=parse_seeds, default=[0, 1, 2], help="seeds, or their number (default 3)")
    parser.add_argument("--steps", type=int, help="steps of a training run, of the largest if they differ")
    args = parser.parse_without_config(argv)

    from dcvit.parallel import runtime
    from dcvit.reproduction import catalog, tables
    from dcvit.train import main as train

    if args.list:
        print("\n".join(catalog.listing()))
        return 0
    if args.name is None:
        raise ConfigError("give the name of a table or figure, or --list")
    if args.steps is not None and args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: expected 1 or more")
    runtime.configure()
    trainer = functools.partial(cli.run, train)
    status, table = catalog.reproduce(args.name, args.scale, args.out, trainer, args.seeds, args.steps)
    if table is not None:
        for line in tables.markdown(table).splitlines():
            print(escaped(line))
        print(escaped(f"files: {args.out / table.name}.*"))
    return status


if __name__ == "__main__":
    sys.exit(cli.run(main))
