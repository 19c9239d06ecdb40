"""Count of the bundles that the TPU compiler schedules for a DCMHA kernel, without a TPU. A bundle is about one cycle.

    python scripts/tpu/bundles.py --topology v5e:2x2 --heads 6 --queries 196 --width 64 --batch 4

The compilation runs in a child process, because libtpu reads the folder for its dump from the environment at start-up.
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
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LINE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:(LH|LB|LE|PB|PF|CT):|:)?\s*(>*)\s*\{(.*)")
DELAY = 4  # bundles after a branch that the processor still executes


class AttentionShape(NamedTuple):
    """Shape of one attention. Eight divides the batch of kernels with blocks of examples."""

    batch: int
    heads: int
    key_heads: int
    width: int
    queries: int
    keys: int
    window: int | None
    composed: bool


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


def child(spec: dict[str, Any]) -> None:
    """Compile one kernel configuration; the environment must be that of `bundles`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from dcvit.dcmha import ComposeWeights
    from dcvit.dcmha.backends.tpu import api
    from dcvit.dcmha.inputs import Inputs, make_call

    devices = topologies.get_topology_desc(platform="tpu", topology_name=spec["topology"]).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    dtype = jnp.dtype(spec["dtype"])

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    batch, queries, keys, heads, width = (spec[name] for name in ("batch", "queries", "keys", "heads", "width"))
    key_heads = spec["key_heads"]
    q, k = array(batch, queries, heads, width), array(batch, keys, key_heads, width)
    rank = spec["rank"]
    weights = spec["composed"] and ComposeWeights(
        *[array(batch, queries, rank, heads)] * 2, array(batch, queries, heads),
        *[array(batch, keys, rank, heads)] * 2, array(batch, keys, heads),
    )  # fmt: skip

    def forward(*arguments: jax.Array) -> jax.Array:
        return api.run(make_call(Inputs(*arguments), causal=spec["causal"], window=spec["window"]))

    def gradient(do: jax.Array, *arguments: object) -> object:
        return jax.vjp(forward, *arguments)[1](do)

    weights = weights or None
    arguments = q, k, k, weights, weights
    with jax.set_mesh(mesh):
        if spec["backward"]:
            jax.jit(gradient).lower(q, *arguments).compile()
        else:
            jax.jit(forward).lower(*arguments).compile()


def bundles(
    topology: str, shape: AttentionShape, *, backward: bool = False, dtype: str = "bfloat16", causal: bool = False,
    rank: int = 2,
) -> dict[str, int]:  # fmt: skip
    """Return the bundles of a step of the grid for each kernel.

    The kernels are dcmha_forward, and with `backward` also dcmha_delta and dcmha_gradients. A step of dcmha_matrices,
    and of dcmha_gradient_matrices in the backward pass, prepares a block of keys. If one tile holds all scores, a step
    of the others is an image; otherwise it is a block of queries and a block of keys.

    Raises:
      RuntimeError: the compilation failed; the message is the end of the compiler's output.
    """
    spec = {
        "topology": topology, **shape._asdict(), "backward": backward, "dtype": dtype, "causal": causal, "rank": rank,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_WORKER_HOSTNAMES": "localhost", "JAX_ENABLE_COMPILATION_CACHE": "false",
            "LIBTPU_INIT_ARGS": dump_options(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(spec)], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return {name.partition(".")[0]: round(count(text)) for name, text in schedules(folder).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", default="v5e:2x2")
    for name, default in (("heads", 6), ("queries", 196), ("width", 64), ("batch", 4), ("rank", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("keys", "window", "key-heads"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--plain", action="store_true", help="without composition")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return 0
    shape = AttentionShape(
        args.batch, args.heads, args.key_heads or args.heads, args.width, args.queries, args.keys or args.queries,
        args.window, not args.plain,
    )  # fmt: skip
    found = bundles(args.topology, shape, backward=True, dtype=args.dtype, causal=args.causal, rank=args.rank)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
