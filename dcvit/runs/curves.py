"""Training curves of one or more runs as a picture."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from dcvit.errors import ConfigError, escaped
from dcvit.runs.files import Folder
from input_pipeline.optional import require

FORMATS = (".png", ".pdf", ".svg")
# The metrics of evaluators that can be drawn, by preference: the label of the axis, and a factor.
METRICS = {
    "top1": ("top-1 (%)", 100), "mean_ap": ("mean AP (%)", 100), "bits_per_byte": ("bits per byte", 1),
    "loss": ("loss (nats)", 1),
}  # fmt: skip
LINE_STYLES = ("-", "--", ":", "-.")

Row = Mapping[str, Any]
Axes: TypeAlias = Any  # matplotlib.axes.Axes


def check_picture(out: Path) -> None:
    """Raise ConfigError if the suffix of a picture's name is not in `FORMATS`."""
    if out.suffix not in FORMATS:
        raise ConfigError(f"--out {out}: expected a name ending in .png, .pdf or .svg")


def plot(runs: Sequence[tuple[str, Sequence[Row]]], out: Path, metric: str | None = None) -> None:
    """Draw the training loss of each run, and a metric of its evaluators, over the training step.

    Args:
      runs: the name and the rows of metrics of each run.
      out: the picture, whose suffix selects the format.
      metric: the metric, "EVALUATOR/METRIC"; None is the first of `METRICS` that a run has.

    Raises:
      ConfigError: an unknown picture format.
    """
    check_picture(out)
    require("matplotlib").use("Agg")
    plt = require("matplotlib.pyplot")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    units: set[str] = set()
    for i, (name, rows) in enumerate(runs):
        label = escaped(name).lstrip("_") or "run"  # matplotlib hides labels that begin with an underscore
        losses = _points(rows, "loss")
        left.plot(*zip(*losses, strict=True), color=f"C{i}", label=label, marker="." if len(losses) == 1 else None)
        units.add(_plot_evaluations(right, rows, (label, f"C{i}"), metric))
    left.set(xlabel="step", ylabel="training loss (nats)")
    right.set(xlabel="step", ylabel=", ".join(sorted(units)))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            for text in (*axes.legend().get_texts(), axes.yaxis.label):
                text.set_parse_math(False)  # a name may contain $
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # such characters are drawn as boxes
        figure.savefig(out, dpi=120)
    plt.close(figure)


def labels(workdirs: Sequence[Folder]) -> list[str]:
    """Return a label for each path: its last parts, as many as distinguish all paths, or one if none do."""
    parts = [PurePosixPath(str(workdir)).parts for workdir in workdirs]
    depths = range(1, max(map(len, parts), default=0) + 1)
    depth = next((n for n in depths if len({part[-n:] for part in parts}) == len(parts)), 1)
    return ["/".join(part[-depth:]) for part in parts]


def _plot_evaluations(axes: Axes, rows: Sequence[Row], style: tuple[str, str], metric: str | None) -> str:
    """Draw one metric of a run, for each evaluator that has it, and return the label of the metric's axis.

    `style` is the label and the color of the run. `metric` is explained at `plot`.
    """
    label, color = style
    chosen = (metric or "").rpartition("/")[2]
    present = {name.rpartition("/")[2] for row in rows for name in row if "/" in name}
    chosen = chosen or next((name for name in METRICS if name in present), "loss")
    unit, factor = METRICS.get(chosen, (escaped(chosen), 1))
    found = {name for row in rows for name in row if name.endswith(f"/{chosen}")}
    names = sorted(found & {metric} if metric else found)
    for name, line in zip(names, LINE_STYLES * len(names), strict=False):
        points = _points(rows, name, factor)
        shown = escaped(name.removesuffix(f"/{chosen}"))
        axes.plot(*zip(*points, strict=True), line, color=color, marker=".", label=f"{label} {shown}")
    return unit


def _points(rows: Sequence[Row], name: str, factor: float = 1) -> list[tuple[int, float]]:
    """Return (step, `factor` · value) of each row that has the metric `name`; null, which was not finite, is NaN."""
    return [(row["step"], factor * (math.nan if row[name] is None else row[name])) for row in rows if name in row]
