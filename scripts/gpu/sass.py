"""Count of the machine instructions of the `pallas_gpu` kernels, compiled for an H100 without a GPU.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python scripts/gpu/sass.py --shape 405M

This needs Python packages `jax[cuda13]` and `nvidia-cuda-nvdisasm`, whose program `nvdisasm` is on the PATH. A row is
one sweep of a kernel over the heads: a loop with matrix instructions. Counts are those of one warp for one head. KB are
those that all warps of a block load and store in shared memory for one head, and that the tensor cores read there.
Waits are those for matrix products (in parentheses those without arithmetic since the products were started), for a
slot of the ring to be full or empty, and for all warps of a warpgroup. The counts say nothing about time.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias
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
HIDDEN = 16  # float32 instructions between the start of products and the wait, from which on there is arithmetic


Kernels: TypeAlias = dict[str, tuple[KernelConfig, Operands]]


class Instruction(NamedTuple):
    """One machine instruction: its operation with modifiers, and its operands."""

    operation: str
    operands: str

    @property
    def name(self) -> str:
        return self.operation.split(".")[0]


def kernels(shape: tuple[int, int, int, int, bool], rank: int, branches: str) -> Kernels:
    """Return the configuration and operands of the last call of each kernel in attention's forward and backward."""
    batch, tokens, heads, width, causal = shape
    array = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    q, down = array(batch, tokens, heads, width), array(batch, tokens, rank, heads)
    side = {True: (down, down, array(batch, tokens, heads)), False: (None, None, None)}
    weights = ComposeWeights(*side["q" in branches], *side["k" in branches]) if branches else None
    found = {}

    def record(kind: str, config: KernelConfig, operands: Operands) -> Results:
        found[kind] = config, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
        return launch(kind, config, operands)

    def both(inputs: Inputs, cotangent: jax.Array) -> object:
        return jax.vjp(lambda x: api.run(make_call(x, causal=causal)), inputs)[1](cotangent)

    with mock.patch.object(api, "launch", record), mock.patch.object(api, "is_gpu", return_value=True):
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


def sweeps(code: str) -> Iterator[list[Instruction]]:
    """Yield the instructions of each innermost loop with matrix instructions, with the copies of one warpgroup only."""
    labels: dict[str, int] = {}
    found: list[Instruction] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif match := INSTRUCTION.search(line):
            found.append(Instruction(match[1], match[2]))
    jumps = [(n, re.search(r"`\((\.L_x_\d+)\)", x.operands)) for n, x in enumerate(found) if x.name == "BRA"]
    spans = sorted((labels[target[1]], n) for n, target in jumps if target)
    last = 0
    for stop, start in sorted((n + 1, target) for target, n in spans if target <= n):  # inner loops first
        names = {x.name for x in found[start:stop]}
        if start < last or not ("HGMMA" in names or {"UTMALDG", "LDS"} <= names):
            continue
        last = stop
        copies = [range(n + 1, target) for target, n in spans if start < n < target < stop]  # conditional regions
        copies = [x for x in copies if any(found[n].name == "UTMALDG" for n in x)]
        inner = [x for x in copies if not any(y != x and y.start >= x.start and y.stop <= x.stop for y in copies)]
        other = {n for x in inner[1:] for n in x}
        yield [found[n] for n in range(start, stop) if n not in other]


def waits(loop: list[Instruction]) -> str:
    """Return the waits for products, those of them without arithmetic, for the ring, and for other warps."""
    products = idle = 0
    floats: int | None = None  # float32 instructions since products were started; None if there are none
    for x in loop:
        if x.name == "HGMMA" and floats is None:
            floats = 0
        elif x.name in FLOAT32 and floats is not None:
            floats += 1
        elif x.operation.startswith("WARPGROUP.DEPBAR") and floats is not None:
            products += 1
            if x.operands.split()[-1] == "0x0":  # other waits are for earlier products
                idle += floats < HIDDEN
                floats = None
    ring = sum(x.operation.startswith("SYNCS.PHASECHK") and "TRYWAIT" in x.operation for x in loop)
    return f"{products} ({idle}), {ring}, {sum(x.name == 'BAR' for x in loop)}"


def kilobytes(loop: list[Instruction], warpgroups: int) -> float:
    """Return the KB of shared memory that a block reads and writes in an iteration of a loop."""
    total = 0.0
    for x in loop:
        if x.name in ("LDS", "STS") and "[RZ]" not in x.operands:  # which is a wait
            bits = re.search(r"\.(8|16|64|128)\b|\.U(8|16)\b", x.operation)
            total += 128 * int(next(filter(None, bits.groups())) if bits else 32) / 8
        elif x.name == "STSM":
            total += 128 * 4 * int(x.operation.rsplit(".", 1)[-1])
        elif x.name == "HGMMA":
            rows, columns, depth = map(int, re.findall(r"(\d+)x(\d+)x(\d+)", x.operation)[0])
            from_memory = "gdesc" in x.operands.split(",")[1]  # the left operand; the right one always is
            total += 2 * depth * (columns + rows * from_memory)
    return total * warpgroups / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kernel", nargs="+", help="names of kernels; all, if absent")
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--branches", default="qk", help='"qk", "q", "k" or "" (without composition)')
    args = parser.parse_args()
    print("| shape | kernel | registers | spill bytes | instructions | float32 | MUFU | KB | waits: wgmma, ring, BAR |")
    for shape in args.shape:
        for kind, (config, operands) in kernels(SHAPES[shape], args.rank, args.branches).items():
            if args.kernel and kind not in args.kernel:
                continue
            code, messages = compiled(kind, config, operands)
            registers = re.findall(r"[Uu]sed (\d+) registers", messages)[-1]
            spills = sum(map(int, re.findall(r"(\d+) bytes spill", messages.split("Compiling entry")[-1])))
            for loop in sweeps(code):
                names = Counter(x.name for x in loop)
                floats, kb = sum(names[x] for x in FLOAT32), round(kilobytes(loop, config.warpgroups))
                row = shape, kind, registers, spills, len(loop), floats, names["MUFU"], kb, waits(loop)
                print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
