"""Speed and memory of configs on this device: `python -m dcvit.benchmark --config CONFIG [--config CONFIG …]`.

Times the compiled training step and the forward pass of each config on random batches; data need not exist. Programs
are timed in turn, in random order within each round. Prints medians and quartiles, images or tokens per second, FLOP/s
and model FLOPs utilization, and memory. A program that does not fit into the memory is a row that says so; the exit
status is 1 if none fits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dcvit import cli
from dcvit.parallel import multihost


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        "dcvit benchmark",
        examples=[
            "dcvit benchmark --config vit_digits",
            "dcvit benchmark --config vit_i1k:variant=ViT-S/16 --config vit_i1k:variant=DCViT-S/16 --batch-size 64 128",
            "dcvit benchmark --config lm_pile:preset=DCFormer++-405M --mode forward --batch-size 8 --format csv",
        ],
    )
    add, count = parser.add_argument, cli.at_least(1)
    text = "config file or bare name, with :argument=value,…; may be repeated, and overrides hold for all"
    add("--config", required=True, action="append", help=text)
    add("--mode", choices=("train", "forward"), help="training step or forward pass; by default both")
    add("--batch-size", nargs="+", type=count, default=(), metavar="N", help="batch sizes, instead of the config's")
    add("--rounds", type=count, default=10, help="timed calls of each program (default 10)")
    add("--format", choices=cli.FORMATS, default="table", help="format of the output")
    multihost.add_options(parser)
    args, overrides = parser.parse(argv)

    for spec in args.config:
        cli.check_config(spec, overrides)

    from dcvit.training import kernels, measure
    from dcvit.training.timing import device

    sizes = [[*overrides, f"input.batch_size={size}"] for size in args.batch_size] or [overrides]
    kernels.check_first(args, *({"config": spec, "overrides": each} for spec in args.config for each in sizes))
    cli.start_jax(args)
    modes = [args.mode] if args.mode else measure.MODES
    rows = measure.benchmark(args.config, overrides, modes, args.batch_size, args.rounds)
    shown = rows if args.format in ("csv", "json") else [{name: _short(x) for name, x in row.items()} for row in rows]
    cli.show(shown, args.format, title=device())
    return int(all(row["error"] for row in rows))


def _short(value: object) -> str | None:
    """Return a cell of a table: a number has three significant digits and all before the point; None stays."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"
    return f"{value:,}" if isinstance(value, int) else None if value is None else str(value)


if __name__ == "__main__":
    sys.exit(cli.run(main))
