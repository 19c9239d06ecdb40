"""Figures 3 and 4: scaling curves of small language models, with and without DCMHA, on embedded text.

A model of N parameters trains for a number of tokens proportional to N, as in Table 3. For each family, the line
log L = log a - b·log C is fitted to the validation loss L and the operations C of training. The line of the plain
family reaches a composed model's loss L with (a/L)^(1/b) operations, its compute equivalent (Section 4.1).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from paper import costs, runs
from paper.runs import CONTEXT, Run, cells, language_model, settings
from paper.table import Table, curves

from dcvit.models import lm
from dcvit.models.presets import COMPOSED, GPT3, LLAMA, PYTHIA

STEPS = 1200  # of the largest models
BATCH, WINDOW = 16, CONTEXT // 8  # the paper's windows are an eighth of the context, too
SIZES = ((32, 2, 4), (48, 2, 6), (64, 3, 8), (80, 3, 10))  # width, depth, heads
DC = {**COMPOSED, "qk_norm": "rmsnorm", "window": WINDOW}
PLAIN = {"compose": None, "qk_norm": None}
FAMILIES: dict[str, dict[str, object]] = {
    "Transformer": GPT3 | PLAIN, "DCFormer": GPT3 | DC, "Transformer++": LLAMA | PLAIN, "DCFormer++": LLAMA | DC,
    "Pythia": PYTHIA | PLAIN, "DCPythia": PYTHIA | DC,
}  # fmt: skip
# Figure: by pair of families (plain, composed) the paper's compute equivalent.
FIGURES = {
    "figure3": {("Transformer", "DCFormer"): "1.87 at 834M", ("Transformer++", "DCFormer++"): "1.67 at 834M"},
    "figure4": {("Pythia", "DCPythia"): "–"},
}


class Point(NamedTuple):
    """A model to train: its fields, number of parameters, training steps, and operations of the whole training."""

    fields: Mapping[str, object]
    parameters: int
    steps: int
    operations: float


def fields_of(family: str, size: tuple[int, int, int]) -> dict[str, object]:
    """Return the fields of the model of a family, a key of `FAMILIES`, and a size (width, layers, heads)."""
    width, depth, heads = size
    gated = FAMILIES[family].get("mlp") == "swiglu"
    shape = {"width": width, "depth": depth, "num_heads": heads}
    return {**FAMILIES[family], **shape, "mlp_dim": math.ceil(8 / 3 * width / 8) * 8 if gated else None}


def points(name: str, steps: int) -> dict[str, list[Point]]:
    """Return, by family, the models of the figure `name`, a key of `FIGURES`, from the smallest to the largest.

    All families have the steps of plain Transformer++ of the same size, as in Table 3; the largest size has `steps`.
    """

    def model(family: str, size: tuple[int, int, int]) -> lm.LM:
        return lm.Model(runs.VOCABULARY, **fields_of(family, size), context=CONTEXT)

    reference = [costs.parameters(model("Transformer++", size)) for size in SIZES]
    found: dict[str, list[Point]] = {}
    for family in (family for pair in FIGURES[name] for family in pair):
        found[family] = []
        for size, parameters in zip(SIZES, reference, strict=True):
            count, net = max(1, round(steps * parameters / reference[-1])), model(family, size)
            operations = float(costs.training_operations(net, CONTEXT)) * BATCH * count
            found[family].append(Point(fields_of(family, size), costs.parameters(net), count, operations))
    return found


def run_of(family: str, point: Point, folder: Path) -> Run:
    """Return the training run of a model, in a folder of its own below `folder`."""
    name = f"{family}-{point.fields['width']}x{point.fields['depth']}"
    return language_model(runs.folder_of(folder, name), point.fields, point.steps)


def fit(operations: Sequence[float], losses: np.ndarray) -> tuple[float, float]:
    """Return (log a, b) of the line of least squares through (log operations, log loss), one point for each model."""
    slope, start = np.polyfit(np.log(operations), np.log(losses), 1)
    return float(start), -float(slope)


def equivalents(plain: Sequence[Point], composed: Sequence[Point], losses: np.ndarray) -> list[float]:
    """Return, for each composed model, the operations of a plain model with its loss, divided by its own operations.

    `losses` has those of the plain and the composed models, mean over seeds (2 × sizes).
    """
    log_a, b = fit([point.operations for point in plain], losses[0])
    same_loss = np.exp((log_a - np.log(losses[1])) / b)
    return [operations / point.operations for operations, point in zip(same_loss.tolist(), composed, strict=True)]


def bootstrapped(plain: Sequence[Point], composed: Sequence[Point], losses: np.ndarray) -> np.ndarray:
    """Return the ends of the 95 % interval of `equivalents`, by bootstrap; `losses`: seeds × 2 × sizes."""
    chosen = np.random.default_rng(0).integers(len(losses), size=(2000, len(losses)))
    found = [equivalents(plain, composed, losses[some].mean(axis=0)) for some in chosen]
    return np.percentile(found, [2.5, 97.5], axis=0).T


def figure(name: str, folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the table of a figure: loss, operations and compute equivalents of its models."""
    found = points(name, steps)
    each = {f"{family} {i}": (family, point) for family in found for i, point in enumerate(found[family])}
    values = runs.train({name: run_of(*model, folder) for name, model in each.items()}, seeds)
    rows, notes = [], [settings(steps, seeds)]
    for pair, paper in FIGURES[name].items():
        plain, composed = (found[family] for family in pair)
        losses = np.array([[values[f"{family} {i}"] for i in range(len(SIZES))] for family in pair])
        losses = np.moveaxis(losses, -1, 0)  # seeds × 2 × sizes
        ratios, intervals = equivalents(plain, composed, losses.mean(axis=0)), bootstrapped(plain, composed, losses)
        for k, family in enumerate(pair):
            for i, point in enumerate(found[family]):
                rows.append({
                    "family": family, "width × depth": f"{point.fields['width']} × {point.fields['depth']}",
                    "parameters": point.parameters, "steps": point.steps, "training FLOPs": point.operations,
                    **cells(values[f"{family} {i}"], "bits per byte", "± 95 %"),
                    "compute equivalent": ratios[i] if k else None,
                    "95 % interval": "{:.2f}–{:.2f}".format(*intervals[i]) if k else None,
                    "paper": paper if k else None,
                })  # fmt: skip
            log_a, b = fit([point.operations for point in found[family]], losses[:, k].mean(axis=0))
            notes.append(f"{family}: L = {math.exp(log_a):.3g} · C^-{b:.4f}")
        lower = (losses[:, 1] < losses[:, 0]).all(axis=0).sum()
        notes.append(f"{pair[1]} has a lower loss than {pair[0]} with every seed at {lower} of {len(SIZES)} sizes")
    picture = curves(rows, "family", "training FLOPs", "bits per byte", "log")
    return Table(name, f"Figure {name[-1]}: scaling curves", rows, notes, picture)


figure3, figure4 = (functools.partial(figure, name) for name in FIGURES)
