"""Runs of one config with several seeds: their workdirs, and mean and confidence interval of their final metrics."""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence

from dcvit.errors import ConfigError
from dcvit.runs import metrics
from dcvit.runs.files import Folder, replace

MAX_SEEDS = 1000
LEVEL = 0.95  # of the confidence interval
Row = dict[str, str | int | float | None]


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a text: a list such as "0,1,2", or their number, such as "3" for the same seeds."""
    words = text.split(",")
    numbers = [int(word) for word in words] if all(word.strip().isdecimal() for word in words) else [0]
    if numbers == [0]:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seeds such as 3, or a list such as 0,1,2")
    if len(numbers) == 1 and numbers[0] > MAX_SEEDS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at most {MAX_SEEDS} seeds")
    seeds = numbers if len(numbers) > 1 else list(range(numbers[0]))
    if len({*seeds}) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} has a seed twice")
    return seeds


def workdir_of(folder: Folder, seed: int) -> Folder:
    """Return the workdir of the run with a seed, FOLDER/seedN."""
    return folder / f"seed{seed}"


def check_no_seeds(folder: Folder) -> None:
    """Raise ConfigError if the folder holds the workdirs of seeds, so that it cannot be the workdir of a single run."""
    if held := workdir_seeds(folder):
        raise ConfigError(f"{folder} holds the runs of seeds ({held[0].name}, …); resume them with --seeds")


def workdir_seeds(folder: Folder) -> list[Folder]:
    """Return the workdirs of seeds in a folder, by seed; none if it is a workdir itself."""
    if (folder / "config.json").is_file():
        return []
    found = {path: re.fullmatch(r"seed(\d+)", path.name) for path in folder.glob("seed*")}
    seeds = {int(match[1]): path for path, match in found.items() if match and (path / "config.json").is_file()}
    return [seeds[seed] for seed in sorted(seeds)]


def final_metrics(workdir: Folder) -> dict[str, float]:
    """Return the loss and the metrics of the evaluations in the last row of a run, without those that are not finite.

    Numbers of examples or tokens, which are integers, are omitted.
    """
    rows = metrics.read(workdir / "metrics.jsonl")
    row = rows[-1] if rows else {}
    return {key: value for key, value in row.items() if isinstance(value, float) and (key == "loss" or "/" in key)}


def summarize(results: Mapping[int, Mapping[str, float]]) -> list[Row]:
    """Return one row per metric: mean, half width of the 95 % confidence interval, n, and the value of each seed.

    `results` has the metrics by seed. The interval is Student's t with n - 1 degrees of freedom, None for one value.
    """
    rows: list[Row] = []
    for metric in dict.fromkeys(key for found in results.values() for key in found):
        values = [found[metric] for found in results.values() if metric in found]
        n, width = len(values), half_width(values)
        seeds = {f"seed {seed}": found.get(metric) for seed, found in results.items()}
        rows.append({"metric": metric, "mean": statistics.fmean(values), "± 95 %": width, "n": n, **seeds})
    return rows


def half_width(values: Sequence[float]) -> float | None:
    """Return the half width of the 95 % confidence interval of a mean (Student's t); None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy import stats  # takes long to import

    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def write(folder: Folder, rows: Sequence[Row]) -> None:
    """Write the rows of `summarize` to seeds.csv and, rounded, to the table seeds.md."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace(folder / "seeds.csv", text.getvalue())
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([rounded(value) for value in row.values()] for row in rows)]
    replace(folder / "seeds.md", "".join(f"| {' | '.join(line)} |\n" for line in lines))


def rounded(value: str | float | None) -> str:
    """Return a cell of a table: a float with four decimals, and a dash for None."""
    return "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
