"""Accuracy by pattern, and drops by ablation, of models that `scripts/bench/runs.py synthetic` has trained.

A branch of the compositions is ablated in all layers, or all branches into one head of a layer, to which no other head
then contributes. Heads are ordered by their drop in each run, because their numbers mean nothing. An ablated model is
not trained further.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from dcvit.evaluators.in_context import Evaluator
from dcvit.hub.model import open_trained
from dcvit.models import Params
from dcvit.reproduction.seeded import run_checksum, stored

BRANCHES = [f"{where}, {side}" for where in ("pre", "post") for side in ("query-wise", "key-wise")]


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

    def compute() -> dict[str, dict[str, float]]:
        trained = open_trained(workdir)
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
        return {"patterns": patterns, "drops": drops}

    return stored(workdir / "parts.json", run_checksum(workdir), compute)
