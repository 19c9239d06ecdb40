"""QK and OV circuits of heads, and the maps between heads of a composition.

A compose multiplies the H scores or weights of a query-key pair, as a row vector, by an H×H map (Eqn 7). Head h' (row)
contributes to head h (column).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.shapes import Array, Float
from dcvit.models import Params
from dcvit.models.lm import LM
from dcvit.models.trees import unstack_blocks
from dcvit.models.vit import ViT

# The terms of a map: the skip connection, the static projection and the four dynamic branches of Eqn 7.
TERMS = ("skip", "static", "query projection", "query gate", "key projection", "key gate")


class Circuits(NamedTuple):
    """The bilinear forms of the heads of a layer, without biases, norms and rotary embeddings.

    Fields:
      qk: W_Q·W_Kᵀ/√D. The score of inputs x_t and x_s is x_t·qk[h]·x_sᵀ.
      ov: W_V·W_O. Head h adds the weighted sum of x_s·ov[h] to the residual stream.
    """

    qk: Float[Array, "H M M"]
    ov: Float[Array, "H M M"]


def circuits(model: ViT | LM, params: Params, layer: int) -> Circuits:
    """Return the circuits of a layer.

    Raises:
      ValueError: there is no such layer.
    """
    if not 0 <= layer < model.depth:
        raise ValueError(f"there is no layer {layer}: the model has {model.depth} layers")
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

    Args:
      weights: the factors of one composition.
      query, key: positions of the pair.
      groups: the number of groups of heads.
      example: number of the example in the batch.

    Raises:
      ValueError: the composition has no branch.
    """
    at = {"static": (0, 0), "query": (example, query), "key": (example, key)}
    terms = {name: maps[at[name.split()[0]]] for name, maps in branch_maps(weights, groups).items()}
    if not terms:
        raise ValueError("a composition without a branch has no map")
    first = next(iter(terms.values()))
    return {"skip": jnp.eye(len(first), dtype=first.dtype), **terms}


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
