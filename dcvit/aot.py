"""Compilation for a TPU slice on any Linux host: `python -m dcvit.aot --config CONFIG --topology v5p:4x4x8`.

Compiles the training step of a config with the TPU compiler of libtpu, and prints whether the step fits in the memory
of the chips and which data they exchange. Nothing is executed, and no data is needed. The exit status is 1 if a step
does not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dcvit import cli

SIZES = ("params", "optimizer", "temporaries", "total", "memory")


def lines(row: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the rows of a table about a result of `dcvit.training.measure.compile_for`, one for each number."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser("dcvit aot", extra="train", examples=["dcvit aot --config vit_i1k --topology v5e:4x4"])
    parser.add_argument("--config", required=True, help="config file or bare name, with :argument=value,…")
    parser.add_argument("--topology", required=True, help="a TPU slice: v5e:4x4, v5p:4x4x8, v5e-16 or tpu7x-8")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="format of the output")
    args, overrides = parser.parse(argv)
    cli.check_config(args.config, overrides)

    import jax

    from dcvit.training import measure

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # the time of a compilation is one of the results
    row = measure.compile_for(args.config, overrides, args.topology)
    cli.show([row] if args.format == "json" else lines(row), args.format)
    return int(row["verdict"] != measure.FITS)


if __name__ == "__main__":
    sys.exit(cli.run(main))
