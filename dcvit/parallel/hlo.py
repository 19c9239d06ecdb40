"""Collective operations of a compiled program, parsed from the text of its optimized HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BITS = {
    "pred": 8,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "s4": 4,
    "u4": 4,
}  # other names end in their number of bits
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\((.*)$")
CALLED = re.compile(
    r"(calls|body|condition|to_apply|branch_computations|called_computations)=\{?([^,}\s]+(?:, %[^,}\s]+)*)"
)


class Collective(NamedTuple):
    """One collective operation of a program.

    Fields:
      kind: one of `KINDS`.
      shape: the shape of the result in HLO's notation.
      bytes: the size of the result on one device.
      times: how many times the operation is executed per run of the program.
      op_name: the JAX operation it comes from.
    """

    kind: str
    shape: str
    bytes: int
    times: int
    op_name: str


def collectives(text: str) -> list[Collective]:
    """Return the collective operations of a compiled program.

    An operation that XLA splits into several instructions to overlap it with computation counts once. The body of a
    loop counts as often as the constant in the loop's condition, which is the length of a scan. An all-reduce of which
    each device keeps only its part counts as a reduce-scatter.

    Args:
      text: the optimized HLO, `compiled.as_text()`.
    """
    computations, entry = _computations(text)
    times = _times(computations, entry)
    found: dict[str, Collective] = {}
    for name, lines in computations.items():
        for number, (shape, op, rest) in enumerate(lines):
            kind = op.removesuffix("-start")
            if kind not in KINDS or not times.get(name):
                continue
            if kind == "all-reduce" and "reduce-scatter" in name:
                kind, shape = "reduce-scatter", lines[-1][0]
            size = _bytes(_result(shape, op))
            channel = re.search(r"channel_id=(\d+)", rest)
            op_name = re.search(r'op_name="([^"]*)"', rest)
            one = Collective(kind, shape, size, times[name], op_name[1] if op_name else "")
            found.setdefault(channel[1] if channel else f"{name} {number}", one)
    return list(found.values())


def totals(found: list[Collective]) -> dict[str, tuple[int, int]]:
    """Returns, for each kind of collective in a program, the executions per run and the bytes of their results."""
    return {
        kind: (sum(c.times for c in found if c.kind == kind), sum(c.times * c.bytes for c in found if c.kind == kind))
        for kind in KINDS
        if any(c.kind == kind for c in found)
    }


Lines = list[tuple[str, str, str]]  # instructions of a computation: result shape, operation, operands and attributes


def _computations(text: str) -> tuple[dict[str, Lines], str]:
    """Return the instructions of each computation, and the name of the entry computation."""
    computations: dict[str, Lines] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if header := COMPUTATION.match(line):
            lines = computations[header[1]] = []
            entry = header[1] if line.startswith("ENTRY") else entry
        elif instruction := INSTRUCTION.match(line):
            lines.append((instruction[1], instruction[2], instruction[3]))
    return computations, entry


def _times(computations: dict[str, Lines], entry: str) -> dict[str, int]:
    """Return how often each computation is executed, starting from the entry computation."""
    times: dict[str, int] = {}

    def visit(name: str, count: int) -> None:
        times[name] = times.get(name, 0) + count
        for _, op, rest in computations.get(name, ()):
            called = dict(_called(rest))
            loops = _trips(computations.get(called.get("condition", ""), [])) if op == "while" else 1
            for role, callee in _called(rest):
                if role != "condition":
                    visit(callee, count * loops)

    visit(entry, 1)
    return times


def _called(rest: str) -> Iterator[tuple[str, str]]:
    """Yield the computations that an instruction calls, each with its role."""
    for role, names in CALLED.findall(rest):
        for name in names.split(", "):
            yield role, name.lstrip("%")


def _trips(condition: Lines) -> int:
    """Return the constant with which a loop's condition compares its counter, or 1."""
    constants = [
        int(found[1]) for _, op, rest in condition if op == "constant" and (found := re.match(r"(\d+)\)", rest))
    ]
    return max(constants, default=1)


def _result(shape: str, op: str) -> str:
    """Return the result in the tuple (operands, results, …) of a start operation: the second half of its arrays."""
    if not op.endswith("-start") or op == "all-reduce-start":
        return shape
    arrays = re.findall(r"[a-z]\w*\[[\d,]*\]", shape)
    arrays = [array for array in arrays if not array.startswith("u32[]")]
    return " ".join(arrays[len(arrays) // 2 :])


def _bytes(shape: str) -> int:
    """Return the size of all arrays in a shape."""
    total = 0
    for dtype, sides in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape):
        digits = re.findall(r"\d+", dtype)
        bits = BITS.get(dtype, int(digits[0]) if digits else 0)
        total += math.prod(map(int, filter(None, sides.split(",")))) * bits // 8
    return total
