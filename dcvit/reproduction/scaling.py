"""Figures 3 and 4: scaling curves of small language models, with and without DCMHA, on embedded text.

A model of N parameters trains for a number of tokens proportional to N, as in Table 3. For each family, the line
log L = log a - b·log C is fitted to the validation loss L and the operations C of training. The line of the plain
family reaches a composed model's loss L with (a/L)^(1/b) operations, its compute equivalent (Section 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from dcvit.models.presets import COMPOSED, GPT3, LLAMA, PYTHIA
from dcvit.reproduction import arms, costs
from dcvit.reproduction.arms import CONTEXT
from dcvit.reproduction.seeded import Run, all_finals, folder_of
from dcvit.reproduction.tables import Cell, Curves, Table

STEPS = 1200  # of the largest models
BATCH, WINDOW = 16, CONTEXT // 8  # the paper's windows are an eighth of the context, too
SIZES = ((32, 2, 4), (48, 2, 6), (64, 3, 8), (80, 3, 10))  # width, depth, heads
QK_NORM = {"qk_norm": "rmsnorm"}
DC = {**COMPOSED, **QK_NORM, "window": WINDOW}
PLAIN = {"compose": None, "qk_norm": None}
FAMILIES: dict[str, dict[str, object]] = {
    "Transformer": GPT3 | PLAIN, "DCFormer": GPT3 | DC, "Transformer++": LLAMA | PLAIN, "DCFormer++": LLAMA | DC,
    "Pythia": PYTHIA | PLAIN, "DCPythia": PYTHIA | DC,
}  # fmt: skip
RESAMPLES = 2000  # of the bootstrap


class Figure(NamedTuple):
    """A figure: its title, and by pair of model families (plain, composed) the paper's compute equivalent."""

    title: str
    pairs: Mapping[tuple[str, str], str]


FIGURES = {
    "figure3": Figure(
        "Figure 3: scaling curves of Transformers and DCFormers",
        {("Transformer", "DCFormer"): "1.87 at 834M", ("Transformer++", "DCFormer++"): "1.67 at 834M"},
    ),
    "figure4": Figure("Figure 4: scaling curves of Pythia and DCPythia", {("Pythia", "DCPythia"): "–"}),
}


class Point(NamedTuple):
    """A model to train: its fields, number of parameters, training steps, and operations of the whole training."""

    fields: Mapping[str, object]
    parameters: int
    steps: int
    operations: float


def points(name: str, steps: int) -> dict[str, list[Point]]:
    """Return, by family, the models of the figure `name`, a key of `FIGURES`, from the smallest to the largest.

    All families have the steps of plain Transformer++ of the same size, as in Table 3; the largest size has `steps`.
    """
    sizes = [costs.parameters(arms.language_model(fields_of("Transformer++", size))) for size in SIZES]
    found: dict[str, list[Point]] = {}
    for family in (family for pair in FIGURES[name].pairs for family in pair):
        found[family] = []
        for shape, size in zip(SIZES, sizes, strict=True):
            fields, count = fields_of(family, shape), max(1, round(steps * size / sizes[-1]))
            net = arms.language_model(fields)
            operations = float(costs.training_operations(net, CONTEXT)) * BATCH * count
            found[family].append(Point(fields, costs.parameters(net), count, operations))
    return found


def fields_of(family: str, size: tuple[int, int, int]) -> dict[str, object]:
    """Return the fields of the model of a family, a key of `FAMILIES`, and a size (width, layers, heads)."""
    width, depth, heads = size
    shape = {"width": width, "depth": depth, "num_heads": heads, "mlp_dim": None}
    if FAMILIES[family].get("mlp") == "swiglu":
        shape["mlp_dim"] = math.ceil(8 / 3 * width / 8) * 8
    return {**FAMILIES[family], **shape}


def plan(name: str, folder: Path, steps: int) -> list[Run]:
    """Return the training runs of a figure's models in a list."""
    return [*runs_of(points(name, steps), folder).values()]


def runs_of(found: Mapping[str, Sequence[Point]], folder: Path) -> dict[str, Run]:
    """Return the training run of each model of `found` (see `points`) by "FAMILY NUMBER", number 0 the smallest."""
    return {
        f"{family} {i}": arms.language_model_run(
            folder_of(folder, f"{family}-{point.fields['width']}x{point.fields['depth']}"), point.fields, point.steps
        )
        for family, each in found.items()
        for i, point in enumerate(each)
    }


class Line(NamedTuple):
    """The line log L = log a - b·log C."""

    log_a: float
    b: float

    def operations(self, loss: float) -> float:
        """Return the number of training operations C at which the line has the given loss L."""
        return math.exp((self.log_a - math.log(loss)) / self.b)


def fit(operations: Sequence[float], losses: Float64[np.ndarray, "sizes"]) -> Line:
    """Return the line of least squares through (log of operations, log of loss), one point for each model."""
    slope, start = np.polyfit(np.log(operations), np.log(losses), 1)
    return Line(float(start), -float(slope))


def equivalents(
    plain: Sequence[Point], composed: Sequence[Point], losses: Float64[np.ndarray, "2 sizes"]
) -> list[float]:
    """Return, for each composed model, the operations of a plain model with its loss, divided by its own operations.

    Args:
      plain, composed: the models of two families, from the smallest to the largest.
      losses: the plain models' losses, then the composed models', mean over seeds.
    """
    line = fit([point.operations for point in plain], losses[0])
    return [line.operations(loss) / point.operations for loss, point in zip(losses[1], composed, strict=True)]


def bootstrapped(
    plain: Sequence[Point], composed: Sequence[Point], losses: Float64[np.ndarray, "seeds 2 sizes"]
) -> Float64[np.ndarray, "sizes 2"]:
    """Return, for each size, the ends of the 95 % interval of `equivalents`, by resampling seeds (bootstrap)."""
    draw = np.random.default_rng(0)
    chosen = draw.integers(len(losses), size=(RESAMPLES, len(losses)))
    found = [equivalents(plain, composed, losses[some].mean(axis=0)) for some in chosen]
    return np.percentile(found, [2.5, 97.5], axis=0).T


def table(name: str, folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the table of a figure with the results of the runs of `plan`, which must be complete."""
    found = points(name, steps)
    values = all_finals(runs_of(found, folder), seeds)
    means = arms.over_seeds(values)
    losses = {
        family: np.array([[values[seed][f"{family} {i}"] for i in range(len(SIZES))] for seed in seeds])
        for family in found
    }
    rows = []
    for (plain, composed), paper in FIGURES[name].pairs.items():
        pair = np.stack([losses[plain], losses[composed]], axis=1)
        ratios = equivalents(found[plain], found[composed], pair.mean(axis=0))
        intervals = bootstrapped(found[plain], found[composed], pair)
        for family in (plain, composed):
            for i, point in enumerate(found[family]):
                more: dict[str, Cell] = {"compute equivalent": None, "95 % interval": None, "paper": None}
                if family == composed:
                    low, high = intervals[i]
                    more = {"compute equivalent": ratios[i], "95 % interval": f"{low:.2f}–{high:.2f}", "paper": paper}
                rows.append({
                    "family": family, "width × depth": f"{point.fields['width']} × {point.fields['depth']}",
                    "parameters": point.parameters, "steps": point.steps, "training FLOPs": point.operations,
                    **means[f"{family} {i}"].cells("bits per byte", "± 95 %"), **more,
                })  # fmt: skip
    return Table(name, FIGURES[name].title, rows, _notes(name, found, losses, seeds, steps),
                 Curves("family", "training FLOPs", "bits per byte", "± 95 %"))  # fmt: skip


def _notes(
    name: str, found: Mapping[str, Sequence[Point]], losses: Mapping[str, np.ndarray], seeds: Sequence[int], steps: int
) -> tuple[str, ...]:
    """Return notes below a table: the settings of the runs, the fitted lines, and where composition lowers the loss."""
    lines = []
    for family, each in found.items():
        line = fit([point.operations for point in each], losses[family].mean(axis=0))
        lines.append(f"- {family}: L = {math.exp(line.log_a):.3g} · C^-{line.b:.4f}")
    lower = []
    for plain, composed in FIGURES[name].pairs:
        difference = losses[composed] - losses[plain]
        sizes = [i for i in range(len(SIZES)) if (difference[:, i] < 0).all()]
        lower.append(
            f"- {composed} has a lower loss than {plain} with every seed at {len(sizes)} of {len(SIZES)} sizes"
        )
    return (
        f"Models of configs/lm_stdlib.py with the architectures of the paper, {BATCH}×{CONTEXT} bytes a step of "
        f"Python's standard library, windows of {WINDOW} in every other layer of composed models. The largest train "
        f"for {steps} steps, the others for as many fewer as plain models of their size have fewer parameters. Seeds "
        f"{', '.join(map(str, seeds))}. FLOPs by dcvit.models.flops. The compute equivalent is how many times the "
        "operations a plain model needs for the same loss, on the fitted line of the plain family; its interval is "
        f"that of {RESAMPLES} resamples of the seeds. The paper's models have 405M parameters and more.",
        "Fitted lines of the mean loss in bits per byte:\n\n" + "\n".join(lines),
        "\n".join(lower),
    )
