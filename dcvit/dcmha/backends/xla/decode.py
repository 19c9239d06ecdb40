"""Attention of a single query, as in decoding, in plain JAX operations: Eqn 4 with matrix products for all heads.

One matrix product per example reads the keys, and one the values, once and in their own layout. The query of each head
is a column of a (K·D)×H matrix that is zero outside the rows of the head's own key head, so that no copy of the cache
is needed to move the heads to the front. The product computes K times the required values; with one query, memory
bandwidth is the limit. Scores have the layout S×H, as key-wise weights have. The query-wise part of a compose is one
H×H matrix for each example (`map_of_heads`). Sums over the heads, which are the innermost axis, are products with a
matrix of ones: on CPUs they take half the time of XLA's reduction.

scripts/bench/dcmha.py measured this on two CPU cores. On an H200, a layer of 405M takes 0.12 to 0.15 ms, of which
reading its keys and values is at most a tenth by estimate.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dcvit.dcmha.backends.xla.reference import composed_inside, composed_pairs, masked_softmax, visible
from dcvit.dcmha.compose import ComposeWeights, query_map
from dcvit.dcmha.inputs import Call, UnsupportedError
from dcvit.dcmha.numerics import statistics_dtype
from dcvit.dcmha.shapes import Array, Float

# Products with H×H matrices are cheap, so that float32 operands are never rounded to a narrower type.
exact_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def supports(call: Call) -> str | None:
    """Return the reason why a call is not supported, or None."""
    queries = call.inputs.q.shape[1]
    return None if queries == 1 else f"decoding attends from one query, found {queries}"


def run(call: Call) -> Float[Array, "B T H D"]:
    """Compute the attention of one query (T = 1) that a `Call` describes, and return the outputs of the heads.

    Scores and weights are float32, or float64 for float64 inputs.

    Raises:
      UnsupportedError: T > 1.
    """
    if (reason := supports(call)) is not None:
        raise UnsupportedError(reason)
    (q, k, v, pre, post, mask, segments, _, pairs), options = call.inputs, call.options
    wide = statistics_dtype(q.dtype)
    batch, keys, key_heads, head_dim = k.shape
    heads = q.shape[2]
    # K 1 H: which key head each query head uses
    key_head_mask = jnp.repeat(jnp.eye(key_heads, dtype=bool), heads // key_heads, axis=1)[:, None]
    block_diagonal_q = jnp.where(key_head_mask, q[:, 0].swapaxes(1, 2)[:, None], 0).reshape(batch, -1, heads)
    flat_k, flat_v = (x.reshape(batch, keys, -1) for x in (k, v))
    scores = jnp.einsum("bsm,bmh->bsh", flat_k, block_diagonal_q, preferred_element_type=wide)
    scores = scores * jnp.asarray(options.scale, wide)
    pairs = composed_pairs(1, keys, options) if pairs is None else pairs
    inside = None if pairs is None else pairs[:, 0, 0, :, None]
    in_groups = partial(compose, groups=options.groups)
    scores = composed_inside(in_groups, scores, pre, inside)
    attended = visible(1, keys, options, mask, segments)
    weights = masked_softmax(scores, None if attended is None else attended[:, 0, 0, :, None], axis=1)
    weights = composed_inside(in_groups, weights, post, inside)
    out = jnp.einsum("bsh,bsm->bhm", weights.astype(v.dtype), flat_v, preferred_element_type=wide)
    out = jnp.sum(jnp.where(key_head_mask.T, out.reshape(batch, heads, key_heads, head_dim).swapaxes(2, 3), 0), axis=3)
    return out[:, None].astype(q.dtype)


def compose(a: Float[Array, "B S H"], w: ComposeWeights, groups: int) -> Float[Array, "B S H"]:
    """Return the result of `dcvit.dcmha.compose.compose` (Eqn 7) for one query, with the heads as the last axis."""
    batch, _, heads = a.shape
    out = exact_einsum("bsn,bnh->bsh", a, map_of_heads(w, batch, heads, groups, a.dtype))
    if w.k1 is not None and w.k2 is not None:
        same_group = jnp.kron(jnp.eye(groups, dtype=a.dtype), jnp.ones((heads // groups,) * 2, a.dtype))
        # The hidden value of a group, repeated for each of its heads.
        hidden = exact_einsum("bsrn,nh->bsrh", a[:, :, None] * w.k1.astype(a.dtype), same_group)
        for rank in range(hidden.shape[2]):
            out = out + hidden[:, :, rank] * w.k2[:, :, rank].astype(a.dtype)
    if w.kg is not None:
        out = out + a * w.kg.astype(a.dtype)
    return out


def map_of_heads(w: ComposeWeights, batch: int, heads: int, groups: int, dtype: DTypeLike) -> Float[Array, "B H H"]:
    """Return `query_map` for one query as an H×H matrix for each example, zero for heads of different groups."""
    matrix = query_map(w, batch=batch, length=1, heads=heads, groups=groups, dtype=dtype)[:, 0]
    block_diagonal = matrix[:, :, :, None] * jnp.eye(groups, dtype=dtype)[None, :, None, :, None]
    return jnp.broadcast_to(block_diagonal.reshape(-1, heads, heads), (batch, heads, heads))
