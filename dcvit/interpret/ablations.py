"""Predictions of a model after ablations: without a head, or without a branch of a composition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.interpret.activations import Hook, run_with_cache
from dcvit.models import Params
from dcvit.models.lm import LM
from dcvit.models.vit import ViT

# Factors whose zeros switch a branch off.
BRANCHES = {
    "static": "static", "query projection": "q2", "query gate": "qg", "key projection": "k2", "key gate": "kg",
}  # fmt: skip
HEAD_ARRAYS = ("scores", "weights", "composed_weights")


class Ablation(NamedTuple):
    """One change of a model: a head or a branch of a composition that is switched off.

    Fields:
      layer: the layer; None means all layers.
      head: the ablated head, or None. Its scores, weights and composed weights are 0, so that it attends to nothing,
        and nothing of it is composed into other heads.
      where: the compose whose branch is switched off, "pre" or "post"; "both" for all branches; None for a head.
      branch: the branch that is switched off, a key of `BRANCHES`; "all" for all of them.
    """

    layer: int | None
    head: int | None = None
    where: str | None = None
    branch: str | None = None


def branches_of(model: ViT | LM) -> list[tuple[str, str]]:
    """Return the pairs (compose, branch) that a model has: values of `Ablation.where` and `Ablation.branch`."""
    has = {"static": model.static}
    for side, letter in (("query", "q"), ("key", "k")):
        has[f"{side} projection"] = letter in model.branches and model.projection
        has[f"{side} gate"] = letter in model.branches and model.gate
    compositions = [where for where in ("pre", "post") if model.compose in (where, "both")]
    return [(where, branch) for where in compositions for branch in BRANCHES if has[branch]]


def all_ablations(model: ViT | LM, layers: Sequence[int]) -> list[Ablation]:
    """Return an ablation of each head and each branch in each of `layers`, and of each branch in all layers at once."""
    branches = branches_of(model)
    found = [Ablation(layer, head) for layer in layers for head in range(model.num_heads)]
    for layer in (*layers, None):
        found += [Ablation(layer, None, *branch) for branch in branches]
        found += [Ablation(layer, None, "both", "all")] * bool(branches)
    return found


def ablated_outputs(
    model: ViT | LM,
    params: Params,
    inputs: Float[Array, "B height width channels"] | Int[Array, "B T"],
    ablations: Sequence[Ablation],
) -> Float[Array, "N B *rest"]:
    """Return the model's output for each of N ablations; for a language model, the logits of the last token.

    Raises:
      ValueError: an ablation is none of `all_ablations`.
    """
    present, known = branches_of(model), all_ablations(model, range(model.depth))
    outputs = []
    for ablation in ablations:
        if ablation not in known:
            raise ValueError(f"the model has nothing that {ablation} changes")
        hooks: dict[str, Hook] = {}
        for block in range(model.depth):  # every ablation has all hooks, so that one program is compiled
            changed = ablation.layer in (None, block)
            heads = np.ones((1, model.num_heads, 1, 1), np.float32)
            if changed and ablation.head is not None:
                heads[:, ablation.head] = 0
            hooks |= {f"block{block:02d}/{name}": Partial(_gated, heads) for name in HEAD_ARRAYS}
            for where, branch in present:
                off = changed and (ablation.where, ablation.branch) in ((where, branch), ("both", "all"))
                hooks[f"block{block:02d}/{where}/{BRANCHES[branch]}"] = Partial(_gated, np.float32(not off))
        output = run_with_cache(model, params, inputs, hooks, names=()).output
        outputs.append(output[:, -1] if isinstance(model, LM) else output)
    return jnp.stack(outputs)


def _gated(gate: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x` where the gate is 1, and 0 where it is 0."""
    return x * jnp.asarray(gate, x.dtype)
