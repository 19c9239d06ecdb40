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


def softmax(scores, mask=None):
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
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


def moh(p, x, mask, heads, key_heads):
    """Mixture-of-head (Jin et al., 2024) with all heads routed."""
    scores, values = scores_of(p, x, heads, key_heads)
    gate = heads * softmax(x @ p["moh"]["routed"]["kernel"])
    return merge(p, [gate[:, h, None] * (softmax(scores[h], mask) @ values[h]) for h in range(heads)])


def moh_topk(p, x, mask, heads, key_heads):
    """Mixture-of-head with a quarter of shared heads and a choice of two quarters, normalized as released."""
    scores, values = scores_of(p, x, heads, key_heads)
    router, shared, chosen = p["moh_topk"], heads // 4, heads // 2
    gate = np.zeros((len(x), heads))
    for t, token in enumerate(x):
        parts = 2 * softmax(token @ router["parts"]["kernel"])
        always = softmax(token @ router["shared"]["kernel"]) if shared > 1 else np.ones(1)
        gate[t, :shared] = parts[0] * shared * always
        routed = softmax(token @ router["routed"]["kernel"])
        best = sorted(range(heads - shared), key=lambda i, routed=routed: -routed[i])[:chosen]
        for i in best:
            gate[t, shared + i] = parts[1] * chosen * routed[i] / sum(routed[j] for j in best)
    return merge(p, [gate[:, h, None] * (softmax(scores[h], mask) @ values[h]) for h in range(heads)])


def balance(router, x, chosen):
    """Return the load-balance loss of tokens N M: h_r · Σ_i P_i · f_i."""
    scores = np.stack([softmax(token @ router["routed"]["kernel"]) for token in x])
    used = np.zeros_like(scores)
    for t, score in enumerate(scores):
        used[t, sorted(range(len(score)), key=lambda i, score=score: -score[i])[:chosen]] = 1
    return scores.shape[1] * float((scores.mean(axis=0) * used.mean(axis=0)).sum())


def diff(p, x, mask, heads, key_heads, layer):
    """DIFF Transformer (Ye et al., 2024), Eqn 1 to 3; `layer` counts from 1 as in the paper."""
    q, k, v = (heads_of(p, name, x) for name in ("query", "key", "value"))
    width, d = q.shape[-1], p["diff"]
    start = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
    factor = math.exp(d["lambda_q1"] @ d["lambda_k1"]) - math.exp(d["lambda_q2"] @ d["lambda_k2"]) + start
    shared, outputs = heads // key_heads, []
    for pair in range(heads // 2):
        first, second = (
            softmax(q[:, h] @ k[:, h // shared].T / math.sqrt(width), mask) for h in (2 * pair, 2 * pair + 1)
        )
        wide = 2 * (pair // shared)  # grouped queries: neighboring pairs share values of width 2·D
        out = (first - factor * second) @ np.concatenate([v[:, wide], v[:, wide + 1]], axis=1)
        out = out / np.sqrt((out**2).mean(axis=1, keepdims=True) + 1e-5) * d["norm"]["scale"]
        outputs.append((1 - start) * out)
    return merge(p, outputs)


def diff2(p, x, mask, heads, key_heads):
    """DIFF Transformer V2 (Ye et al., 2026): attn[0::2] - σ(λ)·attn[1::2] of 2H query heads."""
    scores, values = scores_of(p, x, 2 * heads, key_heads)
    attended = [softmax(scores[h], mask) @ values[h] for h in range(2 * heads)]
    factor = 1 / (1 + np.exp(-x @ p["diff2"]["lambda"]["kernel"]))
    return merge(p, [attended[2 * h] - factor[:, h, None] * attended[2 * h + 1] for h in range(heads)])


def xsa(p, x, mask, heads, key_heads):
    """Exclusive self-attention (arXiv 2603.09078): z = y - (yᵀv)·v/‖v‖² with the token's own value."""
    scores, values = scores_of(p, x, heads, key_heads)
    outputs = []
    for h in range(heads):
        y = softmax(scores[h], mask) @ values[h]
        for t, v in enumerate(values[h]):
            y[t] = y[t] - (y[t] @ v) * v / (v @ v)
        outputs.append(y)
    return merge(p, outputs)


def knocking(p, x, mask, heads, key_heads):
    """Knocking-heads attention (arXiv 2510.23052): all heads share the maps T_Q, T_K and T_V."""
    q, k, v = (heads_of(p, name, x) for name in ("query", "key", "value"))
    q, k, v = (y @ p[f"knocking_{name}"]["map"] for name, y in (("query", q), ("key", k), ("value", v)))
    shared, outputs = heads // key_heads, []
    for h in range(heads):
        scores = q[:, h] @ k[:, h // shared].T / math.sqrt(q.shape[-1])
        outputs.append(softmax(scores, mask) @ v[:, h // shared])
    return merge(p, outputs)


def gated_elementwise(p, x, mask, heads, key_heads):
    """Elementwise gated attention (Qiu et al., 2025): Y ⊙ σ(X·W_θ) before the output projection."""
    scores, values = scores_of(p, x, heads, key_heads)
    gates = np.split(1 / (1 + np.exp(-x @ p["gated_elementwise"]["gate"]["kernel"])), heads, axis=1)
    return merge(p, [gates[h] * (softmax(scores[h], mask) @ values[h]) for h in range(heads)])


def paired(p, x, mask, heads, key_heads, window=None, rotary=0):
    """Paired heads (modded-nanogpt, pull request 191): one softmax over the keys of two heads, in the order of rows.

    Rows 2t and 2t+1 are the first and the second head of a pair at token t. If the mask is causal, so is the order of
    the rows, of which `window` are seen. A rotary embedding of `rotary` numbers has the number of a row as position.
    """
    q, k, v = (heads_of(p, name, x) for name in ("query", "key", "value"))
    is_causal, half, shared = not np.triu(mask, 1).any(), heads // 2, heads // key_heads
    outputs = [np.zeros((len(x), v.shape[-1])) for _ in range(heads)]
    for pair in range(half):
        first = pair // shared
        for row in range(2 * len(x)):
            seen = [
                key for key in range(2 * len(x))
                if mask[row // 2, key // 2] and (not is_causal or row - (window or row + 1) < key <= row)
            ]  # fmt: skip
            query = rotated(q[row // 2, pair + row % 2 * half], row, rotary)
            keys = [(key // 2, first + key % 2 * key_heads // 2) for key in seen]
            scores = [query @ rotated(k[at], key, rotary) for at, key in zip(keys, seen, strict=True)]
            weights = softmax(np.array(scores) / math.sqrt(q.shape[-1]))
            outputs[pair + row % 2 * half][row // 2] = weights @ np.stack([v[at] for at in keys])
    return merge(p, outputs)


def rotated(x, position, rotary):
    """Return a vector with a rotary embedding of its first `rotary` numbers."""
    return lm_oracle.rope(x[None, None], [position], rotary, 10_000)[0, 0]
