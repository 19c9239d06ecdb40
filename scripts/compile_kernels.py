"""Compiles the TPU kernels, forward, backward and of decoding, for every named model, without a TPU.

    python scripts/compile_kernels.py --json docs/tpu_kernels.json

takes two hours or so on two cores. A line each: the models that use it, and how many bundles the compiler schedules a
step of the grid (see scripts/tpu_bundles.py), or what it refuses. The status is 1 where something was refused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tpu_bundles import bundles

from dcvit.models.lm import Model, layer_windows
from dcvit.models.presets import PRESETS
from dcvit.models.vit import VARIANTS

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1")
IMAGE, TEXT = 196, 2048  # tokens: 224×224 in patches of 16×16, and the paper's context


class Case(NamedTuple):
    """One attention: of one query where it decodes."""

    heads: int
    width: int
    queries: int
    keys: int
    window: int | None
    composed: bool


def cases() -> dict[Case, list[str]]:
    """Names of the models that use it, by attention."""
    found: dict[Case, list[str]] = {}
    for name, (width, _, _, heads) in VARIANTS.items():
        for composed in (True, False):
            case = Case(heads, width // heads, IMAGE, IMAGE, None, composed)
            found.setdefault(case, []).append(f"{'DCViT' if composed else 'ViT'}-{name}")
    for name in PRESETS:
        net = Model(50257, preset=name)
        shape, composed = (net.num_heads, net.width // net.num_heads), net.compose is not None
        for window in dict.fromkeys(layer_windows(net)):
            found.setdefault(Case(*shape, TEXT, TEXT, window, composed), []).append(name)
            found.setdefault(Case(*shape, 1, window or TEXT, window, composed), []).append(name)
    return found


def compiled(case: Case, topology: str, models: list[str]) -> dict[str, Any]:
    """A row of the table."""
    row = {"topology": topology, **case._asdict(), "models": models}
    heads, width, queries, keys, window, composed = case
    try:
        row["bundles"] = bundles(
            topology, heads, queries, keys, width, composed=composed, backward=True,
            causal=queries == TEXT, window=window,
        )  # fmt: skip
    except RuntimeError as error:
        row["refused"] = str(error)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        todo = [(case, topology, models) for case, models in cases().items() for topology in args.topology]
        for row in pool.map(compiled, *zip(*todo, strict=True)):
            rows.append(row)
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)
            if args.json:
                args.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return int(any("refused" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
