"""Measures the memory and time of a conversion of a large sharded model.

    python scripts/bench_convert.py --folder /tmp/big --to safetensors

Writes a GPT-NeoX of the shape of Pythia-2.8B with random bfloat16 weights, in shards of at most `--shard_gb`, as
`save_pretrained` of transformers names them. Then runs `dcvit convert` in a process of its own, and prints the size of
the largest shard and the peak of the process's resident memory, which includes the pages of mapped files.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from dcvit.models.presets import decode_preset
from dcvit.parallel import runtime
from dcvit.weights import gpt_neox
from dcvit.weights.family import Description
from dcvit.weights.links import write
from dcvit.weights.safetensors_writer import write_shards
from dcvit.weights.tensors import Tensor

VOCAB = 50304


def tensors(description: Description, seed: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    """Yield random tensors of a model by the names of transformers."""
    from dcvit.export.source import param_shapes

    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...], scale: bool) -> np.ndarray:
        values = rng.standard_normal(shape, np.float32) * np.float32(0.02) + np.float32(scale)
        return values.astype(ml_dtypes.bfloat16)

    shapes = param_shapes(description, {})
    params = {
        path: Tensor(shape, lambda shape=shape, path=path: draw(shape, path.endswith("scale")))
        for path, shape in shapes.items()
    }
    yield from write(gpt_neox.links(description), params)


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the source and the result")
    parser.add_argument("--preset", default="Pythia-2.8B")
    parser.add_argument("--to", default="safetensors")
    parser.add_argument("--shard_gb", type=float, default=2.0)
    args = parser.parse_args()
    runtime.skip_absent_tpu()
    source, target = args.folder / "source", args.folder / args.to
    description = Description("lm", VOCAB, decode_preset(args.preset))
    if not source.exists():
        source.mkdir(parents=True)
        write_shards(source, tensors(description), max_shard_bytes=int(args.shard_gb * 1e9))
        (source / "config.json").write_text(json.dumps(gpt_neox.config(description)))
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    start = time.perf_counter()
    words = [sys.executable, "-m", "dcvit.convert", str(source), str(target), "--to", args.to]
    status = subprocess.run(words, check=False).returncode
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    print(
        f"{args.preset} to {args.to}: status {status}, {total / 1e9:.2f} GB, largest shard {largest / 1e9:.2f} GB, "
        f"peak memory {peak / 1e9:.2f} GB (1.3 shards + 2 GB: {1.3 * largest / 1e9 + 2:.2f} GB), "
        f"{time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
