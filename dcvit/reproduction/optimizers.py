"""AdamW and Muon with plain and composed attention, at four learning rates: a comparison that is not in the paper.

The models are those of `dcvit.reproduction.arms` on embedded text. The table has all learning rates, because the best
one may differ between optimizers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from dcvit.reproduction import arms, speeds
from dcvit.reproduction.seeded import Run, folder_of
from dcvit.reproduction.tables import Chart, Row, Table

OPTIMIZERS: dict[str, dict[str, object]] = {"AdamW": {}, "Muon": {"optax_name": "muon", "optax": {}}}
COMPOSE = {"plain": None, "composed": "both"}
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)


def runs(folder: Path, steps: int) -> dict[tuple[str, str, float], Run]:
    """Return the training runs by (optimizer, attention, learning rate)."""
    found = {}
    for optimizer, attention, lr in itertools.product(OPTIMIZERS, COMPOSE, RATES):
        path = folder_of(folder, f"{optimizer} {attention} {lr:g}")
        run = arms.language_model_run(path, {**arms.MODEL, "compose": COMPOSE[attention]}, steps)
        overrides = {**run.overrides, **OPTIMIZERS[optimizer], "lr": lr}
        found[optimizer, attention, lr] = run._replace(overrides=overrides)
    return found


def plan(folder: Path, steps: int) -> list[Run]:
    """Return the training runs in a list; the times of their steps, which the table shows, are measured first."""
    _times(folder)
    return [*runs(folder, steps).values()]


def table(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return a table of complete runs: bits per byte, and differences between attentions and between optimizers."""
    found = runs(folder, steps)
    times = _times(folder)
    rows: list[Row] = []
    for (optimizer, attention, lr), run in found.items():
        plain, adamw = found[optimizer, "plain", lr], found["AdamW", attention, lr]
        row = arms.measure({"run": run}, seeds).means["run"].cells("bits per byte", "± 95 %")
        for column, first in (("to plain", plain), ("to AdamW", adamw)):
            difference = arms.measure({"first": first, "run": run}, seeds).differences["run"]
            row |= dict.fromkeys((column, f"{column} ± 95 %")) if run is first else difference.cells(column)
        rows.append({"run": f"{optimizer} {attention} {lr:g}", **row, "step ms": times.ms[f"{optimizer} {attention}"]})
    size = ", ".join(f"{key} {value}" for key, value in arms.MODEL.items())
    note = (
        f"Models of configs/lm_stdlib.py ({size}) after {steps} steps of 16×{arms.CONTEXT} bytes of Python's standard "
        f"library, evaluated on its validation split; the number is the learning rate. Seeds "
        f"{', '.join(map(str, seeds))}; intervals of Student's t distribution. Differences have the same seed and "
        "learning rate: to plain attention with the same optimizer, and to AdamW with the same attention. Times of a "
        f"step are medians of {speeds.ROUNDS} interleaved rounds, without compilation, data and evaluations, on "
        f"{times.machine}; other processes on the machine change them."
    )
    return Table("optimizers", "AdamW and Muon with plain and composed attention", rows, (note,),
                 Chart("run", "bits per byte", "± 95 %"))  # fmt: skip


def _times(folder: Path) -> speeds.StepTimes:
    timed = {f"{name} {attention}": run for (name, attention, lr), run in runs(folder, 1).items() if lr == RATES[0]}
    return speeds.step_times(timed, folder)
