"""Memory traffic of attention on a GPU, from programs that XLA compiles for it, without a GPU.

    python -m venv traffic && traffic/bin/pip install -e . jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    traffic/bin/python scripts/gpu_traffic.py --json docs/gpu_traffic.json
    traffic/bin/python scripts/gpu_traffic.py --batch 8 --queries 2048 --heads 16 --causal

Compiles forward and gradient of one attention layer in bfloat16 for an H200, by default that of ViT-S/16, with each
implementation that XLA compiles, and adds up what the kernels of the program read and write: the operands and results
of each, as often as a loop runs. An operand that a kernel reads several times counts once, as if a cache kept it. `ms`
is the sum divided by the bandwidth of the memory, a lower bound of the time. The packages must have the version of the
installed JAX.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from dcvit import dcmha
from dcvit.parallel import hlo
from dcvit.parallel.hlo import Instruction

BANDWIDTH = 4.8e12  # bytes per second of an H200: nvidia.com/en-us/data-center/h200
# An H200 as XLA describes it: figures of the CUDA programming guide for compute capability 9.0, and the data sheet.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "sm_90 with 150754820096B RAM, 132 cores"
"""
# Instructions that move no data themselves.
PASSIVE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "call", "after-all"
}  # fmt: skip
HEADER = "| pass | row | GB moved | ms | kernels | temporary MiB |\n|---|---|---|---|---|---|"
# Row -> composed, implementation.
ROWS = {
    "plain, XLA": (False, "reference"), "DC, reference": (True, "reference"), "DC, blockwise": (True, "blockwise"),
    "DC, elementwise": (True, "elementwise"),
}  # fmt: skip


class Row(TypedDict):
    """Forward or gradient of one implementation: bytes read and written, kernels, and bytes of temporary arrays."""

    row: str
    gradient: bool
    moved: int
    kernels: int
    temporary: int


def traffic(text: str) -> tuple[int, int]:
    """Return the bytes that the kernels of a program read and write, and the number of kernels that a run starts.

    Args:
      text: the optimized HLO, `compiled.as_text()`.
    """
    program, entry = hlo.computations(text)
    runs = hlo.times(program, entry)
    instructions = [x for some in program.values() for x in some]
    inside = {name for x in instructions if x.op not in PASSIVE for _, name in hlo.called(x.rest)}
    moved = kernels = 0
    for name, some in program.items():
        if name in inside or not runs.get(name):
            continue
        shapes = {x.name: x.shape for x in some}
        for x in some:
            if x.op not in PASSIVE:
                body = [y for _, callee in hlo.called(x.rest) for y in program.get(callee, [])]
                moved += runs[name] * bytes_moved(x, body, [shapes.get(operand, "") for operand in x.operands])
                kernels += runs[name]
    return moved, kernels


def bytes_moved(x: Instruction, body: list[Instruction], inputs: list[str]) -> int:
    """Return the bytes that an instruction with operands of the shapes `inputs` reads and writes.

    A slice reads what it returns. An update in place writes what it reads, and leaves the rest of the array.
    """
    result, sizes = hlo.size_in_bytes(x.shape), [hlo.size_in_bytes(shape) for shape in inputs]
    ops = {x.op, *(y.op for y in body)}
    if "dynamic-update-slice" in ops:
        return 2 * sum(size for size in sizes if size != result)
    if "dynamic-slice" in ops:
        return result + sum(min(size, result) for size in sizes)
    return result + sum(sizes)


def cuda_device() -> jax.Device:
    """Return the description of an H200 for which the CUDA plugin of JAX compiles, without a GPU.

    Raises:
      SystemExit: the plugin is not installed.
    """
    if importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        sys.exit("gpu_traffic: install the packages named in the description (--help)")
    import nvidia

    compiler = next(path for folder in nvidia.__path__ for path in Path(folder).glob("cuda_nvcc"))
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={compiler}"
    found: jax.Device = topologies.get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1").devices[0]
    return found


def measure(args: argparse.Namespace) -> list[Row]:
    """Compile all rows of the table."""
    mesh = jax.sharding.Mesh(np.array([cuda_device()]), ("x",))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.sharding.PartitionSpec()))

    size, heads = (args.batch, args.queries), args.heads
    q, rank, gate = array(*size, heads, args.width), array(*size, 2, heads), array(*size, heads)
    found: list[Row] = []
    for gradient in (False, True):
        for name, (composed, implementation) in ROWS.items():
            weights = dcmha.ComposeWeights(rank, rank, gate, rank, rank, gate) if composed else None

            def forward(*x: jax.Array, implementation: str = implementation) -> jax.Array:
                return dcmha.attention(*x, causal=args.causal, window=args.window, implementation=implementation)

            def backward(do: jax.Array, *x: jax.Array, forward: Callable[..., jax.Array] = forward) -> object:
                return jax.vjp(forward, *x)[1](do)

            inputs = (q, q, q, weights, weights)
            with jax.set_mesh(mesh):
                lowered = jax.jit(backward).lower(q, *inputs) if gradient else jax.jit(forward).lower(*inputs)
                compiled = lowered.compile()
            moved, kernels = traffic(compiled.as_text() or "")
            temporary = compiled.memory_analysis().temp_size_in_bytes
            found.append(Row(row=name, gradient=gradient, moved=moved, kernels=kernels, temporary=temporary))
            print(line(found[-1]), flush=True)
    return found


def line(row: Row) -> str:
    """Return a row of the table in the documentation."""
    return (
        f"| {'forward + backward' if row['gradient'] else 'forward'} | {row['row']} | {row['moved'] / 1e9:.1f} "
        f"| {1e3 * row['moved'] / BANDWIDTH:.1f} | {row['kernels']:,} | {row['temporary'] / 2**20:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 256), ("queries", 196), ("heads", 6), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(HEADER)
    rows = measure(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
