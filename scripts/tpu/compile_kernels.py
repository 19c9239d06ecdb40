"""Compilation of the TPU kernels (forward, backward, decoding) for every named model, without a TPU.

    python scripts/tpu/compile_kernels.py --json docs/tpu_kernels.json

This takes hours on two cores. Each line shows the models that use the attention, and the bundles of a step of the grid
(scripts/tpu/bundles.py) or the compiler's error. The exit status is 1 if a compilation failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bundles import AttentionShape, bundles

from dcvit.models.lm import Model, layer_windows
from dcvit.models.presets import PRESETS
from dcvit.models.vit import VARIANTS

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")
IMAGE, TEXT = 196, 2048  # tokens: 224×224 in patches of 16×16, and the paper's context
BATCHES, LANES = (4, 64), 128  # one example in a block, and eight, whose tokens fill complete registers


def shapes() -> dict[AttentionShape, list[str]]:
    """Return the names of the models that use each attention."""
    found: dict[AttentionShape, list[str]] = {}
    for name, (width, _, _, heads) in VARIANTS.items():
        for composed, batch in itertools.product((True, False), BATCHES if width % LANES == 0 else BATCHES[:1]):
            shape = AttentionShape(batch, heads, heads, width // heads, IMAGE, IMAGE, None, composed)
            found.setdefault(shape, []).append(f"{'DCViT' if composed else 'ViT'}-{name}")
    for name in PRESETS:
        net = Model(50257, preset=name)
        key_heads = net.num_key_heads or net.num_heads
        composed = net.compose is not None and not net.composition().foldable(key_heads)
        sizes = BATCHES[0], net.num_heads, key_heads, net.width // net.num_heads
        for window in dict.fromkeys(layer_windows(net)):
            found.setdefault(AttentionShape(*sizes, TEXT, TEXT, window, composed), []).append(name)
    return found


def compiled(shape: AttentionShape, topology: str, models: list[str]) -> dict[str, Any]:
    """Compile the kernels for one shape and return a row of the table."""
    row = {"topology": topology, **shape._asdict(), "models": models}
    try:
        row["bundles"] = bundles(topology, shape, backward=True, causal=shape.queries == TEXT)
    except RuntimeError as error:
        row["error"] = str(error)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of parallel compilations")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        todo = [(shape, topology, models) for shape, models in shapes().items() for topology in args.topology]
        for row in pool.map(compiled, *zip(*todo, strict=True)):
            rows.append(row)
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)
            if args.json:
                args.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
