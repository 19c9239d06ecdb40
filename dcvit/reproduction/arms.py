"""Comparison of small language models that differ in their attention, trained on embedded text with several seeds.

The runs are those of `dcvit train`, in the folders RUNS/ARM/seedN: a complete run is skipped and another is resumed.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dcvit.runs import metrics
from dcvit.training.seeds import summarize, workdir_of

Train = Callable[[Sequence[str]], int]  # the command `dcvit train`, which returns its exit status
METRIC = "validation/bits_per_byte"
CONTEXT, STEPS = 64, 600
MODEL = {"width": 64, "depth": 2, "mlp_dim": 176, "num_heads": 8}


class Arm(NamedTuple):
    """One model: the fields in which it differs from `MODEL`, and the paper's value."""

    fields: Mapping[str, object]
    paper: float | None = None


class Claim(NamedTuple):
    """A statement of the paper that one arm has a lower loss than another."""

    text: str
    better: str
    worse: str


class Comparison(NamedTuple):
    """Measurements of each arm; all arms have the same seeds.

    Fields:
      means, intervals: METRIC after all steps, and half the width of its 95 % interval.
      differences, difference_intervals: to the first arm with the same seed.
      equal_time: METRIC, by interpolation of evaluations, after the time that the first arm trains.
      step_ms: the median time of a step.
      parameters: their number.
    """

    seeds: Sequence[int]
    means: Mapping[str, float]
    intervals: Mapping[str, float | None]
    differences: Mapping[str, float]
    difference_intervals: Mapping[str, float | None]
    equal_time: Mapping[str, float]
    step_ms: Mapping[str, float]
    parameters: Mapping[str, int]
    values: Mapping[int, Mapping[str, float]]


def folder_of(runs: Path, arm: str) -> Path:
    """Return the folder of an arm's runs."""
    return runs / re.sub(r"[^A-Za-z0-9.=+-]+", "_", arm).strip("_")


def train_arms(arms: Mapping[str, Arm], runs: Path, seeds: Sequence[int], train: Train, steps: int = STEPS) -> int:
    """Train all arms, seed by seed, and return the exit status of the first run that fails, or 0."""
    for seed in seeds:
        for name, arm in arms.items():
            workdir = workdir_of(folder_of(runs, name), seed)
            if is_complete(workdir, steps):
                continue
            started, output = time.monotonic(), io.StringIO()
            with contextlib.redirect_stdout(output):
                status = train(words_of(arm, workdir, seed, steps))
            if status:
                return status
            print(f"{workdir}: {final(workdir):.4f} bits per byte, {time.monotonic() - started:.0f} s", flush=True)
    return 0


def words_of(arm: Arm, workdir: Path, seed: int, steps: int) -> list[str]:
    """Return the words of the command that trains an arm."""
    values: dict[str, object] = {f"model.{key}": value for key, value in {**MODEL, **arm.fields}.items()}
    values |= {f"{data}.context": CONTEXT for data in ("input.data", "evals.validation.data")}
    values |= {"seed": seed, "tensorboard": False, "evals.validation.log_percent": 10}
    words = [f"--config.{key}={value}" for key, value in values.items()]
    return ["--config", f"lm_stdlib:steps={steps}", "--workdir", str(workdir), *words]


def is_complete(workdir: Path, steps: int) -> bool:
    """Return True if a run has completed so many steps."""
    if not (workdir / "config.json").is_file():
        return False
    rows = metrics.read(workdir / "metrics.jsonl")
    total = json.loads((workdir / "config.json").read_text())["total_steps"]
    return bool(rows) and rows[-1]["step"] == total == steps


def final(workdir: Path) -> float:
    """Return METRIC at the end of a complete run."""
    return float(metrics.read(workdir / "metrics.jsonl")[-1][METRIC])


def compare(arms: Mapping[str, Arm], runs: Path, seeds: Sequence[int], steps: int = STEPS) -> Comparison:
    """Return the measurements of complete runs."""
    first = next(iter(arms))
    workdirs = {name: [workdir_of(folder_of(runs, name), seed) for seed in seeds] for name in arms}
    values = {seed: {name: final(workdirs[name][i]) for name in arms} for i, seed in enumerate(seeds)}
    differences = {seed: {name: x - each[first] for name, x in each.items()} for seed, each in values.items()}
    means, intervals = _summary(values)
    difference, difference_intervals = _summary(differences)
    step_ms = {name: 1e3 * _step_seconds(paths) for name, paths in workdirs.items()}
    reached = {name: min(steps, steps * step_ms[first] / step_ms[name]) for name in arms}
    equal_time = {
        name: statistics.fmean(value_at(metrics.read(path / "metrics.jsonl"), reached[name]) for path in paths)
        for name, paths in workdirs.items()
    }
    sizes = {name: metrics.read(paths[0] / "metrics.jsonl")[0]["num_params"] for name, paths in workdirs.items()}
    return Comparison(
        seeds, means, intervals, difference, difference_intervals, equal_time, step_ms, sizes, values
    )  # fmt: skip


def _summary(values: Mapping[int, Mapping[str, float]]) -> tuple[dict[str, float], dict[str, float | None]]:
    """Return the mean over seeds and half the width of the 95 % interval of each arm."""
    rows = {str(row["metric"]): row for row in summarize(values)}
    means = {name: float(row["mean"] or 0) for name, row in rows.items()}
    return means, {name: None if (w := row["± 95 %"]) is None else float(w) for name, row in rows.items()}


def _step_seconds(workdirs: Sequence[Path]) -> float:
    rows = [row for path in workdirs for row in metrics.read(path / "timing.jsonl")]
    found = [row["step_seconds"] for row in rows if "step_seconds" in row]
    return statistics.median(found) if found else math.nan


def value_at(rows: Sequence[Mapping[str, float]], step: float) -> float:
    """Return METRIC at a step, by linear interpolation between the evaluations of a run."""
    points = [(row["step"], row[METRIC]) for row in rows if METRIC in row]
    before = max((p for p in points if p[0] <= step), default=points[0])
    after = min((p for p in points if p[0] >= step), default=points[-1])
    if after[0] <= before[0]:
        return float(before[1])
    share = (step - before[0]) / (after[0] - before[0])
    return float(before[1] + share * (after[1] - before[1]))


def verdict(claim: Claim, found: Comparison) -> str:
    """Return "holds", "does not hold" or "undecided", by the 95 % interval of the difference of paired seeds."""
    ((mean, interval),) = [
        (row["mean"], row["± 95 %"])
        for row in summarize({s: {"d": v[claim.better] - v[claim.worse]} for s, v in found.values.items()})
    ]
    assert isinstance(mean, float)
    if not isinstance(interval, float) or abs(mean) <= interval:
        return f"undecided ({mean:+.4f})"
    return f"{'holds' if mean < 0 else 'does not hold'} ({mean:+.4f} ± {interval:.4f})"


def ordered_pairs(arms: Mapping[str, Arm], found: Comparison) -> tuple[int, int]:
    """Return how many pairs of arms with different values in the paper have the same order here, and their number."""
    known = [(arm.paper, found.means[name]) for name, arm in arms.items() if arm.paper is not None]
    pairs = [(a, b) for i, a in enumerate(known) for b in known[:i] if a[0] != b[0]]
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs), len(pairs)


def machine() -> str:
    """Return a description of the host."""
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
