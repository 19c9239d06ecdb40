"""QK and OV circuits of heads, the maps between heads of a composition, and the contributions of heads to others.

A compose multiplies the H scores or weights of a query-key pair, as a row vector, by an H×H map (Eqn 7). It adds
a[h']·map[h', h] to head h, where a[h'] is the score (pre) or the weight (post) of head h': the contribution of h' to h.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.shapes import Array, Float
from dcvit.interpret.activations import compose_weights_of
from dcvit.models import Params
from dcvit.models.lm import LM
from dcvit.models.trees import unstack_blocks
from dcvit.models.vit import ViT

# The terms of a map: the skip connection, the static projection and the four dynamic branches of Eqn 7.
TERMS = ("skip", "static", "query projection", "query gate", "key projection", "key gate")
COMPOSITIONS = {"pre": "scores", "post": "weights"}  # by name, the array that is composed


class Contribution(NamedTuple):
    """The largest amount that a branch adds from one head to another, over all query-key pairs of an input.

    Fields:
      layer: the layer.
      where: the composition, "pre" or "post".
      branch: the branch, as in `TERMS`.
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


class Circuits(NamedTuple):
    """The bilinear forms of the heads of a layer, without biases, norms and rotary embeddings.

    Fields:
      qk: W_Q·W_Kᵀ/√D. The score of inputs x_t and x_s is x_t·qk[h]·x_sᵀ.
      ov: W_V·W_O. Head h adds the weighted sum of x_s·ov[h] to the residual stream.
    """

    qk: Float[Array, "H M M"]
    ov: Float[Array, "H M M"]


def circuits(model: ViT | LM, params: Params, layer: int) -> Circuits:
    """Return the circuits of a layer. Raises KeyError if there is no such layer."""
    is_lm = isinstance(model, LM)
    blocks = unstack_blocks(params)["Transformer"]
    block = blocks[f"{'de' if is_lm else 'en'}coderblock_{layer}"]["MultiHeadDotProductAttention_0"]
    q, k, v, out = (jnp.asarray(block[name]["kernel"]) for name in ("query", "key", "value", "out"))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    qk = jnp.einsum("mhd,nhd->hmn", q, k) * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    return Circuits(qk, jnp.einsum("mhd,hdn->hmn", v, out.reshape(v.shape[1], v.shape[2], -1)))


def branch_maps(weights: ComposeWeights, groups: int) -> dict[str, Float[Array, "#B #N H H"]]:
    """Return the maps between heads, H×H, of each branch of a compose (Eqn 7) that exists, by its name in `TERMS`.

    Query-wise branches have a map for each of N queries, key-wise branches for each of N keys; the static projection
    has a single map. A compose multiplies the scores of a pair by the sum of its maps and the identity.
    """
    found = {}
    if weights.static is not None:
        found["static"] = jax.scipy.linalg.block_diag(*weights.static)[None, None]
    for side, down, up, gate in (
        ("query", weights.q1, weights.q2, weights.qg), ("key", weights.k1, weights.k2, weights.kg),
    ):  # fmt: skip
        if down is not None and up is not None:
            group = jnp.arange(down.shape[-1]) // (down.shape[-1] // groups)
            same_group = (group[:, None] == group[None]).astype(down.dtype)[None, None]
            found[f"{side} projection"] = jnp.einsum("bnrg,bnrh->bngh", down, up) * same_group
        if gate is not None:
            found[f"{side} gate"] = jnp.eye(gate.shape[-1], dtype=gate.dtype)[None, None] * gate[..., None, :]
    return found


def pair_terms(
    weights: ComposeWeights, query: int, key: int, *, groups: int = 1, example: int = 0
) -> dict[str, Float[Array, "H H"]]:
    """Return the map between heads of a query-key pair, split into the terms of Eqn 7 that exist, by name in `TERMS`.

    With a window of composition, a pair outside of it has the skip connection alone.

    Args:
      weights: the factors of one composition.
      query, key: positions of the pair.
      groups: the number of groups of heads.
      example: number of the example in the batch.
    """
    at = {"static": (0, 0), "query": (example, query), "key": (example, key)}
    terms = {name: maps[at[name.split()[0]]] for name, maps in branch_maps(weights, groups).items()}
    first = next(iter(terms.values()))
    return {"skip": jnp.eye(len(first), dtype=first.dtype), **terms}


def largest_contributions(
    arrays: Mapping[str, Array], layer: int, groups: int, compose_window: int | None = None
) -> list[Contribution]:
    """Return the largest contribution of each branch and pair of heads of a layer, for the first example.

    Gates and the skip connection do not combine different heads and are not included.

    Args:
      arrays: returned by `dcvit.interpret.activations.run_with_cache`.
      layer: the number of the layer.
      groups: the number of groups of heads.
      compose_window: that of the model: older keys of a query have no contributions.
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
                if compose_window is not None:
                    added = np.triu(added, 1 - compose_window)
                query, key = np.unravel_index(np.argmax(np.abs(added)), added.shape)
                amount = float(added[query, key])
                found.append(Contribution(layer, where, branch, int(g), int(h), int(query), int(key), amount))
    return found


def captured_variance(forms: Float[Array, "H M N"]) -> Float[Array, " N"]:
    """Return the cumulative share of variance that the first principal components of concatenated heads capture.

    The forms of all heads are concatenated along their rows, H·M×N, and the share of component i is its squared
    singular value over the sum of all. A lower curve means more diverse heads (Figure 5 of the paper; Cordonnier et
    al., 2020). If all forms are zero, the result is 1.
    """
    flat = forms.reshape(-1, forms.shape[-1])
    values = jnp.linalg.eigvalsh(flat.T @ flat)[::-1]
    values = jnp.maximum(values, 0)
    total = jnp.sum(values)
    return jnp.where(total > 0, jnp.cumsum(values) / jnp.where(total > 0, total, 1), 1)
