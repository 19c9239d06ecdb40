"""Comparison of DCViT and ViT on scenes of digits that ask for relations, at equal steps and at equal time.

    python scripts/bench_scenes.py [--out runs/bench_scenes] [--seeds 5] [--json docs/scenes.json]
    python scripts/bench_scenes.py --tune

Trains models of configs/vit_scenes.py. DCViT and ViT have the same fields except the composition, and each has the
best learning rate of `TRIED`: `--tune` trains with each, with seed 100, and reports the accuracy on the validation
split. The arm "ViT, equal time" trains the ViT for `LONGER` times the steps, which should be the ratio of the times of
a step in the table; they are measured in turn. The accuracy is that on the test split, whose handwritten digits no
training or tuning has seen. The difference is that to the ViT of equal steps and the same seed.

Runs are those of `dcvit train`: the same command resumes an interrupted benchmark and skips complete runs, and
`--seeds 0,1` trains only some. The table has all seeds that are complete in the folder.
"""

import functools
from pathlib import Path
from typing import TypedDict

import seeded_runs
from seeded_runs import ROOT, complete_seeds, differences, signed

from dcvit.reproduction.seeded import machine, parameters
from dcvit.reproduction.step_times import step_times
from dcvit.training.seeds import summarize

METRIC = "test/top1"
CONFIG = ROOT / "configs/vit_scenes.py"
STEPS = 6000
LONGER = 2.0  # time of a step of DCViT divided by that of ViT
TRIED = (1e-3, 2e-3, 4e-3)
PLAIN, COMPOSED, LONG = "ViT", "DCViT", "ViT, equal time"
ATTENTION = {PLAIN: "mha", COMPOSED: "dcmha", LONG: "mha"}
LR = {"mha": 2e-3, "dcmha": 2e-3}

run = functools.partial(seeded_runs.run, metric=METRIC)


class Row(TypedDict):
    """An arm: accuracy in percent with half the width of the 95 % interval, over all seeds."""

    arm: str
    steps: int
    step_ms: float  # median time of a step, measured in turn with the other arms
    parameters: int
    mean: float
    interval: float
    difference: float  # to the ViT of equal steps
    difference_interval: float


class Result(TypedDict):
    """All measurements, as `--json` writes them."""

    machine: str
    seeds: list[int]
    rows: list[Row]


def steps(arm: str) -> int:
    """Return the number of steps of an arm."""
    return round(STEPS * LONGER) if arm == LONG else STEPS


def train_seed(out: Path, seed: int) -> None:
    """Train all arms with a seed."""
    for arm, attention in ATTENTION.items():
        spec = f"{CONFIG}:attention={attention},steps={steps(arm)}"
        run(spec, out / arm / f"seed{seed}", f"lr={LR[attention]}", f"seed={seed}")


def tune(out: Path) -> None:
    """Train both models with every learning rate that is tried."""
    for lr in TRIED:
        for arm in (PLAIN, COMPOSED):
            spec = f"{CONFIG}:attention={ATTENTION[arm]},steps={STEPS}"
            seeded_runs.run(spec, out / f"{arm} {lr}", f"lr={lr}", "seed=100", metric="validation/top1")


def collect(out: Path) -> Result:
    """Return the measurements of all seeds whose runs are complete."""
    complete = complete_seeds({arm: out / arm for arm in ATTENTION}, METRIC)
    percent = {seed: {arm: 100 * value for arm, value in each.items()} for seed, each in complete.items()}
    paired = summarize(differences(percent, lambda arm: PLAIN))
    times = step_times({arm: (f"{CONFIG}:attention={ATTENTION[arm]}", ()) for arm in ATTENTION}, out).ms
    rows = [
        Row(
            arm=arm, steps=steps(arm), step_ms=times[arm], parameters=parameters(out / arm / f"seed{min(complete)}"),
            mean=one["mean"], interval=one["± 95 %"], difference=difference["mean"],
            difference_interval=difference["± 95 %"],
        )
        for arm, one, difference in zip(ATTENTION, summarize(percent), paired, strict=True)
    ]  # fmt: skip
    return Result(machine=machine(), seeds=sorted(complete), rows=rows)


def lines(result: Result) -> list[str]:
    """Return the table of the documentation."""
    table = ["| model | steps | ms per step | parameters | accuracy (%) | difference |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        difference = "–" if row["arm"] == PLAIN else signed(row["difference"], row["difference_interval"], 1)
        accuracy = f"{row['mean']:.1f} ± {row['interval']:.1f}"
        cost = f"{row['steps']:,} | {row['step_ms']:.1f} | {row['parameters']:,}"
        table.append(f"| {row['arm']} | {cost} | {accuracy} | {difference} |")
    return table


def about(result: Result) -> str:
    """Return the text above the table."""
    return f"{result['machine']}; {METRIC}"


if __name__ == "__main__":
    seeded_runs.main(__doc__, "bench_scenes", train_seed, collect, lines, about, tune)
