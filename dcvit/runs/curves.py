"""Training curves of one or more runs as a picture."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from dcvit.errors import ConfigError, escaped
from dcvit.runs import metrics
from dcvit.runs.files import Folder

FORMATS = (".png", ".pdf", ".svg")
# The metrics of evaluators that can be drawn, by preference: the label of the axis, and a factor.
METRICS = {"top1": ("top-1 (%)", 100), "bits_per_byte": ("bits per byte", 1), "loss": ("loss (nats)", 1)}
LINE_STYLES = ("-", "--", ":", "-.")

Row = Mapping[str, Any]
Axes: TypeAlias = Any  # matplotlib.axes.Axes


def plot(workdirs: Sequence[Folder], out: Path) -> None:
    """Draw the training loss of each run, and a metric of its evaluators, over the training step.

    The metric is the first of `METRICS` that the run has.

    Args:
      workdirs: the folders of the runs.
      out: the picture, whose suffix selects the format.

    Raises:
      ConfigError: an unknown picture format, or a workdir without metrics.
      MetricsError: a damaged metrics file.
    """
    if out.suffix not in FORMATS:
        raise ConfigError(f"--out {out}: expected a name ending in .png, .pdf or .svg")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    units: set[str] = set()
    for i, (workdir, name) in enumerate(zip(workdirs, labels(workdirs), strict=True)):
        rows = metrics.read(workdir / "metrics.jsonl")
        if not rows:
            raise ConfigError(f"no metrics.jsonl with rows in {workdir}")
        label = escaped(name).lstrip("_") or "run"  # matplotlib hides labels that begin with an underscore
        losses = _points(rows, "loss")
        left.plot(*zip(*losses, strict=True), color=f"C{i}", label=label, marker="." if len(losses) == 1 else None)
        units.add(_plot_evaluations(right, rows, label, f"C{i}"))
    left.set(xlabel="step", ylabel="training loss (nats)")
    right.set(xlabel="step", ylabel=", ".join(sorted(units)))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            for text in axes.legend().get_texts():
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


def _plot_evaluations(axes: Axes, rows: Sequence[Row], label: str, color: str) -> str:
    """Draw one metric of `METRICS` for each evaluator of a run, and return the label of the metric's axis."""
    present = {name.rpartition("/")[2] for row in rows for name in row if "/" in name}
    metric = next((name for name in METRICS if name in present), "loss")
    unit, factor = METRICS[metric]
    names = sorted({name for row in rows for name in row if name.endswith(f"/{metric}")})
    for name, style in zip(names, LINE_STYLES * len(names), strict=False):
        points = _points(rows, name, factor)
        evaluator = name.removesuffix(f"/{metric}")
        axes.plot(*zip(*points, strict=True), style, color=color, marker=".", label=f"{label} {escaped(evaluator)}")
    return unit


def _points(rows: Sequence[Row], name: str, factor: float = 1) -> list[tuple[int, float]]:
    """Return (step, `factor` · value) of each row that has the metric `name`; null, which was not finite, is NaN."""
    return [(row["step"], factor * (math.nan if row[name] is None else row[name])) for row in rows if name in row]
