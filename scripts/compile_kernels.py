"""Compiles the TPU kernels, forward and backward, for every attention of the models that have a name, without a TPU.

    python scripts/compile_kernels.py --json docs/tpu_kernels.json

takes an hour or two on two cores. A line each: the models that use it, and how many bundles the compiler schedules a
step of the grid (see scripts/tpu_bundles.py), or what it refuses. The status is 1 where something was refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from tpu_bundles import bundles

from dcvit.models.lm import Model, layer_windows
from dcvit.models.presets import PRESETS
from dcvit.models.vit import VARIANTS

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1")
IMAGE, TEXT = 196, 2048  # tokens: 224×224 in patches of 16×16, and the paper's context


def cases() -> dict[tuple[int, int, int, bool, int | None, bool], list[str]]:
    """Names of the models by heads, width of a head, tokens, causality, window and whether heads compose."""
    found: dict[Any, list[str]] = {}
    for name, (width, _, _, heads) in VARIANTS.items():
        for composed in (True, False):
            found.setdefault((heads, width // heads, IMAGE, False, None, composed), []).append(
                f"{'DCViT' if composed else 'ViT'}-{name}"
            )
    for name in PRESETS:
        net = Model(50257, preset=name)
        for window in dict.fromkeys(layer_windows(net)):
            shape = (net.num_heads, net.width // net.num_heads, TEXT)
            found.setdefault((*shape, window is None, window, net.compose is not None), []).append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, metavar="NAME")
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for ((heads, width, tokens, causal, window, composed), models), topology in itertools.product(
        cases().items(), args.topology
    ):
        row: dict[str, Any] = {
            "topology": topology, "heads": heads, "width": width, "tokens": tokens, "window": window,
            "composed": composed, "models": models,
        }  # fmt: skip
        begin = time.perf_counter()
        try:
            row["bundles"] = bundles(
                topology, heads, tokens, tokens, width, composed=composed, backward=True, causal=causal, window=window
            )
        except RuntimeError as error:
            row["refused"] = str(error)
        row["seconds"] = round(time.perf_counter() - begin)
        rows.append(row)
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
        if args.json:
            args.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return int(any("refused" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
