"""Comparison of compositions on generated tasks that combine a pattern of attention with a transformation.

    python scripts/bench_synthetic.py [--out runs/bench_synthetic] [--seeds 5] [--json docs/synthetic.json]
    python scripts/bench_synthetic.py --tune

Trains models of configs/lm_synthetic.py: with plain attention, complete DCMHA, one of its branches or one of its
compositions, and with plain attention for `LONGER` times the steps, which takes about the time of complete DCMHA. The
difference is that to the plain model of equal steps and the same seed. The learning rate of the plain model, and that
of the composed ones, is the best of `TRIED`: `--tune` trains with each, with seed 100 and other validation data.

In the trained models with complete DCMHA, compositions are then ablated: a branch in all layers, or all branches into
one head of a layer, which then borrows from no other head. Heads are ordered by their drop in each run, because their
numbers mean nothing. An ablated model is not trained further.

Runs are those of `dcvit train`: the same command resumes an interrupted benchmark and skips complete runs, and
`--seeds 0,1` trains only some. The table has all seeds that are complete in the folder.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
import seeded_runs
from flax.traverse_util import flatten_dict, unflatten_dict
from seeded_runs import ROOT, complete_seeds, differences, signed

from dcvit.evaluators.in_context import Evaluator
from dcvit.models import Params
from dcvit.reproduction.seeded import machine, parameters
from dcvit.reproduction.step_times import step_times
from dcvit.runs.files import replace
from dcvit.training.seeds import summarize
from dcvit.training.trained import open_trained

METRIC = "validation/accuracy"
CONFIG = ROOT / "configs/lm_synthetic.py"
STEPS = 2000
LONGER = 1.8  # time of a step of the complete model divided by that of the plain one
PLAIN, LONG, COMPLETE = "plain", "plain, equal time", "complete"
TRIED = (1.5e-3, 3e-3, 6e-3)
LR = {PLAIN: 3e-3, COMPLETE: 3e-3}  # all composed models have that of the complete one
# Fields of the model.
ARMS = {
    PLAIN: {"compose": "None"},
    LONG: {"compose": "None"},
    COMPLETE: {"compose": "both"},
    "query-wise": {"compose": "both", "branches": "q"},
    "key-wise": {"compose": "both", "branches": "k"},
    "pre only": {"compose": "pre"},
    "post only": {"compose": "post"},
}
BRANCHES = [f"{where}, {side}" for where in ("pre", "post") for side in ("query-wise", "key-wise")]

run = functools.partial(seeded_runs.run, metric=METRIC)


class Row(TypedDict):
    """An arm: accuracy in percent with half the width of the 95 % interval, over all seeds."""

    arm: str
    steps: int
    step_ms: float  # median time of a step, measured in turn with the other arms
    parameters: int
    mean: float
    interval: float
    difference: float  # to the plain model of equal steps
    difference_interval: float


class Part(TypedDict):
    """A pattern, a branch or a head: accuracies, or drops of the accuracy, in percent over all seeds."""

    name: str
    mean: float
    interval: float
    other: float  # of a pattern: the accuracy of the plain model; else 0
    other_interval: float


class Result(TypedDict):
    """All measurements, as `--json` writes them."""

    machine: str
    seeds: list[int]
    rows: list[Row]
    patterns: list[Part]
    ablations: list[Part]


def steps(arm: str) -> int:
    """Return the number of steps of an arm."""
    return round(STEPS * LONGER) if arm == LONG else STEPS


def overrides(arm: str) -> list[str]:
    """Return the words for the model's fields of an arm."""
    return [f"model.{key}={value}" for key, value in ARMS[arm].items()]


def train_seed(out: Path, seed: int) -> None:
    """Train all arms with a seed."""
    for arm in ARMS:
        lr = LR[PLAIN if arm in (PLAIN, LONG) else COMPLETE]
        words = [*overrides(arm), f"lr={lr}", f"seed={seed}"]
        run(f"{CONFIG}:steps={steps(arm)}", out / arm / f"seed{seed}", *words)


def tune(out: Path) -> None:
    """Train the plain and the complete model with every learning rate that is tried."""
    for lr in TRIED:
        for arm in LR:
            words = [*overrides(arm), f"lr={lr}", "seed=100", "evals.validation.data.seed=1"]
            run(f"{CONFIG}:steps={STEPS}", out / f"{arm} {lr}", *words)


def ablated(params: Params, branches: Sequence[str], layers: Sequence[int], heads: Sequence[int]) -> Params:
    """Return parameters with which some branches of compositions add nothing to some heads.

    The up projection and the gate of a head are the columns that are set to zero; the down projections, with which
    other heads receive, stay.

    Args:
      params: the parameters of a model with one group of heads.
      branches: names in `BRANCHES`.
      layers, heads: numbers of layers and heads.
    """
    flat = dict(flatten_dict(params, sep="/"))
    for name, value in flat.items():
        block, *_, where, kind = name.split("/")[-4:] if name.count("/") >= 4 else [""] * 4
        side = {"q": "query-wise", "k": "key-wise"}.get(kind[2:3])
        if kind[:2] != "w_" or f"{where}, {side}" not in branches or int(block.rpartition("_")[2]) not in layers:
            continue
        if kind[3] == "g":
            flat[name] = value.at[:, list(heads)].set(0)
        elif kind[3] == "2":
            count = flat[f"{name.rpartition('/')[0]}/w_{kind[2]}g"].shape[-1]
            halves = value.reshape(*value.shape[:-1], 2, -1, count)  # down and up
            flat[name] = halves.at[..., 1, :, list(heads)].set(0).reshape(value.shape)
    return unflatten_dict(flat, sep="/")


def by_pattern(evaluator: Evaluator) -> dict[str, float]:
    """Return the accuracy in percent for each pattern in the last run of an evaluator."""
    found = evaluator.answers
    assert found is not None
    patterns = np.array([name.partition("/")[0] for name in evaluator.source.task_names])[found.task]
    return {str(pattern): 100 * float(found.correct[patterns == pattern].mean()) for pattern in dict.fromkeys(patterns)}


def measure(workdir: Path) -> dict[str, dict[str, float]]:
    """Return the accuracies of a run by pattern, and for a composed model the drops by ablation; all in percent.

    The result is stored in the workdir, because it takes a compilation.
    """
    file = workdir / "parts.json"
    if file.exists():
        stored: dict[str, dict[str, float]] = json.loads(file.read_text())
        return stored
    trained = open_trained(workdir, None, None)
    mesh, strategy, evaluators = trained.evaluators()
    (evaluator,) = evaluators.values()
    params = trained.params(mesh=mesh, strategy=strategy)
    whole = evaluator.run(params)["accuracy"]
    patterns, drops = by_pattern(evaluator), {}
    fields = trained.record()["model"]
    if fields["compose"]:
        layers, heads = range(fields["depth"]), range(fields["num_heads"])

        def drop(branches: Sequence[str], layers: Sequence[int], heads: Sequence[int]) -> float:
            return 100 * (whole - evaluator.run(ablated(params, branches, layers, heads))["accuracy"])

        drops = {branch: drop([branch], layers, heads) for branch in BRANCHES}
        drops["all branches"] = drop(BRANCHES, layers, heads)
        for layer in layers:
            ordered = sorted((drop(BRANCHES, [layer], [head]) for head in heads), reverse=True)
            drops |= {f"layer {layer}, head {i} by drop": value for i, value in enumerate(ordered, start=1)}
    measured = {"patterns": patterns, "drops": drops}
    replace(file, json.dumps(measured, allow_nan=False))
    return measured


def collect(out: Path) -> Result:
    """Return the measurements of all seeds whose runs are complete."""
    values = complete_seeds({arm: out / arm for arm in ARMS}, METRIC)
    complete = {seed: {arm: 100 * value for arm, value in each.items()} for seed, each in values.items()}
    paired = summarize(differences(complete, lambda arm: PLAIN))
    times = step_times({arm: (str(CONFIG), overrides(arm)) for arm in ARMS}, out).ms
    rows = [
        Row(
            arm=arm, steps=steps(arm), step_ms=times[arm],
            parameters=parameters(out / arm / f"seed{min(complete)}"), mean=one["mean"], interval=one["± 95 %"],
            difference=difference["mean"], difference_interval=difference["± 95 %"],
        )
        for arm, one, difference in zip(ARMS, summarize(complete), paired, strict=True)
    ]  # fmt: skip
    found = {arm: {seed: measure(out / arm / f"seed{seed}") for seed in complete} for arm in (PLAIN, COMPLETE)}
    return Result(
        machine=machine(), seeds=sorted(complete), rows=rows,
        patterns=_parts({seed: each["patterns"] for seed, each in found[COMPLETE].items()},
                        {seed: each["patterns"] for seed, each in found[PLAIN].items()}),
        ablations=_parts({seed: each["drops"] for seed, each in found[COMPLETE].items()}),
    )  # fmt: skip


def _parts(
    values: Mapping[int, Mapping[str, float]], others: Mapping[int, Mapping[str, float]] | None = None
) -> list[Part]:
    """Return the mean over all seeds of each part."""
    compared = summarize(others) if others else [{"mean": 0.0, "± 95 %": 0.0} for _ in next(iter(values.values()))]
    return [
        Part(
            name=one["metric"], mean=one["mean"], interval=one["± 95 %"], other=other["mean"],
            other_interval=other["± 95 %"],
        )
        for one, other in zip(summarize(values), compared, strict=True)
    ]  # fmt: skip


def lines(result: Result) -> list[str]:
    """Return the tables of the documentation, with an empty line between them."""
    table = [
        "| heads compose | steps | ms per step | parameters | accuracy (%) | difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        difference = "–" if row["arm"] == PLAIN else signed(row["difference"], row["difference_interval"], 1)
        accuracy = f"{row['mean']:.1f} ± {row['interval']:.1f}"
        cost = f"{row['steps']:,} | {row['step_ms']:.1f} | {row['parameters']:,}"
        table.append(f"| {row['arm']} | {cost} | {accuracy} | {difference} |")
    table += ["", "| pattern | plain | complete |", "|---|---|---|"]
    for part in result["patterns"]:
        plain = f"{part['other']:.1f} ± {part['other_interval']:.1f}"
        table.append(f"| {part['name']} | {plain} | {part['mean']:.1f} ± {part['interval']:.1f} |")
    table += ["", "| ablated | drop of the accuracy (%) |", "|---|---|"]
    table += [f"| {part['name']} | {part['mean']:.1f} ± {part['interval']:.1f} |" for part in result["ablations"]]
    return table


def about(result: Result) -> str:
    """Return the text above the table."""
    return f"{result['machine']}; {METRIC}"


if __name__ == "__main__":
    seeded_runs.main(__doc__, "bench_synthetic", train_seed, collect, lines, about, tune)
