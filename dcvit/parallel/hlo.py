"""Instructions and collective operations of a compiled program, parsed from the text of its optimized HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
CALLED = re.compile(
    r"(calls|body|condition|to_apply|branch_computations|called_computations)=\{?([^,}\s]+(?:, %[^,}\s]+)*)"
)
KERNEL_METADATA = re.compile(r"kernel_metadata=(\{[^{}]*\})")  # JSON, which XLA writes on several lines


class Instruction(NamedTuple):
    """One line of a computation: `name = shape op(rest`, where `rest` holds operands and attributes."""

    name: str
    shape: str
    op: str
    rest: str

    @property
    def op_name(self) -> str:
        """The JAX operation for which XLA made the instruction, or an empty string."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


Computations = dict[str, list[Instruction]]


class Collective(NamedTuple):
    """One collective operation of a program.

    Fields:
      kind: one of `KINDS`.
      shape: the shape of the result in HLO's notation.
      bytes: the size of the result on one device.
      times: how many times the operation is executed per run of the program.
    """

    kind: str
    shape: str
    bytes: int
    times: int


def collectives(text: str) -> list[Collective]:
    """Return the collective operations of a compiled program.

    An operation that XLA splits into several instructions to overlap it with computation counts once. The body of a
    loop counts as often as the constant in the loop's condition, which is the length of a scan. An all-reduce of which
    each device keeps only its part counts as a reduce-scatter.

    Args:
      text: the optimized HLO, `compiled.as_text()`.
    """
    program, entry = computations(text)
    runs = times(program, entry)
    found: dict[str, Collective] = {}
    for name, lines in program.items():
        for number, line in enumerate(lines):
            kind, shape = line.op.removesuffix("-start"), line.shape
            if kind not in KINDS or not runs.get(name):
                continue
            if kind == "all-reduce" and "reduce-scatter" in name:
                kind, shape = "reduce-scatter", lines[-1].shape
            one = Collective(kind, shape, size_in_bytes(_result(shape, line.op)), runs[name])
            found.setdefault(_operation(line) or f"{name} {number}", one)
    return list(found.values())


def _operation(line: Instruction) -> str | None:
    """Return a key shared by all instructions of one collective operation; None for an operation of one instruction.

    It is XLA's number of a split operation, or the channel, which is the same for all operations of `jax.shard_map`.
    """
    chain = re.search(r'chain_id="(\d+)"', line.rest)
    channel = None if "shard_map" in line.op_name else re.search(r"channel_id=(\d+)", line.rest)
    return f"chain {chain[1]}" if chain else channel and channel[1]


def totals(found: list[Collective]) -> dict[str, tuple[int, int]]:
    """Return (executions per run, bytes of the results) for each kind of collective in a program."""
    return {
        kind: (sum(c.times for c in found if c.kind == kind), sum(c.times * c.bytes for c in found if c.kind == kind))
        for kind in KINDS
        if any(c.kind == kind for c in found)
    }


def computations(text: str) -> tuple[Computations, str]:
    """Return the instructions of each computation of a program, and the name of the entry computation."""
    found: Computations = {}
    entry, lines = "", []
    text = KERNEL_METADATA.sub(lambda m: m[0].replace("\n", " "), text)
    for line in text.splitlines():
        if header := COMPUTATION.match(line):
            lines = found[header[1]] = []
            entry = header[1] if line.startswith("ENTRY") else entry
        elif instruction := INSTRUCTION.match(line):
            lines.append(Instruction(*instruction.groups()))
    return found, entry


def times(program: Computations, entry: str) -> dict[str, int]:
    """Return how often each computation is executed per run of the program, which starts from the entry computation.

    The body of a loop whose length the compiler does not know counts once.
    """
    found: dict[str, int] = {}

    def visit(name: str, count: int) -> None:
        found[name] = found.get(name, 0) + count
        for line in program.get(name, ()):
            callees = list(called(line.rest))
            condition = program.get(dict(callees).get("condition", ""), [])
            loops = _trips(line, condition) if line.op == "while" else 1
            for role, callee in callees:
                if role != "condition":
                    visit(callee, count * loops)

    visit(entry, 1)
    return found


def called(rest: str) -> Iterator[tuple[str, str]]:
    """Yield (role, name) of each computation that an instruction calls; the role is an attribute, such as "body"."""
    for role, names in CALLED.findall(rest):
        for name in names.split(", "):
            yield role, name.lstrip("%")


def _trips(loop: Instruction, condition: Sequence[Instruction]) -> int:
    """Return how often a loop runs, as the compiler states it, else the constant in the loop's condition, or 1."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    constants = [int(found[1]) for x in condition if x.op == "constant" and (found := re.match(r"(\d+)\)", x.rest))]
    return max(constants, default=1)


def _result(shape: str, op: str) -> str:
    """Return the shape of an instruction's result: of the tuple (operands, results, …) of a start, the second half."""
    if not op.endswith("-start") or op == "all-reduce-start":
        return shape
    arrays = re.findall(r"[a-z]\w*\[[\d,]*\]", shape)
    arrays = [array for array in arrays if not array.startswith("u32[]")]
    return " ".join(arrays[len(arrays) // 2 :])


def size_in_bytes(shape: str) -> int:
    """Return the bytes of all arrays in a shape in HLO's notation, without padding."""
    total = 0
    for dtype, sides in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape):
        number = re.search(r"\d+", dtype)  # of bits, as in bf16, s4 and f8e4m3fn
        bits = 8 if dtype == "pred" else int(number[0]) if number else 0
        total += math.prod(map(int, filter(None, sides.split(",")))) * bits // 8
    return total
