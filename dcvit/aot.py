"""Compilation for a TPU slice on any Linux host: `python -m dcvit.aot --config CONFIG --topology v5p:4x4x8`.

Compiles the training step of a config with the TPU compiler of libtpu, and prints whether the step fits in the memory
of the chips and which data they exchange. `--all` compiles the models of all configs for the slices that the configs
recommend. Nothing is executed, and no data is needed. The exit status is 1 if a step does not fit.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dcvit import cli
from dcvit.errors import ConfigError

Row = Mapping[str, Any]  # a `dcvit.training.aot.CompiledStep`
SIZES = ("params", "optimizer", "temporaries", "total", "memory")


def lines(row: Row) -> list[dict[str, object]]:
    """Return the rows of a table about a compiled step, one for each number."""
    shown = {
        "slice": f"{row['topology']}, {row['chips']} chips, mesh {row['mesh']}",
        "parameters": f"{row['parameters']:,}",
        "FLOPs of a step, by formula": row["tflops"] and f"{row['tflops']:,.1f} TFLOP",
    }
    shown |= {f"{key} per chip": f"{row[key]:.2f} GiB" for key in SIZES if key in row}
    for kind, total in row.get("collectives", {}).items():
        shown[kind] = f"{total['count']:,} times, {total['GiB']:.2f} GiB per chip"
    shown |= {"compiled in": f"{row['compile_seconds']:.1f} s", "verdict": row["verdict"]}
    return [{"": key, row["config"]: value} for key, value in shown.items()]


def markdown(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table with a row for each compiled step."""
    table = [
        "| model | slice | parameters | state | temporaries | total of memory | |",
        "|" + "---|" * 7,
    ]
    for row in rows:
        model = re.sub(r"^.*?=|,.*", "", row["config"])
        sizes = {"state": row["params"] + row["optimizer"], **row}
        cells = [model, row["topology"], f"{row['parameters']:,}"]
        for key in ("state", "temporaries", "total"):  # a program that does not fit has no size per part
            cells.append(f"{sizes[key]:.2f}" if key in sizes else "–")
        table.append(f"| {' | '.join(cells)} of {row['memory']:.1f} | {row['verdict']} |")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit aot",
        extra="train",
        description="Compile the training step of a config for a TPU slice.",
        examples=["dcvit aot --config vit_i1k --topology v5e:4x4"],
    )
    parser.add_argument("--config", help="config file or bare name, with :argument=value,…")
    parser.add_argument("--topology", help="a TPU slice such as v5e:4x4, v5p:4x4x8, v5e-16 or tpu7x-8")
    parser.add_argument("--all", action="store_true", help="compile everything that the package's configs recommend")
    parser.add_argument("--out", type=cli.path, help="JSON file for the results")
    parser.add_argument("--format", choices=("table", "json", "markdown"), default="table", help="format of the output")
    args, overrides = parser.parse(argv)
    if args.all == bool(args.config) or bool(args.config) != bool(args.topology):
        raise ConfigError("give --config CONFIG and --topology TOPOLOGY, or --all")
    from dcvit.config import load as configs

    if args.config:
        configs.check(args.config, overrides)

    import jax

    from dcvit.training import aot

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # the time of a compilation is one of the results
    rows = []
    for spec, topology in configs.recommended() if args.all else [(args.config, args.topology)]:
        row = aot.compile_for(spec, overrides, topology)
        if args.format == "table":
            cli.show(lines(row), "table")
        rows.append(row)
        jax.clear_caches()  # each compilation leaves hundreds of megabytes behind
        if args.out:  # after each compilation, because all together take long
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
    if args.format != "table":
        print(json.dumps(rows, indent=1) if args.format == "json" else "\n".join(markdown(rows)))
    return int(any(row["verdict"] != aot.FITS for row in rows))


if __name__ == "__main__":
    sys.exit(cli.run(main))
