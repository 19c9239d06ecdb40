"""Command line of benchmarks that compare runs of `dcvit train` with several seeds.

`dcvit.reproduction.seeded` skips complete runs, resumes interrupted ones and refuses runs of another config, so that
the same command continues an interrupted benchmark.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from dcvit import cli
from dcvit.errors import ConfigError, MetricsError
from dcvit.parallel import runtime
from dcvit.reproduction import seeded
from dcvit.runs.files import replace
from dcvit.train import main as train
from dcvit.training.seeds import parse_seeds

Measured = TypeVar("Measured", bound=Mapping[str, object])  # with `seeds`
ROOT = Path(__file__).resolve().parent.parent


def run(spec: str, workdir: Path, *overrides: str, metric: str) -> None:
    """Train with output hidden; skip a complete run. If it fails, exit.

    Args:
      spec: the config with its arguments.
      workdir: the workdir.
      *overrides: "a.b=value" for the config.
      metric: name of the metric to print, "EVALUATOR/METRIC"; the evaluator runs before the first step and at the end.
    """
    words = ["tensorboard=False", f"evals.{metric.partition('/')[0]}.log_percent=100", *overrides]
    if status := seeded.run(functools.partial(cli.run, train), spec, workdir, words, metric):
        sys.exit(status)


def complete_seeds(folders: Mapping[str, Path], metric: str) -> dict[int, dict[str, float]]:
    """Return the final metric of each arm for all seeds that are complete in every arm.

    Args:
      folders: the folder of each arm, with a workdir seedN for each seed N.
      metric: name of the metric.
    """
    names = [path.name.removeprefix("seed") for path in next(iter(folders.values())).glob("seed*")]
    return seeded.finals(folders, sorted(int(name) for name in names if name.isdecimal()), metric)


def differences(
    values: Mapping[int, Mapping[str, float]], control: Callable[[str], str]
) -> dict[int, dict[str, float]]:
    """Return the difference of each arm to the arm `control(arm)` of the same seed."""
    return {seed: {arm: x - each[control(arm)] for arm, x in each.items()} for seed, each in values.items()}


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
    runtime.skip_absent_tpu()  # complete runs are not trained, but their steps may be timed
    try:
        if tune and args.tune:
            tune(args.out.resolve() / "tuning")
            return
        for seed in args.seeds:
            train_seed(args.out.resolve(), seed)
        result = collect(args.out.resolve())
    except (ConfigError, MetricsError) as e:
        sys.exit(f"error: {e}")
    if len(result["seeds"]) < 2:
        sys.exit("no table yet: an interval needs at least two seeds")
    print(f"\n{about(result)}; seeds {', '.join(map(str, result['seeds']))}\n")
    print("\n".join(lines(result)))
    if args.json:
        try:
            text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
        except ValueError:
            sys.exit("error: a measurement is not a finite number")
        replace(args.json, f"{text}\n")
