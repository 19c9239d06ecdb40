"""Composition folded into queries and outputs: DCMHA at the price of plain attention, with any implementation of it.

If the heads of a group share a key head, or do not mix because there are only gates, and no branch is key-wise, then a
compose multiplies the scores of a group by a matrix W of the query alone (`dcvit.dcmha.compose.query_map`). Both matrix
products of attention commute with it:

  pre-compose    Σ_h W[h, n]·(q_h·k)       = (Σ_h W[h, n]·q_h)·k
  post-compose   Σ_s Σ_h W[h, n]·a_h[s]·v_s = Σ_h W[h, n]·(Σ_s a_h[s]·v_s)

So the queries of a group are combined before plain attention, and its outputs after it. The result is that of Eqn 4
apart from rounding, for every mask and window. Decoding needs no cache but that of keys and values.
"""

from __future__ import annotations

from dcvit.dcmha.compose import ComposeWeights, query_map
from dcvit.dcmha.numerics import statistics_dtype
from dcvit.dcmha.shapes import Array, Float


def obstacle(pre: ComposeWeights | None, post: ComposeWeights | None, *, key_heads: int, groups: int) -> str | None:
    """Return why the composition cannot be folded, or None if it can."""
    composed = [w for w in (pre, post) if w is not None]
    if not composed:
        return "there is no composition"
    if any(x is not None for w in composed for x in (w.k1, w.k2, w.kg)):
        return "the composition is key-wise"
    if groups % key_heads and any(mixes_heads(w) for w in composed):
        return f"the {groups} groups of heads are not inside the {key_heads} key heads"
    return None


def mixes_heads(w: ComposeWeights) -> bool:
    """Return whether a compose without key-wise branches has more than gates."""
    return w.q1 is not None or w.static is not None


def compose_heads(x: Float[Array, "B T H D"], w: ComposeWeights | None, *, groups: int) -> Float[Array, "B T H D"]:
    """Combine the vectors of the heads of each group as a compose without key-wise branches combines their scores.

    Computes in float32, or float64 for float64 inputs, and returns the dtype of `x`.
    """
    if w is None:
        return x
    batch, length, heads, head_dim = x.shape
    groups = groups if mixes_heads(w) else heads
    wide = statistics_dtype(x.dtype)
    matrix = query_map(w, batch=batch, length=length, heads=heads, groups=groups, dtype=wide)[..., None]
    grouped = x.astype(wide).reshape(batch, length, groups, heads // groups, 1, head_dim)
    # A sum of products of vectors: XLA fuses it. A matrix product of J×J for each token would be slower.
    terms = [matrix[:, :, :, j] * grouped[:, :, :, j] for j in range(heads // groups)]
    return sum(terms[1:], start=terms[0]).reshape(x.shape).astype(x.dtype)
