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

from dcvit.dcmha.backends.xla.reference import visible
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.inputs import Options
from dcvit.dcmha.segments import make_segments
from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.errors import InputError
from dcvit.interpret.activations import compose_weights_of, forward
from dcvit.interpret.circuits import branch_maps
from dcvit.models import Params, lm
from dcvit.models.decoder import token_context
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
    """Averages over many inputs, for each layer. A pair is a query and a key that it attends to.

    Fields:
      share: for "pre" and "post", |a[h']·map[h', h]| summed over all pairs, divided by its sum over the heads h'; the
        diagonal is the head's own share. L H H.
      dynamic: for "pre" and "post", the variance of the maps over pairs, divided by their mean squared distance from
        the identity: 0 for a static composition, 1 for one whose mean map is the identity. L.
      entropy: entropy of each head's weights before post-compose, in nats, mean over queries. L H.
      examples: the number of inputs.
    """

    share: dict[str, np.ndarray]
    dynamic: dict[str, np.ndarray]
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
    wrong = sorted(name for name, x in sums.items() if not np.isfinite(x).all())
    if wrong:
        raise FloatingPointError(f"averages over data are NaN or infinite: {', '.join(wrong)}; check the parameters")
    share, dynamic = {}, {}
    for where in (w for w in COMPOSITIONS if f"{w}/added" in sums):
        added, pairs = sums[f"{where}/added"], sums["pairs"][:, None, None]
        share[where] = added / np.maximum(added.sum(axis=1, keepdims=True), 1e-30)
        mean, square = sums[f"{where}/map"] / pairs, sums[f"{where}/square"] / pairs
        variance = np.maximum(square - mean**2, 0).sum(axis=(1, 2))
        static = ((mean - np.eye(mean.shape[-1])) ** 2).sum(axis=(1, 2))
        dynamic[where] = variance / np.maximum(variance + static, 1e-30)
    return AverageContributions(share, dynamic, sums["entropy"] / sums["queries"][:, None], examples)


def _sums(model: ViT | LM, params: Params, inputs: Array) -> dict[str, Array]:
    """Return the sums of `average_contributions` over all query-key pairs of a batch, by name."""
    names = ["block*/scores", "block*/weights"]
    names += [f"block*/{where}/*" for where in COMPOSITIONS if model.compose in (where, "both")]
    arrays = forward(model, params, inputs, {}, names).arrays
    layers = []
    for layer in range(model.depth):
        weights = arrays[f"block{layer:02d}/weights"]
        mask = attention_mask(model, inputs, layer, weights.shape[2]).astype(weights.dtype)
        entropy = -jnp.sum(weights * jnp.log(jnp.where(weights > 0, weights, 1)), axis=(0, 2, 3))
        found = {
            "entropy": entropy, "queries": jnp.asarray(weights.shape[0] * weights.shape[2], jnp.float32),
            "pairs": jnp.sum(mask),
        }  # fmt: skip
        for where, name in COMPOSITIONS.items():
            w = compose_weights_of(arrays, layer, where)
            if w is not None:
                sums = _map_sums(arrays[f"block{layer:02d}/{name}"], w, mask, model.groups)
                found |= {f"{where}/{key}": x for key, x in sums.items()}
        layers.append(found)
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)


def attention_mask(
    model: ViT | LM, inputs: Float[Array, "B height width channels"] | Int[Array, "B N"], layer: int, tokens: int
) -> Bool[Array, "B T T"]:
    """Return a layer's mask, True where a query may attend to a key by causality, window and documents."""
    mask = None
    if isinstance(model, LM):
        windows = lm.layer_windows(model)
        window = windows[layer % len(windows)] and (model.prefill_window or model.window)
        segments = make_segments(token_context(inputs, model.end_of_text).segments)
        mask = visible(tokens, tokens, Options(causal=True, window=window), segments=segments)
    return jnp.broadcast_to(True if mask is None else mask[:, 0], (len(inputs), tokens, tokens))


def _map_sums(
    a: Float[Array, "B H T S"], w: ComposeWeights, mask: Float[Array, "B T S"], groups: int
) -> dict[str, Float[Array, "H H"]]:
    """Return sums over visible pairs: "added" of |a·map|, "map", and "square" of map², each (from head, to head)."""
    one = jnp.eye(a.shape[1], dtype=a.dtype)[None, None]
    maps = {branch: x.astype(a.dtype) for branch, x in branch_maps(w, groups).items()}
    of_query = sum((x for branch, x in maps.items() if not branch.startswith("key")), one)  # #B #T H H
    of_key = sum((x for branch, x in maps.items() if branch.startswith("key")), 0 * one)  # #B #S H H

    def column(h: Array) -> tuple[Array, Array, Array]:
        query, key = (jnp.swapaxes(x[..., h], 1, 2) for x in (of_query, of_key))
        maps = query[..., None] + key[:, :, None]
        pairs = maps * mask[:, None]
        axes = (0, 2, 3)
        return jnp.sum(jnp.abs(a * pairs), axis=axes), jnp.sum(pairs, axis=axes), jnp.sum(pairs * maps, axis=axes)

    sums = jax.lax.map(column, jnp.arange(a.shape[1]))
    return {name: x.T for name, x in zip(("added", "map", "square"), sums, strict=True)}
