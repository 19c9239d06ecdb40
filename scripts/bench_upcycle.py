"""Comparison of upcycling with training from scratch, on a small language model of embedded text.

    python scripts/bench_upcycle.py [--out runs/bench_upcycle] [--seeds 5] [--json docs/upcycle.json]

Every arm trains a model of configs/lm_stdlib.py, reduced to `MODEL`, on the same number of tokens. The arms "plain,
then" train the plain model for `FIRST` steps and then, with configs/upcycle.py, the composed or the plain model for
`MORE` steps. Each part has the whole schedule of the learning rate, warm-up and cosine, and its own order of the data.
The difference is that to the arm "plain, then plain" of the same seed.

Runs are those of `dcvit train`: the same command resumes an interrupted benchmark and skips complete runs, and
`--seeds 0,1` trains only some. The table has all seeds that are complete in the folder.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import TypedDict

from dcvit import cli, train
from dcvit.runs import metrics
from dcvit.training.seeds import parse_seeds, summarize

ROOT = Path(__file__).resolve().parent.parent
MODEL = {"width": 64, "depth": 2, "mlp_dim": 176}
CONTEXT = 64
FIRST, MORE = 400, 200  # steps
METRIC = "validation/bits_per_byte"
FROM_SCRATCH = {"plain": "mha", "composed": "dcmha"}
CONTINUED = {"plain, then composed": "both", "plain, then plain": "none"}  # `compose` of configs/upcycle.py
CONTROL = "plain, then plain"


class Row(TypedDict):
    """An arm: bits per byte on the validation split with half the width of the 95 % interval, over all seeds."""

    arm: str
    steps: str
    parameters: int
    mean: float
    interval: float
    difference: float  # to the control of the same seed
    difference_interval: float


class Result(TypedDict):
    """All measurements, as `--json` writes them."""

    machine: str
    seeds: list[int]
    step_0: float  # largest change of the metric by upcycling, before the first step
    rows: list[Row]


def run(spec: str, workdir: Path, *overrides: str) -> None:
    """Train as `dcvit train` does, with its output in a file; skip a complete run. If it fails, exit."""
    if final(workdir) is not None:
        return
    started = time.monotonic()
    words = [f"--config.{word}" for word in ("tensorboard=False", "evals.validation.log_percent=100", *overrides)]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = cli.run(train.main, ["--config", spec, "--workdir", str(workdir), *words])
    if status:
        sys.exit(status)
    print(f"{workdir}: {final(workdir):.4f} bits per byte, {time.monotonic() - started:.0f} s", flush=True)


def final(workdir: Path) -> float | None:
    """Return the metric at the end of a run, None for a run that is not complete."""
    if not (workdir / "config.json").exists():
        return None
    total = json.loads((workdir / "config.json").read_text())["total_steps"]
    rows = metrics.read(workdir / "metrics.jsonl")
    return rows[-1].get(METRIC) if rows and rows[-1]["step"] == total else None


def train_seed(out: Path, seed: int) -> None:
    """Train all arms with a seed."""
    size = [f"model.{key}={value}" for key, value in MODEL.items()]
    size += [f"{data}.context={CONTEXT}" for data in ("input.data", "evals.validation.data")]
    lm = f"{ROOT / 'configs/lm_stdlib.py'}:attention="
    for arm, attention in FROM_SCRATCH.items():
        run(f"{lm}{attention},steps={FIRST + MORE}", out / arm / f"seed{seed}", f"seed={seed}", *size)
    first = out / "first" / f"seed{seed}"
    run(f"{lm}mha,steps={FIRST}", first, f"seed={seed}", *size)
    for arm, compose in CONTINUED.items():
        spec = f"{ROOT / 'configs/upcycle.py'}:init={first},compose={compose},steps={MORE},seed={seed + 1000}"
        run(spec, out / arm / f"seed{seed}")


def collect(out: Path) -> Result:
    """Return the measurements of all seeds whose runs are complete."""
    seeds = sorted(int(path.name.removeprefix("seed")) for path in (out / CONTROL).glob("seed*"))
    arms = [*FROM_SCRATCH, *CONTINUED]
    values = {seed: {arm: final(out / arm / f"seed{seed}") for arm in arms} for seed in seeds}
    complete = {seed: found for seed, found in values.items() if None not in found.values()}
    differences = {seed: {arm: x - found[CONTROL] for arm, x in found.items()} for seed, found in complete.items()}
    jumps, rows = [0.0], []
    for seed in complete:
        start = metrics.read(out / "plain, then composed" / f"seed{seed}" / "metrics.jsonl")[0][METRIC]
        jumps.append(abs(start - final(out / "first" / f"seed{seed}")))
    for found, paired in zip(summarize(complete), summarize(differences), strict=True):
        arm = found["metric"]
        about = metrics.read(out / arm / f"seed{min(complete)}" / "metrics.jsonl")[0]
        rows.append(
            Row(
                arm=arm, steps=f"{FIRST} + {MORE}" if arm in CONTINUED else str(FIRST + MORE),
                parameters=about["num_params"], mean=found["mean"], interval=found["± 95 %"],
                difference=paired["mean"], difference_interval=paired["± 95 %"],
            )
        )  # fmt: skip
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    return Result(machine=machine, seeds=sorted(complete), step_0=max(jumps), rows=rows)


def lines(result: Result) -> list[str]:
    """Return the table of the documentation."""
    table = ["| arm | steps | parameters | bits per byte | difference |", "| --- | --- | --- | --- | --- |"]
    for row in result["rows"]:
        value, difference = f"{row['mean']:.3f} ± {row['interval']:.3f}", "–"
        if row["arm"] != CONTROL:
            difference = f"{row['difference']:+.3f} ± {row['difference_interval']:.3f}".replace("-", "−")
        table.append(f"| {row['arm']} | {row['steps']} | {row['parameters']:,} | {value} | {difference} |")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench_upcycle", help="folder for all runs")
    parser.add_argument("--seeds", type=parse_seeds, default=[0, 1, 2, 3, 4], help="seeds, or their number (default 5)")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    args = parser.parse_args()
    for seed in args.seeds:
        train_seed(args.out.resolve(), seed)
    result = collect(args.out)
    if len(result["seeds"]) < 2:
        sys.exit("no table yet: an interval needs at least two seeds")
    print(f"\n{result['machine']}; seeds {', '.join(map(str, result['seeds']))}")
    print(f"largest change by upcycling before the first step: {result['step_0']:.1e} bits per byte\n")
    print("\n".join(lines(result)))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
