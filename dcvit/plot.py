"""Training curves: `python -m dcvit.plot WORKDIR … --out curves.png`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from dcvit import cli
from dcvit.checkpoint.files import Folder
from dcvit.errors import ConfigError
from dcvit.runs import metrics

# What is drawn of the evaluations: the first of these that a run has. Its unit, and what it is multiplied by.
METRICS = {"top1": ("top-1 (%)", 100), "bits_per_byte": ("bits per byte", 1), "loss": ("loss (nats)", 1)}


def plot(workdirs: Sequence[Folder], out: Path) -> None:
    """Draws each run's training loss and its evaluators' accuracy, or bits per byte, against the step in one picture.

    Raises:
      ConfigError: a workdir without metrics, or a kind of picture that is not known.
    """
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--out {out}: expected a name ending in .png, .pdf or .svg")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    units: set[str] = set()
    for i, workdir in enumerate(workdirs):
        rows = metrics.read(workdir / "metrics.jsonl")
        if not rows:
            raise ConfigError(f"no metrics.jsonl with rows in {workdir}")
        run = workdir.name.lstrip("_") or "run"  # matplotlib hides labels that begin with an underscore
        losses = [(row["step"], _number(row["loss"])) for row in rows if "loss" in row]
        left.plot(*zip(*losses, strict=True), color=f"C{i}", label=run, marker="." if len(losses) == 1 else None)
        seen = {name.rpartition("/")[2] for row in rows for name in row if "/" in name}
        metric = next((name for name in METRICS if name in seen), "loss")
        units.add(METRICS[metric][0])
        names = sorted({name for row in rows for name in row if name.endswith(f"/{metric}")})
        for name, style in zip(names, ("-", "--", ":", "-.") * len(names), strict=False):
            points = [(row["step"], METRICS[metric][1] * _number(row[name])) for row in rows if name in row]
            label = f"{run} {name.removesuffix(f'/{metric}')}"
            right.plot(*zip(*points, strict=True), style, color=f"C{i}", marker=".", label=label)
    left.set(xlabel="step", ylabel="training loss (nats)")
    right.set(xlabel="step", ylabel=", ".join(sorted(units)))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _number(value: float | None) -> float:
    """A metric; one that was not finite, which files say as null, leaves a gap."""
    return math.nan if value is None else value


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = cli.Parser(prog="dcvit plot", description="Draw the training curves of one or more runs.")
    parser.add_argument("workdirs", nargs="+", type=cli.folder)
    parser.add_argument("--out", type=cli.path, default=Path("curves.png"))
    args, rest = parser.parse(argv)
    if rest:
        raise ConfigError(f"plot takes no --config.{rest[0]}")
    plot(args.workdirs, args.out)
    print(f"curves: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
