"""Cycles, FLOPs and bytes of the instructions of a compiled TPU program, read from the text of its optimized HLO.

The TPU compiler writes the cycles that it expects of an instruction, `estimated_cycles`, next to the instruction. It
writes none for calls of Pallas kernels; theirs are the bundles of a kernel's final schedule, each about one cycle.
Copies between HBM and VMEM that run beside a kernel are not counted, and neither are stalls.
Instructions in the body of a loop count as often as the loop runs. Other instructions without an estimate count
nothing: collectives, copies between HBM and VMEM that run beside the computation, and operations on scalars. `UNKNOWN`
cycles, which libtpu 0.0.42 writes for copies in programs of TPU7x, are replaced by those that HBM needs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dcvit.parallel import hlo
from dcvit.parallel.hlo import Instruction

# FLOPs of the MXUs per cycle, and bytes of HBM per second, of one device of a chip in
# `dcvit.parallel.topologies`. v4, v5e and v5p have 8, 4 and 8 units of 128×128; the compiler's estimate of a product of
# 8192×8192 bfloat16 matrices reaches 93, 88 and 90 % of them, 70 % of the figure for v6e and 80 % of that for TPU7x
# (libtpu 0.0.52). The clock is the chip's peak over the FLOPs per cycle. Bandwidths:
# cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e; TPU7x: half of the chip's in JAX 0.12's table of TPUs.
MXU = {"v4": 2**18, "v5e": 2**17, "v5p": 2**18, "v6e": 2**19, "TPU7x": 2**19}
HBM = {"v4": 1228e9, "v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9, "TPU7x": 3700e9}

UNKNOWN = 2**63 - 1
LINE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:(LH|LB|LE|PB|PF|CT):|:)?\s*(>*)\s*\{(.*)")
DELAY = 4  # bundles after a branch that the processor still executes
KINDS = ("matmul", "relayout", "elementwise", "kernel")
MOVES = {"copy", "transpose", "pad", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "reverse"}
PASSIVE = {
    "parameter", "constant", "bitcast", "reshape", "broadcast", "convert", "tuple", "get-tuple-element", "fusion",
}  # fmt: skip
# Parts of a model: the first whose pattern is found in the name of the JAX operation.
PARTS = {
    "qkv products": r"\.project/",
    "attention output": r"\.output/",
    "dynamic weights": r"\.compose_weights/",
    "attention core": r"\.attend/",
    "MLP": r"/(MlpBlock|mlp)\w*/",
    "norms and residuals": r"[Nn]orm\w*/|_residual/",
    "patch embedding": r"/(pos_)?embedding/",
    "head and loss": r"/\w*head/|jvp\(\)|jvp\(\w*\)\)?/\w+$",
    "input and optimizer": r"^jit\(update\)/(?!.*jvp)",
}
OTHER = "other"


class Cost(NamedTuple):
    """One instruction of a program.

    Fields:
      name: its name in the program.
      part: one of `PARTS`, or `OTHER`.
      kind: one of `KINDS`.
      cycles: the estimate for all its executions; of a kernel, at least those in which HBM moves its arrays once.
      times: how often it is executed per run of the program.
      flops: floating-point operations of its matrix products and convolutions, in all executions.
      schedule: the name under which the schedule of a kernel is known, or an empty string.
    """

    name: str
    part: str
    kind: str
    cycles: float
    times: int
    flops: float
    schedule: str


def costs(text: str, kernels: Mapping[str, float], bytes_per_cycle: float = math.inf) -> list[Cost]:
    """Return the instructions of a program that have an estimate, in the order of the text.

    Args:
      text: the optimized HLO, `compiled.as_text()`.
      kernels: the cycles of one call of each Pallas kernel, by the name of its instruction. The compiler schedules
        kernels with equal bodies once, so that one name is enough for all of them.
      bytes_per_cycle: the bytes that HBM reads or writes in a cycle.

    Raises:
      KeyError: the cycles of a kernel are not given.
    """
    program, entry = hlo.computations(text)
    runs = hlo.times(program, entry)
    fused = {name for some in program.values() for x in some if x.op == "fusion" for _, name in hlo.called(x.rest)}
    by_body: dict[str, str] = {}
    found: list[tuple[Cost, Instruction | None]] = []
    for name, instructions in program.items():
        times, shapes = runs.get(name, 0), {x.name: x.shape for x in instructions}
        for x in instructions if times and name not in fused else ():
            whole = [(x, shapes), *_inner(program, x)]
            estimate = re.search(r'"estimated_cycles":"(\d+)"', x.rest)
            kernel, its_shapes = next((one for one in whole if is_kernel(one[0])), (None, {}))
            if estimate is None and kernel is None:
                continue
            if kernel is not None and x.name in kernels:
                by_body[_body(kernel)] = x.name
            work, cycles = sum(flops(*one) for one in whole), float(estimate[1]) if estimate else 0.0
            if cycles >= UNKNOWN:
                cycles = _moved(x, shapes) / bytes_per_cycle
            if kernel is not None:
                cycles = sum(map(_in_hbm, [kernel.shape, *map(its_shapes.get, _operands(kernel))])) / bytes_per_cycle
            kind = _kind([y for y, _ in whole])
            cost = Cost(x.name, part(x.op_name), kind, cycles * times, times, work * times, "")
            found.append((cost, kernel))
    return [cost if kernel is None else _scheduled(cost, _body(kernel), kernels, by_body) for cost, kernel in found]


def _scheduled(cost: Cost, body: str, kernels: Mapping[str, float], by_body: Mapping[str, str]) -> Cost:
    """Return the cost of a kernel with the cycles of its schedule, if HBM does not need more."""
    schedule = cost.name if cost.name in kernels else by_body.get(body)
    if schedule is None:
        raise KeyError(f"no cycles of {cost.name}")
    return cost._replace(cycles=max(cost.cycles, kernels[schedule] * cost.times), schedule=schedule)


def is_kernel(x: Instruction) -> bool:
    """Return True for the call of a Pallas kernel."""
    return x.op == "custom-call" and 'custom_call_target="tpu_custom_call"' in x.rest


def conditions(text: str) -> dict[str, list[float]]:
    """Return the share of the steps of the grid in which each condition of a kernel holds, by the kernel's instruction.

    Kernels without conditions have none. The kernels state them (`dcvit.dcmha.backends.tpu.config.conditions`).
    """
    found = {}
    for instructions in hlo.computations(text)[0].values():
        for x in filter(is_kernel, instructions):
            stated = hlo.KERNEL_METADATA.search(x.rest)
            metadata = json.loads(stated[1]) if stated else {}
            if "conditions" in metadata:
                steps = int(metadata["steps"])
                found[x.name] = [int(times) / steps for times in metadata["conditions"].split()]
    return found


def _body(x: Instruction) -> str:
    """Return the program of a Pallas kernel."""
    body = re.search(r'"body":"([^"]*)"', x.rest)
    return body[1] if body else x.name


def part(op_name: str) -> str:
    """Return the part of the model that a JAX operation belongs to."""
    return next((name for name, pattern in PARTS.items() if re.search(pattern, op_name)), OTHER)


def _inner(program: hlo.Computations, x: Instruction) -> list[tuple[Instruction, dict[str, str]]]:
    """Return the instructions of a fusion, nested ones too, each with the shapes of its computation by name."""
    body = [y for _, name in hlo.called(x.rest) for y in program.get(name, [])] if x.op == "fusion" else []
    shapes = {y.name: y.shape for y in body}
    return [pair for y in body for pair in [(y, shapes), *_inner(program, y)]]


def _operands(x: Instruction) -> list[str]:
    """Return the names of the operands, which end at the first closing parenthesis."""
    return [name.split()[-1].lstrip("%") for name in x.rest.split(")", 1)[0].split(", ") if name]


def _kind(instructions: Sequence[Instruction]) -> str:
    """Return the kind of a fusion, or of a single instruction."""
    ops = {x.op for x in instructions}
    if any(is_kernel(x) for x in instructions):
        return "kernel"
    if ops & {"convolution", "dot"}:
        return "matmul"
    return "relayout" if ops & MOVES and ops <= MOVES | PASSIVE else "elementwise"


def flops(x: Instruction, shapes: Mapping[str, str]) -> float:
    """Return the floating-point operations of a convolution, the form in which a TPU program has matrix products.

    Args:
      x: the instruction; other operations than a convolution have none.
      shapes: the shapes of its operands by name.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.rest) if x.op == "convolution" else None
    if labels is None:
        return 0
    arrays = [*(shapes[name] for name in _operands(x)[:2]), x.shape]
    left, right, out = (
        dict(zip(names, _sides(a), strict=True)) for names, a in zip(labels.groups(), arrays, strict=True)
    )
    window = re.search(r"window=\{([^}]*)\}", x.rest)
    fields = [field.split("=") for field in window[1].split()] if window else []
    total = 2 * out["b"] * out["f"] * right["i"]
    for axis in range(len(out) - 2):
        spec = {key: values.split("x")[axis] for key, values in fields}
        total *= _pairs(left[str(axis)], right[str(axis)], out[str(axis)], spec)
    return total


def _pairs(size: int, window: int, out: int, spec: Mapping[str, str]) -> int:
    """Return the number of products of one spatial axis of a convolution, without those with padding and holes."""
    stride, low = int(spec.get("stride", 1)), int(spec.get("pad", "0_0").split("_")[0])
    hole, apart = int(spec.get("lhs_dilate", 1)), int(spec.get("rhs_dilate", 1))
    places = (o * stride + w * apart - low for o in range(out) for w in range(window))
    return sum(0 <= place <= (size - 1) * hole and place % hole == 0 for place in places)


def _sides(shape: str) -> list[int]:
    """Return the sides of the first array in a shape."""
    sides = re.search(r"\[([\d,]*)\]", shape)
    return [int(side) for side in sides[1].split(",") if side] if sides else []


def _moved(x: Instruction, shapes: Mapping[str, str]) -> float:
    """Return the bytes that an operation writes to HBM, and those it reads from there, if not more than it writes."""
    written = _in_hbm(x.shape)
    return written + min(hlo.size_in_bytes(x.shape), sum(_in_hbm(shapes.get(name)) for name in _operands(x)))


def _in_hbm(shape: str | None) -> int:
    """Return the bytes of arrays, given by their shapes, that are not in VMEM, which has the mark S(1)."""
    arrays = re.findall(r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?", shape or "")
    return sum(hlo.size_in_bytes(array) for array in arrays if "S(1)" not in array)


def bundles(text: str, shares: Sequence[float] | None = None) -> float:
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
    needed = [share for share in shares or () if share < 1]
    regions = conditional_regions(text) if needed else []
    if shares is None or len(regions) != len(shares):
        shares = needed
    if len(regions) != len(shares):
        raise ValueError(f"{len(regions)} conditional regions, but {len(shares)} conditions of the kernel")
    for region, share in zip(regions, shares, strict=True):
        for inside in region:
            weights[inside] *= share
    return sum(weights)


def conditional_regions(text: str) -> list[range]:
    """Return the bundles of each region that a condition (`pl.when`) of the kernel skips, from its final schedule.

    In the loop over the grid, one branch skips the kernel in the steps of the pipeline without a block. The branches
    directly inside of it are those of conditions, which skip if their predicate is true, and those of the pipeline,
    which skip if it is false. In a short kernel there are only those of conditions, which skip if it is false. A branch
    before the loop skips it on a core without steps.
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
    return [x for x, negated in outer if not negated] or [x for x, _ in outer]


def grid_steps(text: str) -> int:
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
