"""Count of the machine instructions of the `pallas_gpu` kernels, compiled for an H100 without a GPU.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python scripts/gpu/sass.py --shape 405M

This needs Python packages `jax[cuda13]` and `nvidia-cuda-nvdisasm`, whose program `nvdisasm` is on the PATH. A row is
one sweep of a kernel over the heads: a loop with matrix instructions. Counts are those of one warp for one head, with
the copies of all warps, and say nothing about time. `--code FOLDER` writes the machine code of each kernel.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from dcvit.dcmha.backends.gpu import api
from dcvit.dcmha.backends.gpu.block import Operands
from dcvit.dcmha.backends.gpu.config import KernelConfig
from dcvit.dcmha.backends.gpu.launch import Results, launch
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.inputs import Inputs, make_call

H100 = """platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3" dnn_version_info { major: 9 minor: 10 }
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }"""
SHAPES = {"ViT-S/16": (256, 196, 6, 64, False), "405M": (8, 2048, 16, 64, True), "6.9B": (2, 2048, 32, 128, True)}
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
FLOAT32 = "FFMA", "FADD", "FMUL", "FMNMX"

Kernels: TypeAlias = dict[str, tuple[KernelConfig, Operands]]


def kernels(shape: tuple[int, int, int, int, bool]) -> Kernels:
    """Return the configuration and operands of the last call of each kernel in attention's forward and backward."""
    batch, tokens, heads, width, causal = shape
    array = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    q, down = array(batch, tokens, heads, width), array(batch, tokens, 2, heads)
    weights = ComposeWeights(*[down, down, array(batch, tokens, heads)] * 2)
    found = {}

    def record(kind: str, config: KernelConfig, operands: Operands) -> Results:
        found[kind] = config, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
        return launch(kind, config, operands)

    def both(inputs: Inputs, cotangent: jax.Array) -> object:
        return jax.vjp(lambda x: api.run(make_call(x, causal=causal)), inputs)[1](cotangent)

    with mock.patch.object(api, "launch", record):
        jax.eval_shape(both, Inputs(q, q, q, weights, weights), q)
    return found


def compiled(kind: str, config: KernelConfig, operands: Operands) -> tuple[str, str]:
    """Compile a kernel; return its machine code, and the compiler's messages."""
    topology = topologies.get_topology_desc("1x1x1", "cuda", topology="1x1x1", target_config=H100)
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    operands = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_SASS": "1"}
        launch.lower(kind, config, operands).compile()
        (code,), (messages,) = (list(Path(folder).glob(f"*.{suffix}*")) for suffix in ("sass", "ptxas"))
        return code.read_text(), messages.read_text()


def sweeps(code: str) -> Iterator[Counter[str]]:
    """Yield the numbers of the instructions, by name, of each innermost loop with matrix instructions."""
    labels: dict[str, int] = {}
    names: list[str] = []
    jumps: list[tuple[int, str]] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif match := INSTRUCTION.search(line):
            names.append(match[1].partition(".")[0])
            if names[-1] == "BRA" and (target := re.search(r"`\((\.L_x_\d+)\)", match[2])):
                jumps.append((len(names), target[1]))
    last = 0
    loops = [(stop, labels[target]) for stop, target in jumps if labels[target] < stop]
    for stop, start in sorted(loops):  # inner ones first
        if start >= last and "HGMMA" in names[start:stop]:
            last = stop
            yield Counter(names[start:stop])


def main() -> None:
    """Run the script; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--code", type=Path, help="folder for the machine code")
    args = parser.parse_args()
    print("| shape | kernel | registers | spill bytes | instructions | float32 | MUFU |")
    for shape in args.shape:
        for kind, (config, operands) in kernels(SHAPES[shape]).items():
            code, messages = compiled(kind, config, operands)
            if args.code:
                (args.code / f"{shape.replace('/', '')}_{kind}.sass").write_text(code)
            registers = re.findall(r"[Uu]sed (\d+) registers", messages)[-1]
            spills = sum(map(int, re.findall(r"(\d+) bytes spill", messages.split("Compiling entry")[-1])))
            for names in sweeps(code):
                row = shape, kind, registers, spills, names.total(), sum(names[x] for x in FLOAT32), names["MUFU"]
                print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
