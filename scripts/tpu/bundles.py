"""Count of the bundles that the TPU compiler schedules for a DCMHA kernel, without a TPU. A bundle is about one cycle.

    python scripts/tpu/bundles.py --topology v5e:2x2 --heads 6 --queries 196 --width 64 --batch 64
    python scripts/tpu/bundles.py --topology v6e:2x2 --heads 32 --queries 2048 --width 80 --causal --plain

The count is that of one step of the grid: all bundles of the kernel's final schedule inside the loop over the grid,
each multiplied by the iterations of the inner loops whose length the compiler knows. Conditional regions count as if
they ran in every step, so that the count of a kernel with several tiles is an upper bound; scripts/tpu/step.py weights
them by the steps in which they run. Copies between HBM and VMEM run in parallel and are not counted; neither are
stalls. A batch of at least 4 gives each core of a chip with two cores a loop. With a batch that eight divides, a step
is eight images, as in training; --batch 64 keeps the arrays in HBM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcvit.dcmha import ComposeWeights
from dcvit.dcmha.backends.tpu import api
from dcvit.dcmha.inputs import Inputs, make_call
from dcvit.training.measure import topology_devices

LINE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:(LH|LB|LE|PB|PF|CT):|:)?\s*(>*)\s*\{(.*)")
DELAY = 4  # bundles after a branch that the processor still executes


def count(text: str, shares: Sequence[float] | None = None) -> float:
    """Return the bundles of one step of the grid from the text of a kernel's final schedule.

    Args:
      text: the schedule.
      shares: the share of the steps in which each condition (`pl.when`) of the kernel holds; all, if None. The compiler
        may leave out conditions that always hold.

    Raises:
      ValueError: the schedule has another number of conditional regions.
    """
    lines = [(m[2], len(m[3]), m[4]) for m in map(LINE.match, text.splitlines()) if m]
    tests = {m[1]: int(m[2]) for m in re.finditer(r"%(p\w+) = scmp\.ge\S* (?:\(%\w+\), )?[^,]*, (\d+)", text)}
    weights, loops = [float(depth >= 1) for _, depth, _ in lines], []
    for n, (tag, depth, line) in enumerate(lines):
        if tag == "LB" and depth >= 2:  # the outermost loop is the grid
            loops.append(n)
        back = re.search(r"sbr\.rel \(!%(p\w+)\)", line)
        if back and loops:  # the end of the innermost loop
            for inside in range(loops.pop(), n + DELAY + 1):
                weights[inside] *= tests[back[1]]
    regions = [] if shares is None else conditional_regions(text)
    if shares is not None and len(regions) != len(shares):
        shares = [share for share in shares if share < 1]
        if len(regions) != len(shares):
            raise ValueError(f"{len(regions)} conditional regions, but {len(shares)} conditions of the kernel")
    for region, share in zip(regions, shares or (), strict=True):
        for inside in region:
            weights[inside] *= share
    return sum(weights)


def conditional_regions(text: str) -> list[range]:
    """Return the bundles of each region that a condition (`pl.when`) of the kernel skips, from its final schedule.

    In the loop over the grid, one branch skips the kernel in the steps of the pipeline without a block. The branches
    directly inside of it are those of conditions, which skip if their predicate is true, and those of the pipeline,
    which skip if it is false. A branch before the loop skips it on a core without steps.
    """
    starts: dict[str, int] = {}
    branches, n, depth = [], -1, 0
    for line in text.splitlines():
        if m := LINE.match(line):  # a bundle may continue on other lines
            n, depth = n + 1, len(m[3])
        starts |= {m[1]: n for m in re.finditer(r"(?:Start|Start/End empty) region (\d+)", line)}
        if depth:
            found = re.finditer(r"sbr\.rel \((!?)%p\w+\) target = \$region(\d+)", line)
            branches += [(n, m[1], m[2]) for m in found]
    forward = [(range(n + 1, starts[target]), negated) for n, negated, target in branches if starts[target] > n]
    kernel, _ = max(forward, key=lambda one: len(one[0]))
    inside = [(x, negated) for x, negated in forward if x.start > kernel.start and x.stop <= kernel.stop]
    outer = [one for one in inside if not any(one[0].start > x.start and one[0].stop <= x.stop for x, _ in inside)]
    return [x for x, negated in outer if not negated]


def steps(text: str) -> int:
    """Return the steps of the grid on one core from the text of a kernel's final schedule.

    The loop over the grid is a pipeline of three stages: it loads one step ahead and stores one step behind.
    """
    lines = [m[4] for m in map(LINE.match, text.splitlines()) if m and len(m[3]) == 1]
    trips = [int(n) for line in lines for n in re.findall(r"(\d+) /\* loop exit test", line)]
    return trips[-1] - 2


def dump_options(folder: str | Path) -> str:
    """Return the options in LIBTPU_INIT_ARGS with which libtpu writes the final schedules into a folder."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"


def schedules(folder: str | Path) -> dict[str, str]:
    """Return the texts of the final schedules of this package's kernels in a folder, by the instruction's name."""
    paths = sorted(Path(folder).glob("*-dcmha_*-final_bundles.txt"))
    return {
        re.sub(r".*-(dcmha_[a-z_]+[.\d]*)-.*", r"\1", path.name): path.read_text()
        for path in paths
        if "schedule-analysis" not in path.name
    }


def compile_kernels(args: argparse.Namespace) -> None:
    """Compile the kernels of attention and of its gradients."""
    mesh = Mesh(np.array(topology_devices(args.topology)[1][:1]), ("x",))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, args.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    queries, keys = args.queries, args.keys or args.queries
    q = array(args.batch, queries, args.heads, args.width)
    k = array(args.batch, keys, args.key_heads or args.heads, args.width)
    branches = [array(args.batch, n, *r, args.heads) for n in (queries, keys) for r in ((args.rank,), (args.rank,), ())]
    weights = None if args.plain else ComposeWeights(*branches)

    def gradients(d_out: jax.Array, inputs: Inputs) -> object:
        return jax.vjp(lambda x: api.run(make_call(x, causal=args.causal, window=args.window)), inputs)[1](d_out)

    with jax.set_mesh(mesh):
        jax.jit(gradients).lower(q, Inputs(q, k, k, weights, weights)).compile()


def main() -> int:
    """Run the script; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", default="v5e:2x2")
    for name, default in (("heads", 6), ("queries", 196), ("width", 64), ("batch", 4), ("rank", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("keys", "window", "key-heads"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--plain", action="store_true", help="without composition")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program has no schedules
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = dump_options(folder)  # before libtpu starts
        compile_kernels(args)
        found = {name.partition(".")[0]: round(count(text)) for name, text in schedules(folder).items()}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
