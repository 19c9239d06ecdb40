"""Runs of one config by seed or by fold: their workdirs, and mean and confidence interval of their final metrics."""

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


def workdir_of(folder: Folder, number: int, kind: str = "seed") -> Folder:
    """Return the workdir of the run with a seed, FOLDER/seedN, or of the kind "fold", FOLDER/foldN."""
    return folder / f"{kind}{number}"


def check_no_runs(folder: Folder) -> None:
    """Raise ConfigError if the folder holds the workdirs of several runs, so that it cannot be that of a single one."""
    if held := run_folders(folder):
        kinds = f"{held[0].name.rstrip('0123456789')}s"
        raise ConfigError(f"{folder} holds the runs of {kinds} ({held[0].name}, …); resume them with --{kinds}")


def run_folders(folder: Folder) -> list[Folder]:
    """Return the workdirs of folds and seeds in a folder, by number; none if it is a workdir itself."""
    if (folder / "config.json").is_file():
        return []
    found = {path: re.fullmatch(r"(fold|seed)(\d+)", path.name) for path in folder.glob("[fs]*")}
    runs = {(m[1], int(m[2])): path for path, m in found.items() if m and (path / "config.json").is_file()}
    return [runs[key] for key in sorted(runs)]


def final_metrics(workdir: Folder) -> dict[str, float]:
    """Return the loss and the metrics of the evaluations in the last row of a run, without those that are not finite.

    Numbers of examples or tokens, which are integers, are omitted.
    """
    rows = metrics.read(workdir / "metrics.jsonl")
    row = rows[-1] if rows else {}
    return {key: value for key, value in row.items() if isinstance(value, float) and (key == "loss" or "/" in key)}


def summarize(results: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Return one row per metric: mean, half width of the 95 % confidence interval, n, and the value of each run.

    `results` has the metrics by a name of the run, such as "seed 3", which are the names of the columns. The interval
    is Student's t with n - 1 degrees of freedom, None for one value. Folds share most of their training examples, so
    that their interval is too narrow.
    """
    rows: list[Row] = []
    for metric in dict.fromkeys(key for found in results.values() for key in found):
        values = [found[metric] for found in results.values() if metric in found]
        n, width = len(values), half_width(values)
        runs = {name: found.get(metric) for name, found in results.items()}
        rows.append({"metric": metric, "mean": statistics.fmean(values), "± 95 %": width, "n": n, **runs})
    return rows


def half_width(values: Sequence[float]) -> float | None:
    """Return the half width of the 95 % confidence interval of a mean (Student's t); None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy import stats  # takes long to import

    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def write(folder: Folder, rows: Sequence[Row], name: str) -> None:
    """Write the rows of `summarize` to NAME.csv and, rounded, to the table NAME.md."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace(folder / f"{name}.csv", text.getvalue())
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([rounded(value) for value in row.values()] for row in rows)]
    replace(folder / f"{name}.md", "".join(f"| {' | '.join(line)} |\n" for line in lines))


def rounded(value: str | float | None) -> str:
    """Return a cell of a table: a float with four decimals, and a dash for None."""
    return "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
