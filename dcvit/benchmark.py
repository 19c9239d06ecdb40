"""Speed and memory of configs on this device: `python -m dcvit.benchmark --config CONFIG [--config CONFIG …]`.

Times the compiled training step and the forward pass of each config on random batches; data need not exist. Programs
are timed in turn, in random order within each round. Prints medians and quartiles, images or tokens per second, FLOP/s
and model FLOPs utilization, and memory. A program that does not fit into the memory is a row that says so; the exit
status is 1 if none fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence

from dcvit import cli
from dcvit.parallel import multihost

SUMMARY = ("config", "mode", "batch", "attention", "ms", "per second", "TFLOP/s", "MFU %", "memory MB", "ratio")
Row = Mapping[str, object]  # a `dcvit.training.benchmark.Row`


def summary(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the cells of a short table; after the median of the milliseconds, its quartiles are in parentheses."""
    found = []
    for row in rows:
        cells = [_short(row[name]) for name in SUMMARY[:4]]
        if row["error"]:
            cells += [_short(row["error"]), *["–"] * 5]
        else:
            cells.append(f"{_short(row['ms'])} ({_short(row['ms_q1'])}–{_short(row['ms_q3'])})")
            cells.append(f"{_short(row['rate'])} {row['unit']}")
            cells += [_short(row[name]) for name in ("tflops", "mfu", "memory_mb", "ratio")]
        found.append(dict(zip(SUMMARY, cells, strict=True)))
    return found


def _short(value: object) -> str:
    """Return a cell: a number with three significant digits and all before the point, text, or a dash for None."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _positive(text: str) -> int:
    """Return the whole number from 1 that the text of an option gives."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit benchmark",
        description="Measure speed, FLOP/s and memory of configs on this device, without data.",
        examples=[
            "dcvit benchmark --config vit_digits",
            "dcvit benchmark --config vit_i1k:variant=ViT-S/16 --config vit_i1k:variant=DCViT-S/16 --batch-size 64 128",
            "dcvit benchmark --config lm_pile:preset=DCFormer++-405M --mode forward --batch-size 8 --format csv",
        ],
    )
    parser.add_argument(
        "--config", required=True, action="append", help="config file or bare name, with :argument=value,…; may be "
        "repeated, and overrides hold for all",
    )  # fmt: skip
    parser.add_argument("--mode", choices=("train", "forward"), help="training step or forward pass; by default both")
    parser.add_argument(
        "--batch-size", nargs="+", type=_positive, default=(), metavar="N", help="batch sizes, instead of the config's"
    )
    parser.add_argument("--rounds", type=_positive, default=10, help="timed calls of each program (default 10)")
    parser.add_argument("--format", choices=cli.FORMATS, default="table", help="format of the output")
    multihost.add_options(parser)
    args, overrides = parser.parse(argv)

    from dcvit.config import load as configs

    for spec in args.config:
        configs.check(spec, overrides)

    from dcvit.training import benchmark, kernels
    from dcvit.training.timing import device

    sizes = [[*overrides, f"input.batch_size={size}"] for size in args.batch_size] or [overrides]
    kernels.check_first(args, *({"config": spec, "overrides": each} for spec in args.config for each in sizes))
    cli.start_jax(args)
    options = benchmark.Options((args.mode,) if args.mode else benchmark.MODES, args.batch_size, args.rounds)
    found = benchmark.benchmark(args.config, overrides, options)
    rows = [dataclasses.asdict(row) for row in found]
    shown: Sequence[Row] = rows
    if args.format == "markdown":
        shown = summary(rows)
    elif args.format == "table":
        shown = [{name: None if value is None else _short(value) for name, value in row.items()} for row in rows]
    cli.show(shown, args.format, title=device())
    return int(all(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(cli.run(main))
