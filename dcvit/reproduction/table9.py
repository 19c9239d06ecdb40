"""Table 9: ablations of DCMHA's components, on a small language model of embedded text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcvit.reproduction import arms, step_times
from dcvit.reproduction.arms import Arm, Claim, Comparison
from dcvit.reproduction.tables import Cell, Chart, Row, Table

STATIC_ONLY = {"compose": "both", "projection": False, "gate": False, "static": True}
# The paper's perplexities. DCFM++ is R = 2.
ARMS = {
    "TFM++": Arm({"compose": "None"}, 11.68),
    "+static proj.": Arm(STATIC_ONLY, 11.17),
    "+dyn. proj.": Arm({"compose": "both", "gate": False}, 10.95),
    "+dyn. gate": Arm({"compose": "both", "projection": False}, 11.31),
    "+all": Arm({"compose": "both", "static": True}, 10.79),
    "DCFM++ (R=2)": Arm({"compose": "both"}, 10.83),
    "+query-wise": Arm({"compose": "both", "branches": "q"}, 10.89),
    "+key-wise": Arm({"compose": "both", "branches": "k"}, 10.91),
    "+pre comp.": Arm({"compose": "pre"}, 11.54),
    "+post comp.": Arm({"compose": "post"}, 11.05),
    "R=1": Arm({"compose": "both", "rank": 1}, 10.87),
    "R=4": Arm({"compose": "both", "rank": 4}, 10.89),
}
CLAIMS = (
    Claim("DCMHA improves Transformer++", "DCFM++ (R=2)", "TFM++"),
    Claim("static composition improves Transformer++", "+static proj.", "TFM++"),
    Claim("dynamic composition is better than static", "DCFM++ (R=2)", "+static proj."),
    Claim("dynamic projections are better than gates", "+dyn. proj.", "+dyn. gate"),
    Claim("query-wise composition alone improves", "+query-wise", "TFM++"),
    Claim("key-wise composition alone improves", "+key-wise", "TFM++"),
    Claim("post-compose is better than pre-compose", "+post comp.", "+pre comp."),
    Claim("rank 2 is better than rank 1", "DCFM++ (R=2)", "R=1"),
    Claim("rank 4 is not better than rank 2", "DCFM++ (R=2)", "R=4"),
)


def table(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the table of complete runs."""
    found = arms.compare(ARMS, runs, seeds, steps)
    rows = [row(name, found, {"perplexity, paper": arm.paper}) for name, arm in ARMS.items()]
    same, pairs = arms.ordered_pairs(ARMS, found)
    claims = "\n".join(
        f"- {claim.text}: {arms.verdict(claim, found)}" for claim in CLAIMS
    )  # fmt: skip
    notes = (
        about(found, steps),
        f"The order of two configs is that of the paper in {same} of {pairs} pairs.",
        f"The paper's statements, with the difference in bits per byte of paired seeds:\n\n{claims}",
    )
    return Table("table9", "Table 9: ablations of DCMHA's components", rows, notes,
                 Chart("config", "bits per byte", "± 95 %", "perplexity, paper"))  # fmt: skip


def row(name: str, found: Comparison, more: dict[str, Cell]) -> Row:
    """Return the measurements of an arm, with further columns."""
    return {
        "config": name, "parameters": found.parameters[name], "bits per byte": found.means[name],
        "± 95 %": found.intervals[name], "difference": found.differences[name],
        "difference ± 95 %": found.difference_intervals[name], "at equal time": found.equal_time[name],
        "at equal time ± 95 %": found.equal_time_intervals[name], "steps at equal time": found.equal_steps[name],
        "step ms": found.step_ms[name], **more,
    }  # fmt: skip


def about(found: Comparison, steps: int, first: str = "the first row") -> str:
    """Return the settings of the runs as a note; `first` is what the others are compared with."""
    size = ", ".join(f"{key} {value}" for key, value in arms.MODEL.items())
    return (
        f"Models of configs/lm_stdlib.py ({size}) after {steps} steps of 16×{arms.CONTEXT} bytes of Python's standard "
        f"library, evaluated on its validation split. Seeds {', '.join(map(str, found.seeds))}; intervals of Student's "
        f"t distribution. Differences are to {first} with the same seed. “At equal time” are other runs, for as "
        f"many steps as take the time of {first}, each with a complete schedule of the learning rate. Times of a "
        f"step are medians of {step_times.ROUNDS} interleaved rounds, without compilation, data and evaluations, on "
        f"{found.machine}; other processes on the machine change them."
    )
