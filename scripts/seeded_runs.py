"""Runs of `dcvit train` with several seeds that a benchmark compares, and the command line of such benchmarks.

Runs are in workdirs. A run that is complete is skipped and an interrupted one is resumed, so that the same command
continues an interrupted benchmark.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dcvit import cli, train
from dcvit.runs import metrics
from dcvit.training.seeds import parse_seeds

Measured = TypeVar("Measured", bound=Mapping[str, object])  # with `seeds`
ROOT = Path(__file__).resolve().parent.parent


def run(spec: str, workdir: Path, *overrides: str, metric: str) -> None:
    """Train as `dcvit train` does, with its output hidden; skip a complete run. If it fails, exit.

    Args:
      spec: the config with its arguments.
      workdir: the workdir.
      *overrides: "a.b=value" for the config.
      metric: name of the metric to print, "EVALUATOR/METRIC"; the evaluator runs before the first step and at the end.
    """
    if final(workdir, metric) is not None:
        return
    started = time.monotonic()
    words = ["tensorboard=False", f"evals.{metric.partition('/')[0]}.log_percent=100", *overrides]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        argv = ["--config", spec, "--workdir", str(workdir), *(f"--config.{word}" for word in words)]
        status = cli.run(train.main, argv)
    if status:
        sys.exit(status)
    print(f"{workdir}: {metric} {final(workdir, metric):.4f}, {time.monotonic() - started:.0f} s", flush=True)


def final(workdir: Path, metric: str) -> float | None:
    """Return a metric at the end of a run, None for a run that is not complete."""
    if not (workdir / "config.json").exists():
        return None
    total = json.loads((workdir / "config.json").read_text())["total_steps"]
    rows = metrics.read(workdir / "metrics.jsonl")
    return rows[-1].get(metric) if rows and rows[-1]["step"] == total else None


def complete_seeds(folder: Path, values: Callable[[int], Mapping[str, float | None]]) -> dict[int, dict[str, float]]:
    """Return the values of the seeds that have all of them.

    Args:
      folder: the folder of one arm, with a workdir seedN for each seed N.
      values: from a seed to the final metric of each arm.
    """
    seeds = sorted(int(path.name.removeprefix("seed")) for path in folder.glob("seed*"))
    found = {seed: dict(values(seed)) for seed in seeds}
    return {
        seed: {arm: value for arm, value in each.items() if value is not None}
        for seed, each in found.items()
        if None not in each.values()
    }


def differences(
    values: Mapping[int, Mapping[str, float]], control: Callable[[str], str]
) -> dict[int, dict[str, float]]:
    """Return the difference of each arm to the arm `control(arm)` of the same seed."""
    return {seed: {arm: x - each[control(arm)] for arm, x in each.items()} for seed, each in values.items()}


def step_ms(workdirs: Sequence[Path]) -> float:
    """Return the median time of a step in the rows of all runs."""
    rows = [row for path in workdirs for row in metrics.read(path / "timing.jsonl")]
    return 1e3 * statistics.median(row["step_seconds"] for row in rows if "step_seconds" in row)


def parameters(workdir: Path) -> int:
    """Return the number of parameters of a run."""
    count: int = metrics.read(workdir / "metrics.jsonl")[0]["num_params"]
    return count


def machine() -> str:
    """Return the machine in words."""
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"


def signed(value: float, interval: float, decimals: int = 3) -> str:
    """Return a difference and half the width of its interval, with a typographic minus."""
    return f"{value:+.{decimals}f} ± {interval:.{decimals}f}".replace("-", "−")


def main(
    doc: str | None,
    name: str,
    train_seed: Callable[[Path, int], None],
    collect: Callable[[Path], Measured],
    lines: Callable[[Measured], list[str]],
    about: Callable[[Measured], str],
    tune: Callable[[Path], None] | None = None,
) -> None:
    """Parse the command line, train, and print the table of all seeds that are complete.

    Args:
      doc: the docstring of the benchmark.
      name: the folder of its runs below runs/.
      train_seed: trains all arms in a folder, with a seed.
      collect: from the folder to the measurements, which have `seeds`.
      lines: from the measurements to the table.
      about: from the measurements to the text above the table.
      tune: trains in a folder with every learning rate that is tried; the option `--tune` does so instead.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / name, help="folder for all runs")
    parser.add_argument("--seeds", type=parse_seeds, default=[0, 1, 2, 3, 4], help="seeds, or their number (default 5)")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    if tune:
        parser.add_argument("--tune", action="store_true", help="only train with every learning rate that is tried")
    args = parser.parse_args()
    out = args.out.resolve()
    if tune and args.tune:
        tune(out / "tuning")
        return
    for seed in args.seeds:
        train_seed(out, seed)
    result = collect(out)
    if len(result["seeds"]) < 2:
        sys.exit("no table yet: an interval needs at least two seeds")
    print(f"\n{about(result)}; seeds {', '.join(map(str, result['seeds']))}\n")
    print("\n".join(lines(result)))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
