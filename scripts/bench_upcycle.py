"""Comparison of upcycling with training from scratch, on a small language model of embedded text.

    python scripts/bench_upcycle.py [--out runs/bench_upcycle] [--seeds 5] [--json docs/upcycle.json]

Every arm trains a model of configs/lm_stdlib.py, reduced to `MODEL`, on the same number of tokens. The arms "plain,
then" train the plain model for `FIRST` steps and then, with configs/upcycle.py, the composed or the plain model for
`MORE` steps. Each part has the whole schedule of the learning rate, warm-up and cosine, and its own order of the data.
The difference is that to the arm "plain, then plain" of the same seed.

Runs are those of `dcvit train`: the same command resumes an interrupted benchmark and skips complete runs, and
`--seeds 0,1` trains only some. The table has all seeds that are complete in the folder.
"""

import functools
from pathlib import Path
from typing import TypedDict

import seeded_runs
from seeded_runs import ROOT, complete_seeds, differences, signed

from dcvit.reproduction.seeded import final, machine, parameters
from dcvit.runs import metrics
from dcvit.training.seeds import summarize

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


run = functools.partial(seeded_runs.run, metric=METRIC)


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
    complete = complete_seeds({arm: out / arm for arm in (*FROM_SCRATCH, *CONTINUED)}, METRIC)
    jumps, rows = [0.0], []
    for seed in complete:
        start = metrics.read(out / "plain, then composed" / f"seed{seed}" / "metrics.jsonl")[0][METRIC]
        jumps.append(abs(start - final(out / "first" / f"seed{seed}", METRIC)))
    paired = summarize(differences(complete, lambda arm: CONTROL))
    for found, difference in zip(summarize(complete), paired, strict=True):
        arm = found["metric"]
        rows.append(
            Row(
                arm=arm, steps=f"{FIRST} + {MORE}" if arm in CONTINUED else str(FIRST + MORE),
                parameters=parameters(out / arm / f"seed{min(complete)}"), mean=found["mean"],
                interval=found["± 95 %"], difference=difference["mean"], difference_interval=difference["± 95 %"],
            )
        )  # fmt: skip
    return Result(machine=machine(), seeds=sorted(complete), step_0=max(jumps), rows=rows)


def lines(result: Result) -> list[str]:
    """Return the table of the documentation."""
    table = ["| arm | steps | parameters | bits per byte | difference |", "| --- | --- | --- | --- | --- |"]
    for row in result["rows"]:
        value = f"{row['mean']:.3f} ± {row['interval']:.3f}"
        difference = "–" if row["arm"] == CONTROL else signed(row["difference"], row["difference_interval"])
        table.append(f"| {row['arm']} | {row['steps']} | {row['parameters']:,} | {value} | {difference} |")
    return table


def about(result: Result) -> str:
    """Return the text above the table."""
    step_0 = f"largest change by upcycling before the first step: {result['step_0']:.1e} bits per byte"
    return f"{result['machine']}; {METRIC}; {step_0}"


if __name__ == "__main__":
    seeded_runs.main(__doc__, "bench_upcycle", train_seed, collect, lines, about)
