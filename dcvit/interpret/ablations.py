"""Predictions of a model after ablations: without a head, or without a branch of a composition."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.interpret.activations import Hook, forward
from dcvit.models import Params
from dcvit.models.lm import LM
from dcvit.models.vit import ViT

# Factors whose zeros switch a branch off.
BRANCHES = {
    "static": "static", "query projection": "q2", "query gate": "qg", "key projection": "k2", "key gate": "kg",
}  # fmt: skip
WHERE = ("pre", "post")
HEAD_ARRAYS = ("scores", "weights", "composed_weights")


class Ablation(NamedTuple):
    """One change of a model: a head or a branch of a composition that is switched off.

    Fields:
      layer: the layer; None means all layers.
      head: the ablated head, or None. Its scores, weights and composed weights are 0, so that it attends to nothing,
        and nothing of it is composed into other heads.
      where: the compose whose branches are switched off, "pre", "post" or "both"; None if no branch is.
      branch: the branch that is switched off, a key of `BRANCHES`; "all" for all of them.
    """

    layer: int | None
    head: int | None = None
    where: str | None = None
    branch: str | None = None


def branches_of(model: ViT | LM) -> list[tuple[str, str]]:
    """Return the pairs (compose, branch) that a model has: values of `Ablation.where` and `Ablation.branch`."""
    return [
        (where, branch)
        for where in WHERE
        if model.compose in (where, "both")
        for branch in BRANCHES
        if (
            model.static
            if branch == "static"
            else branch[0] in model.branches and (model.gate if "gate" in branch else model.projection)
        )
    ]


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
      ValueError: the model has no layer, head, composition or branch of an ablation.
    """
    heads = np.ones((len(ablations), model.depth, model.num_heads), np.float32)
    branches = np.ones((len(ablations), model.depth, 2, len(BRANCHES)), np.float32)
    names, present = [*BRANCHES], branches_of(model)
    for n, ablation in enumerate(ablations):
        layer, head, where, branch = ablation
        off = [pair for pair in present if where in (pair[0], "both") and branch in (pair[1], "all")]
        if (
            not 0 <= (layer or 0) < model.depth
            or not 0 <= (head or 0) < model.num_heads
            or (not off and (head is None or where is not None or branch is not None))
        ):
            raise ValueError(f"the model has nothing that {ablation} changes")
        at = slice(None) if layer is None else layer
        if head is not None:
            heads[n, at, head] = 0
        for composition, name in off:
            branches[n, at, WHERE.index(composition), names.index(name)] = 0
    found: Array = _outputs(model, params, inputs, jnp.asarray(heads), jnp.asarray(branches))
    return found


@functools.partial(jax.jit, static_argnums=0)
def _outputs(
    model: ViT | LM, params: Params, inputs: Array, heads: Float[Array, "N L H"], branches: Float[Array, "N L 2 K"]
) -> Float[Array, "N B *rest"]:
    def one(gates: tuple[Array, Array]) -> Array:
        output = forward(model, params, inputs, _hooks(model, branches_of(model), *gates)).output
        return output[:, -1] if isinstance(model, LM) else output

    found: Array = jax.lax.map(one, (heads, branches))
    return found


def _hooks(
    model: ViT | LM, present: Sequence[tuple[str, str]], heads: Float[Array, "L H"], branches: Float[Array, "L 2 N"]
) -> dict[str, Hook]:
    """Return, by name of an array, hooks of `forward` that multiply heads and branches by gates: 0 switches off."""
    hooks: dict[str, Hook] = {}
    for layer in range(model.depth):
        gate = heads[layer][None, :, None, None]
        for name in HEAD_ARRAYS:
            hooks[f"block{layer:02d}/{name}"] = functools.partial(_gated, gate)
        for where, branch in present:
            one = branches[layer, WHERE.index(where), [*BRANCHES].index(branch)]
            hooks[f"block{layer:02d}/{where}/{BRANCHES[branch]}"] = functools.partial(_gated, one)
    return hooks


def _gated(gate: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x * gate.astype(x.dtype)
