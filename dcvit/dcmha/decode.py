"""Attention of one query, as when a text is decoded token by token: Eqn 4 in the products that one query needs.

Keys and values are read once, as they lie, by one product for each example: queries stand apart in a (K·D)×H matrix
that is zero outside of each head's own lanes, so that no copy of the cache is made to bring heads to the front. The
product computes K times what it needs; with one query, memory is the bound. Scores are S×H, as key-wise weights are.
All that a compose does by the query alone is one H×H matrix for an example (`query_map`). Sums over the heads, which
lie side by side, are products with a matrix of ones: on CPUs twice as fast as XLA's own.

Measured on two CPU cores: scripts/bench_dcmha.py. On GPUs: not measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dcvit.dcmha.compose import ComposeWeights, statistics_dtype
from dcvit.dcmha.reference import masked_softmax, visible
from dcvit.dcmha.shapes import Array, Bool, Float

# Products of float32 stay so where the default is less: those of H×H matrices cost nothing.
exact = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def refuses(
    q: Any, k: Any, v: Any, pre: Any, post: Any, *, causal: Any, window: Any, mask: Any, groups: Any
) -> str | None:
    """One line why these arguments cannot be taken, or None. Only shapes are read."""
    return None if q.shape[1] == 1 else f"it takes one query, found {q.shape[1]}"


def attention(
    q: Float[Array, "B 1 H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    causal: bool,
    window: int | None,
    mask: Bool[Array, "#B 1 1 #S"] | None,
    groups: int,
    scale: float,
) -> Float[Array, "B 1 H D"]:
    """See `dcvit.dcmha.attention`, which checks the arguments. Scores and weights are float32 at least."""
    wide = statistics_dtype(q.dtype)
    batch, keys, key_heads, width = k.shape
    heads = q.shape[2]
    own = jnp.repeat(jnp.eye(key_heads, dtype=bool), heads // key_heads, axis=1)[:, None]  # K 1 H: who attends to whom
    apart = jnp.where(own, q[:, 0].swapaxes(1, 2)[:, None], 0).reshape(batch, -1, heads)
    flat_k, flat_v = (x.reshape(batch, keys, -1) for x in (k, v))
    scores = jnp.einsum("bsm,bmh->bsh", flat_k, apart, preferred_element_type=wide) * jnp.asarray(scale, wide)
    if pre is not None:
        scores = compose(scores, pre, groups)
    seen = visible(1, keys, causal=causal, window=window, mask=mask)
    weights = masked_softmax(scores, None if seen is None else seen[:, 0, 0, :, None], axis=1)
    if post is not None:
        weights = compose(weights, post, groups)
    out = jnp.einsum("bsh,bsm->bhm", weights.astype(v.dtype), flat_v, preferred_element_type=wide)
    out = jnp.sum(jnp.where(own.T, out.reshape(batch, heads, key_heads, width).swapaxes(2, 3), 0), axis=3)
    return out[:, None].astype(q.dtype)


def compose(a: Float[Array, "B S H"], w: ComposeWeights, groups: int) -> Float[Array, "B S H"]:
    """`dcvit.dcmha.compose` of one query, whose keys lie before the heads."""
    batch, _, heads = a.shape
    out = exact("bsn,bnh->bsh", a, query_map(w, batch, heads, groups, a.dtype))
    if w.k1 is not None and w.k2 is not None:
        same = jnp.kron(jnp.eye(groups, dtype=a.dtype), jnp.ones((heads // groups,) * 2, a.dtype))
        hidden = exact("bsrn,nh->bsrh", a[:, :, None] * w.k1.astype(a.dtype), same)  # for each head of its group
        for rank in range(hidden.shape[2]):
            out = out + hidden[:, :, rank] * w.k2[:, :, rank].astype(a.dtype)
    if w.kg is not None:
        out = out + a * w.kg.astype(a.dtype)
    return out


def query_map(w: ComposeWeights, batch: int, heads: int, groups: int, dtype: Any) -> Float[Array, "B H H"]:
    """1 + W_b + w_q1·w_q2 + diag(w_qg), zero between groups: a compose without its key-wise part is a times this."""
    per_group = heads // groups
    one = jnp.broadcast_to(jnp.eye(per_group, dtype=dtype), (batch, groups, per_group, per_group))
    out = one
    if w.static is not None:
        out = out + w.static.astype(dtype)[None]
    if w.q1 is not None and w.q2 is not None:
        down, up = (x[:, 0].astype(dtype).reshape(batch, -1, groups, per_group) for x in (w.q1, w.q2))
        out = out + exact("brgn,brgh->bgnh", down, up)
    if w.qg is not None:
        out = out + one * w.qg.astype(dtype).reshape(batch, groups, 1, per_group)
    return jnp.einsum("bgnh,gf->bgnfh", out, jnp.eye(groups, dtype=dtype)).reshape(batch, heads, heads)
