"""Comparisons of runs of `dcvit train` with several seeds that are not in the paper.

    python scripts/bench/runs.py synthetic [--out runs/bench] [--seeds 5] [--json docs/synthetic.json]
    python scripts/bench/runs.py scenes --json docs/scenes.json
    python scripts/bench/runs.py upcycle --json docs/upcycle.json
    python scripts/bench/runs.py scenes --tune

synthetic: models of configs/lm_synthetic.py with plain attention, complete DCMHA, one of its branches or one of its
compositions. In the trained models with complete DCMHA, branches are then ablated (synthetic_parts.py).
scenes: DCViT and ViT of configs/vit_scenes.py. The accuracy is that on the test split, whose handwritten digits no
training or tuning has seen. upcycle: models of configs/lm_stdlib.py, reduced to `SMALL`. The arms "plain, then" train
the plain model for `FIRST` steps and then, with configs/upcycle.py, the composed or the plain model for `MORE` steps;
each part has the whole schedule of the learning rate, and its own order of the data.

The difference is that to the control with the same seed. The arm "plain, equal time" or "ViT, equal time" trains for
as many times the steps as the composed model takes the time of a step, rounded. Learning rates are the best of `TRIED`:
`--tune` trains with each, with seed 100 and other validation data than that of the table.

The same command resumes an interrupted benchmark and skips complete runs, and `--seeds 0,1` trains only some. The table
has all seeds that are complete in the folder.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import synthetic_parts

from dcvit import cli
from dcvit.errors import ConfigError
from dcvit.parallel import runtime
from dcvit.reproduction.arms import Mean, Values, differences, over_seeds
from dcvit.reproduction.seeded import Run, all_finals, final, machine, of_model, train_all
from dcvit.reproduction.speeds import step_times
from dcvit.runs import metrics
from dcvit.runs.files import replace
from dcvit.runs.seeds import parse_seeds, workdir_of
from dcvit.train import main as train

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]  # of a table, for JSON: see `collect`
PLAIN, COMPLETE = "plain", "complete"

SYNTHETIC_STEPS = 2000
SYNTHETIC = {
    PLAIN: {"compose": None},
    "plain, equal time": {"compose": None},
    COMPLETE: {"compose": "both"},
    "query-wise": {"compose": "both", "branches": "q"},
    "key-wise": {"compose": "both", "branches": "k"},
    "pre only": {"compose": "pre"},
    "post only": {"compose": "post"},
}  # fields of the model by arm
SCENES_STEPS = 6000
SCENES = {"ViT": "mha", "DCViT": "dcmha", "ViT, equal time": "mha"}
# Time of a step of the composed model divided by that of the plain one.
LONGER = {"plain, equal time": 1.8, "ViT, equal time": 2.0}
LR = {"synthetic": 3e-3, "scenes": 2e-3}
TRIED = {"synthetic": (1.5e-3, 3e-3, 6e-3), "scenes": (1e-3, 2e-3, 4e-3)}

SMALL = {"model.width": 64, "model.depth": 2, "model.mlp_dim": 176, "input.data.context": 64}
FIRST, MORE = 400, 200  # steps
FROM_SCRATCH = {"plain": "mha", "composed": "dcmha"}
CONTINUED = {"plain, then composed": "both", "plain, then plain": "none"}  # `compose` of configs/upcycle.py


def synthetic(out: Path, seed: int) -> dict[str, Run]:
    """Return the runs on generated tasks."""

    def run(arm: str, fields: Mapping[str, object]) -> Run:
        words = {**of_model(fields), "lr": LR["synthetic"]}
        spec = f"lm_synthetic:steps={round(SYNTHETIC_STEPS * LONGER.get(arm, 1))}"
        return Run(out / arm, spec, words, "validation/accuracy")

    return {arm: run(arm, fields) for arm, fields in SYNTHETIC.items()}


def scenes(out: Path, seed: int) -> dict[str, Run]:
    """Return the runs on scenes."""
    return {
        arm: Run(
            out / arm, f"vit_scenes:attention={attention},steps={round(SCENES_STEPS * LONGER.get(arm, 1))}",
            {"lr": LR["scenes"]}, "test/top1",
        )
        for arm, attention in SCENES.items()
    }  # fmt: skip


def upcycle(out: Path, seed: int) -> dict[str, Run]:
    """Return the runs of upcycling; those with the name "first" are not arms, but what others start from."""
    metric, size = "validation/bits_per_byte", {**SMALL, "evals.validation.data.context": SMALL["input.data.context"]}
    plans = {arm: (attention, FIRST + MORE) for arm, attention in FROM_SCRATCH.items()} | {"first": ("mha", FIRST)}
    runs = {
        arm: Run(out / arm, f"lm_stdlib:attention={attention},steps={steps}", size, metric)
        for arm, (attention, steps) in plans.items()
    }
    start = workdir_of(out / "first", seed)
    return runs | {
        arm: Run(
            out / arm, f"upcycle:init={start},compose={compose}", {"seed": seed + 1000, "total_steps": MORE}, metric
        )
        for arm, compose in CONTINUED.items()
    }


class Benchmark(NamedTuple):
    """A comparison.

    Fields:
      runs: from the folder and a seed to the run of each arm, in the order of their training.
      control: the arm that differences refer to.
      tuned: the arms that `--tune` trains, and what they override to be evaluated on other data than the table.
      first: the header of the column of arms.
    """

    runs: Callable[[Path, int], dict[str, Run]]
    control: str
    tuned: Sequence[str]
    tuning: Mapping[str, object]
    first: str


BENCHMARKS = {
    "synthetic": Benchmark(synthetic, PLAIN, (PLAIN, COMPLETE), {"evals.validation.data.seed": 1}, "heads compose"),
    "scenes": Benchmark(scenes, "ViT", ("ViT", "DCViT"), {}, "model"),
    "upcycle": Benchmark(upcycle, "plain, then plain", (), {}, "arm"),
}


def tuning_runs(name: str, out: Path) -> list[Run]:
    """Return the runs with every learning rate that is tried."""
    bench, found = BENCHMARKS[name], []
    for lr in TRIED[name]:
        for arm in bench.tuned:
            run = bench.runs(out, 100)[arm]
            metric = run.metric.replace("test/", "validation/")
            found.append(run._replace(
                folder=out / f"{arm} {lr}", overrides={**run.overrides, "lr": lr, **bench.tuning}, metric=metric
            ))  # fmt: skip
    return found


def complete_seeds(runs: Mapping[str, Run]) -> dict[int, dict[str, float]]:
    """Return the final metric of each arm for all seeds that are complete in every arm."""
    names = [path.name.removeprefix("seed") for path in next(iter(runs.values())).folder.glob("seed*")]
    seeds = sorted(int(name) for name in names if name.isdecimal())
    unfinished = {s for s in seeds for run in runs.values() if final(workdir_of(run.folder, s), run.metric) is None}
    return all_finals(runs, [seed for seed in seeds if seed not in unfinished])


def collect(name: str, out: Path) -> Row:
    """Return the measurements of all seeds whose runs are complete, as `--json` writes them.

    A row has the mean of an arm's metric and half the width of its 95 % interval over all seeds, in percent if it is an
    accuracy; the same of the difference to the control; its steps, its parameters and, where models of several costs
    are compared, the median time of a step, measured in turn with the other arms.
    """
    bench = BENCHMARKS[name]
    runs = {arm: run for arm, run in bench.runs(out, 0).items() if arm != "first"}
    scale = 1 if name == "upcycle" else 100
    values = {seed: {arm: scale * x for arm, x in each.items()} for seed, each in complete_seeds(runs).items()}
    paired = over_seeds(differences(values, bench.control))
    steps = {arm: int(run.spec.rpartition("steps=")[2]) for arm, run in runs.items() if arm not in CONTINUED}
    steps |= dict.fromkeys(CONTINUED, f"{FIRST} + {MORE}")
    times = {} if name == "upcycle" else step_times(runs, out).ms
    rows = [
        {
            "arm": arm, "steps": steps[arm], **({"step_ms": times[arm]} if times else {}),
            "parameters": runs[arm].parameters(min(values)), "mean": mean, "interval": interval,
            "difference": paired[arm].mean, "difference_interval": paired[arm].interval,
        }
        for arm, (mean, interval) in over_seeds(values).items()
    ]  # fmt: skip
    more: Row = {}
    if name == "synthetic":
        found = {arm: {seed: synthetic_parts.measure(out / arm / f"seed{seed}") for seed in values}
                 for arm in (PLAIN, COMPLETE)}  # fmt: skip
        patterns = {arm: {seed: each["patterns"] for seed, each in of_arm.items()} for arm, of_arm in found.items()}
        more["patterns"] = _parts(patterns[COMPLETE], patterns[PLAIN])
        more["ablations"] = _parts({seed: each["drops"] for seed, each in found[COMPLETE].items()})
    if name == "upcycle":
        more["step_0"] = max(jump(out, seed, runs[bench.control].metric) for seed in values)
    return {"machine": machine(), "seeds": sorted(values), **more, "rows": rows}


def jump(out: Path, seed: int, metric: str) -> float:
    """Return the change of the metric by upcycling, before the first step."""
    start = metrics.read(out / "plain, then composed" / f"seed{seed}" / "metrics.jsonl")[0][metric]
    end = final(workdir_of(out / "first", seed), metric)
    assert end is not None
    return abs(float(start) - end)


def _parts(values: Values, others: Values | None = None) -> list[Row]:
    """Return the mean over all seeds of each part, in percent, and that of `others`."""
    compared = over_seeds(others) if others else {}
    return [
        {
            "name": name, "mean": mean, "interval": interval, "other": compared.get(name, Mean(0.0, 0.0)).mean,
            "other_interval": compared.get(name, Mean(0.0, 0.0)).interval,
        }
        for name, (mean, interval) in over_seeds(values).items()
    ]  # fmt: skip


def lines(name: str, result: Row) -> list[str]:
    """Return the tables of the documentation, with an empty line between them."""
    bench, digits, costs = BENCHMARKS[name], 1, ["steps", "ms per step", "parameters", "accuracy (%)", "difference"]
    if name == "upcycle":
        digits, costs = 3, ["steps", "parameters", "bits per byte", "difference"]
    table = [f"| {' | '.join([bench.first, *costs])} |", "|---" * (1 + len(costs)) + "|"]
    for row in result["rows"]:
        difference = f"{row['difference']:+.{digits}f} ± {row['difference_interval']:.{digits}f}".replace("-", "−")
        steps = row["steps"] if isinstance(row["steps"], str) else f"{row['steps']:,}"
        cells = [row["arm"], steps, *([f"{row['step_ms']:.1f}"] if "step_ms" in row else []), f"{row['parameters']:,}"]
        value = f"{row['mean']:.{digits}f} ± {row['interval']:.{digits}f}"
        table.append(f"| {' | '.join([*cells, value, '–' if row['arm'] == bench.control else difference])} |")
    if "patterns" in result:
        table += ["", "| pattern | plain | complete |", "|---|---|---|"]
        for part in result["patterns"]:
            plain = f"{part['other']:.1f} ± {part['other_interval']:.1f}"
            table.append(f"| {part['name']} | {plain} | {part['mean']:.1f} ± {part['interval']:.1f} |")
        table += ["", "| ablated | drop of the accuracy (%) |", "|---|---|"]
        table += [f"| {part['name']} | {part['mean']:.1f} ± {part['interval']:.1f} |" for part in result["ablations"]]
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; see the module's docstring."""
    parser = cli.Parser(prog="scripts/bench/runs.py", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS, help="what is compared")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench", help="folder for all runs")
    parser.add_argument("--seeds", type=parse_seeds, default=[0, 1, 2, 3, 4], help="seeds, or their number (default 5)")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("--tune", action="store_true", help="only train with every learning rate that is tried")
    args = parser.parse_without_config(argv)
    if args.tune and args.name not in TRIED:
        parser.error(f"--tune: {args.name} tries no learning rates")
    runtime.skip_absent_tpu()  # complete runs are not trained, but their steps may be timed
    out, trainer = args.out.resolve() / args.name, functools.partial(cli.run, train)
    if args.tune:
        return train_all(tuning_runs(args.name, out / "tuning"), [100], trainer)
    for seed in args.seeds:
        if status := train_all(BENCHMARKS[args.name].runs(out, seed).values(), [seed], trainer):
            return status
    result = collect(args.name, out)
    if len(result["seeds"]) < 2:
        raise ConfigError("no table yet: an interval needs at least two seeds")
    print(f"\n{result['machine']}; seeds {', '.join(map(str, result['seeds']))}")
    if "step_0" in result:
        print(f"largest change by upcycling before the first step: {result['step_0']:.1e} bits per byte")
    print("\n" + "\n".join(lines(args.name, result)))
    if args.json:
        replace(args.json, json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
