"""Comparison of compositions in models with grouped queries, on a small language model of embedded text.

    python scripts/bench_key_heads.py [--out runs/bench_key_heads] [--seeds 5] [--json docs/key_heads.json]

Trains a model of configs/lm_stdlib.py, reduced to `MODEL`, with 1, 2 and 4 key heads. Its eight heads do not compose,
compose query-wise inside the groups of a key head (DCFlash, which plain attention computes), query-wise all together,
or completely. With one key head, the second and the third are the same. The difference is that to the plain model with
as many key heads and the same seed. The step time is the median over all runs, whose order is seed by seed; another
process on the machine changes it.

Runs are those of `dcvit train`: the same command resumes an interrupted benchmark and skips complete runs, and
`--seeds 0,1` trains only some. The table has all seeds that are complete in the folder.
"""

import functools
from pathlib import Path
from typing import TypedDict

import seeded_runs
from seeded_runs import ROOT, complete_seeds, differences, signed, step_ms

from dcvit.reproduction.seeded import machine, parameters
from dcvit.training.seeds import summarize

METRIC = "validation/bits_per_byte"
HEADS, HEAD_DIM, RANK = 8, 8, 2
MODEL = {"width": HEADS * HEAD_DIM, "depth": 2, "mlp_dim": 176, "num_heads": HEADS}
CONTEXT, STEPS = 64, 600
KEY_HEADS = (1, 2, 4)
PLAIN = "plain"
# Fields of the model; K stands for the number of key heads.
ARMS = {
    PLAIN: {"compose": "None"},
    "DCFlash": {"compose": "both", "branches": "q", "groups": "K"},
    "query-wise": {"compose": "both", "branches": "q"},
    "complete": {"compose": "both"},
}

run = functools.partial(seeded_runs.run, metric=METRIC)


class Row(TypedDict):
    """An arm: bits per byte on the validation split with half the width of the 95 % interval, over all seeds."""

    key_heads: int
    arm: str
    parameters: int
    cache: int  # numbers per token and layer
    step_ms: float
    mean: float
    interval: float
    difference: float  # to the plain model with as many key heads
    difference_interval: float


class Result(TypedDict):
    """All measurements, as `--json` writes them."""

    machine: str
    seeds: list[int]
    rows: list[Row]


def arms() -> list[tuple[int, str]]:
    """Return the number of key heads and the name of each arm."""
    return [(n, arm) for n in KEY_HEADS for arm in ARMS if (n, arm) != (1, "DCFlash")]


def workdir(out: Path, key_heads: int, arm: str, seed: int) -> Path:
    """Return the workdir of a run."""
    return out / f"{key_heads} key heads" / arm / f"seed{seed}"


def train_seed(out: Path, seed: int) -> None:
    """Train all arms with a seed."""
    size = [f"model.{key}={value}" for key, value in MODEL.items()]
    size += [f"{data}.context={CONTEXT}" for data in ("input.data", "evals.validation.data")]
    for key_heads, arm in arms():
        fields = [f"model.{key}={key_heads if value == 'K' else value}" for key, value in ARMS[arm].items()]
        words = [*size, *fields, f"model.num_key_heads={key_heads}", f"seed={seed}"]
        run(f"{ROOT / 'configs/lm_stdlib.py'}:steps={STEPS}", workdir(out, key_heads, arm, seed), *words)


def cache(key_heads: int, arm: str) -> int:
    """Return the numbers that a token needs in the cache of a layer: keys and values, and key-wise weights."""
    key_wise = 2 * (2 * RANK + 1) * HEADS if arm == "complete" else 0
    return 2 * key_heads * HEAD_DIM + key_wise


def collect(out: Path) -> Result:
    """Return the measurements of all seeds whose runs are complete."""
    complete = complete_seeds({f"{n} {arm}": workdir(out, n, arm, 0).parent for n, arm in arms()}, METRIC)
    paired = summarize(differences(complete, lambda name: f"{name.split()[0]} {PLAIN}"))
    rows = []
    for (n, arm), one, difference in zip(arms(), summarize(complete), paired, strict=True):
        workdirs = [workdir(out, n, arm, seed) for seed in complete]
        rows.append(
            Row(
                key_heads=n, arm=arm, parameters=parameters(workdirs[0]), cache=cache(n, arm),
                step_ms=step_ms(workdirs), mean=one["mean"], interval=one["± 95 %"], difference=difference["mean"],
                difference_interval=difference["± 95 %"],
            )
        )  # fmt: skip
    return Result(machine=machine(), seeds=sorted(complete), rows=rows)


def lines(result: Result) -> list[str]:
    """Return the table of the documentation."""
    table = [
        "| key heads | composition | parameters | cache | step ms | bits per byte | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        difference = signed(row["difference"], row["difference_interval"])
        table.append(
            f"| {row['key_heads']} | {row['arm']} | {row['parameters']:,} | {row['cache']} | {row['step_ms']:.1f} "
            f"| {row['mean']:.3f} ± {row['interval']:.3f} | {'–' if row['arm'] == PLAIN else difference} |"
        )
    return table


def about(result: Result) -> str:
    """Return the text above the table."""
    return f"{result['machine']}; {METRIC}"


if __name__ == "__main__":
    seeded_runs.main(__doc__, "bench_key_heads", train_seed, collect, lines, about)
