"""Cross-head attention of several papers for one example, in float64 numpy as loops over heads, from their formulas.

Every function takes the parameters `p` of the layer, the input `x` (T M), a boolean mask (T S), and the numbers of
heads and key heads. Nothing is shared with the package.
"""

import math

import lm_oracle
import numpy as np
import oracle


def heads_of(p, name, x):
    """Return T × heads × width."""
    return np.tensordot(x, p[name]["kernel"].astype(np.float64), 1)


def merge(p, outputs, times=1.0):
    """Concat the outputs of all heads, each T × width, and project them with W_O · times."""
    kernel = p["out"]["kernel"].astype(np.float64)
    return np.concatenate(outputs, axis=1) @ (kernel.reshape(-1, kernel.shape[-1]) * times)


def softmax(scores, mask):
    scores = np.where(mask, scores, -np.inf)
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def scores_of(p, x, heads, key_heads):
    """Return q·k/√D of every head, and the values of its key head."""
    q, k, v = (heads_of(p, name, x) for name in ("query", "key", "value"))
    shared = heads // key_heads
    scores = [q[:, h] @ k[:, h // shared].T / math.sqrt(q.shape[-1]) for h in range(heads)]
    return np.stack(scores), [v[:, h // shared] for h in range(heads)]


def composed(p, x, mask, heads, key_heads):
    """Eqn 4 to 8 of DCMHA with the weights that `p` has; without any, the attention of Vaswani et al., 2017.

    Talking-heads attention (Shazeer et al., 2020) has static weights before and after the softmax, head mixing of
    multi-token attention (Golovneva et al., 2025) after it in groups of heads, "lightweight" a query-wise projection
    of rank 1 after it.
    """
    q, k, v = (heads_of(p, name, x)[None] for name in ("query", "key", "value"))
    weights, groups = {"pre": None, "post": None}, 1
    for where in weights.keys() & p.keys():
        rank = p[where]["w_q1"].shape[-1] // (2 * heads) if "w_q1" in p[where] else None
        weights[where] = lm_oracle.compose_weights(p[where], x, heads, rank)
        groups = len(p[where]["w_b"]) if "w_b" in p[where] else 1
    out = oracle.attention(q, k, v, weights["pre"], weights["post"], mask=mask[None, None], groups=groups)[0]
    return merge(p, [out[:, h] for h in range(heads)])


mha = talking = mta = lightweight = composed


def gated(p, x, mask, heads, key_heads):
    """Headwise gated attention (Qiu et al., 2025): Y ⊙ σ(X·W_θ), W_θ = 2·W_qg, and an output projection 2·W_O."""
    scores, values = scores_of(p, x, heads, key_heads)
    gate = 1 / (1 + np.exp(-x @ (2.0 * p["post"]["w_qg"])))
    return merge(p, [gate[:, h, None] * (softmax(scores[h], mask) @ values[h]) for h in range(heads)], times=2)
