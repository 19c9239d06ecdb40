"""Contributions between heads under composition: of one input, and averages over many inputs.

Composition adds a[h']·map[h', h] to head h, where a[h'] is the score (pre) or the weight (post) of another head h': the
contribution of head h' to head h.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.errors import InputError
from dcvit.interpret.activations import compose_weights_of, forward
from dcvit.interpret.circuits import branch_maps
from dcvit.models import Params
from dcvit.models.lm import LM
from dcvit.models.vit import ViT

COMPOSITIONS = {"pre": "scores", "post": "weights"}  # by name, the array that is composed


class Contribution(NamedTuple):
    """The largest amount that a branch adds from one head to another, over all query-key pairs of an input.

    Fields:
      layer: the layer.
      where: the composition, "pre" or "post".
      branch: the branch, as in `dcvit.interpret.circuits.TERMS`.
      from_head, to_head: the heads.
      query, key: the pair of tokens.
      amount: what is added to the score ("pre") or to the attention weight ("post").
    """

    layer: int
    where: str
    branch: str
    from_head: int
    to_head: int
    query: int
    key: int
    amount: float


class AverageContributions(NamedTuple):
    """Averages over many inputs, for each layer.

    Fields:
      share: for "pre" and "post", |a[h']·map[h', h]| summed over all pairs of query and key, divided by its sum over
        the heads h'; the diagonal is the head's own share. L H H.
      entropy: entropy of each head's weights before post-compose, in nats, mean over queries. L H.
      examples: the number of inputs.
    """

    share: dict[str, np.ndarray]
    entropy: np.ndarray
    examples: int


def largest_contributions(arrays: Mapping[str, Array], layer: int, groups: int) -> list[Contribution]:
    """Return the largest contribution of each branch and pair of heads of a layer, for the first example.

    Gates and the skip connection do not combine different heads and are not included.

    Args:
      arrays: returned by `dcvit.interpret.activations.run_with_cache`.
      layer: the number of the layer.
      groups: the number of groups of heads.
    """
    found: list[Contribution] = []
    for where, name in COMPOSITIONS.items():
        weights = compose_weights_of(arrays, layer, where)
        if weights is None:
            continue
        a = np.asarray(arrays[f"block{layer:02d}/{name}"][0], np.float32)
        weights = ComposeWeights(*(None if w is None else jnp.asarray(w, jnp.float32) for w in weights))
        for branch, by_token in branch_maps(weights, groups).items():
            maps = np.moveaxis(np.asarray(by_token[0]), 0, -1)  # H H N
            maps = maps[:, :, None] if branch.startswith("key") else maps[..., None]  # H H #T #S
            for g, h in zip(*np.nonzero(np.abs(maps).max(axis=(2, 3)) > 0), strict=True):
                if g == h:
                    continue
                added = a[g] * maps[g, h]
                query, key = np.unravel_index(np.argmax(np.abs(added)), added.shape)
                amount = float(added[query, key])
                found.append(Contribution(layer, where, branch, int(g), int(h), int(query), int(key), amount))
    return found


def average_contributions(
    model: ViT | LM,
    params: Params,
    batches: Iterable[Float[Array, "_ height width channels"] | Int[Array, "_ T"]],
) -> AverageContributions:
    """Return the averages of contributions over batches of inputs; each batch is weighted by its number of examples.

    Raises:
      InputError: there is no input.
      FloatingPointError: the averages are not finite.
    """
    sums: dict[str, np.ndarray] = {}
    examples = 0
    run = jax.jit(lambda params, inputs: _sums(model, params, inputs))
    for batch in batches:
        examples += len(batch)
        for name, x in run(params, batch).items():
            sums[name] = sums.get(name, 0) + np.asarray(x, np.float64)
    if not examples:
        raise InputError("averages over data need at least one input")
    if not all(np.isfinite(x).all() for x in sums.values()):
        raise FloatingPointError("averages over data are NaN or infinite; check the parameters")
    entropy = sums.pop("entropy") / examples
    share = {
        where: sums[where] / np.maximum(sums[where].sum(axis=1, keepdims=True), 1e-30)
        for where in COMPOSITIONS
        if where in sums
    }
    return AverageContributions(share, entropy, examples)


def _sums(model: ViT | LM, params: Params, inputs: Array) -> dict[str, Array]:
    """Return, by name, the sums over a batch of the entropies, L H, and of the contributions to each head, L H H."""
    found: dict[str, list[Array]] = {"entropy": []}
    names = ["block*/scores", "block*/weights"]
    names += [f"block*/{where}/*" for where in COMPOSITIONS if model.compose in (where, "both")]
    arrays = forward(model, params, inputs, {}, names).arrays
    for layer in range(model.depth):
        a = arrays[f"block{layer:02d}/weights"]
        entropy = -jnp.sum(a * jnp.log(jnp.where(a > 0, a, 1)), axis=-1)
        found["entropy"].append(jnp.sum(jnp.mean(entropy, axis=-1), axis=0))
        for where, name in COMPOSITIONS.items():
            weights = compose_weights_of(arrays, layer, where)
            if weights is not None:
                added = _added(arrays[f"block{layer:02d}/{name}"], weights, model.groups)
                found.setdefault(where, []).append(added)
    return {name: jnp.stack(layers) for name, layers in found.items()}


def _added(a: Float[Array, "B H T S"], weights: ComposeWeights, groups: int) -> Float[Array, "H H"]:
    """Return |a·map| summed over all pairs, from head (row) to head (column); `a` is 0 where a key is not seen."""
    one = jnp.eye(a.shape[1], dtype=a.dtype)[None, None]
    maps = {branch: x.astype(a.dtype) for branch, x in branch_maps(weights, groups).items()}
    of_query = sum((x for branch, x in maps.items() if not branch.startswith("key")), one)  # #B #T H H
    of_key = sum((x for branch, x in maps.items() if branch.startswith("key")), 0 * one)  # #B #S H H

    def column(h: Array) -> Array:
        query, key = (jnp.swapaxes(x[..., h], 1, 2) for x in (of_query, of_key))
        return jnp.sum(jnp.abs(a * (query[..., None] + key[:, :, None])), axis=(0, 2, 3))

    return jax.lax.map(column, jnp.arange(a.shape[1])).T
