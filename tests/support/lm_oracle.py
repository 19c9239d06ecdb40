"""Forward pass of a language model on one row of tokens in float64 numpy, independent of the package."""

import math

import numpy as np
import oracle

erf = np.vectorize(math.erf)
ACTIVATIONS = {
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def forward(params, tokens, windows, *, heads, mlp, epsilon, rotary=0, base=10_000.0, parallel=False, rank=2):
    """Return logits T V. `windows` has a window or None for each layer; other options are derived from `params`."""
    x = params["embedding"]["embedding"][tokens].astype(np.float64)
    if "pos_embedding" in params:
        x = x + params["pos_embedding"][: len(tokens)]
    for i, window in enumerate(windows):
        p = params["Transformer"][f"decoderblock_{i}"]
        inside = normalize(x, p["attention_norm"], epsilon)
        attended = attention(p["MultiHeadDotProductAttention_0"], inside, window, heads, rotary, base, rank)
        inside = normalize(x if parallel else x + attended, p["mlp_norm"], epsilon)
        x = x + attended + feed_forward(p["MlpBlock_0"], inside, mlp)
    x = normalize(x, params["Transformer"]["decoder_norm"], epsilon)
    return x @ (params["head"]["kernel"] if "head" in params else params["embedding"]["embedding"].T)


def normalize(x, p, epsilon):
    """Apply RMSNorm over the last axis, or LayerNorm if there is a bias."""
    if "bias" not in p:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * p["scale"]
    centered = x - x.mean(axis=-1, keepdims=True)
    return centered / np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + epsilon) * p["scale"] + p["bias"]


def feed_forward(p, x, mlp):
    hidden = ACTIVATIONS["silu" if mlp == "swiglu" else mlp](dense(p["in"], x))
    if mlp == "swiglu":
        hidden = hidden * dense(p["gate"], x)
    return dense(p["out"], hidden)


def dense(p, x):
    """Apply a linear layer with one or two output axes."""
    return np.tensordot(x, p["kernel"], 1) + p.get("bias", 0)


def rope(x, positions, width, base):
    """Rotate number i and i + width/2 of each head, as a complex number, by position · base^(-2i/width) radians."""
    out = np.array(x, np.float64)
    for t, position in enumerate(positions):
        for i in range(width // 2):
            turn = np.exp(1j * position * base ** (-2 * i / width))
            turned = (x[t, :, i] + 1j * x[t, :, i + width // 2]) * turn
            out[t, :, i], out[t, :, i + width // 2] = turned.real, turned.imag
    return out


def attention(p, x, window, heads, rotary, base, rank):
    q, k, v = (dense(p[name], x) for name in ("query", "key", "value"))  # T H D, T K D
    if "query_norm" in p:
        q, k = normalize(q, p["query_norm"], 1e-6), normalize(k, p["key_norm"], 1e-6)
    q, k = (rope(y, range(len(x)), rotary, base) for y in (q, k))
    pre, post = (compose_weights(p[side], x, heads, rank) if side in p else None for side in ("pre", "post"))
    y = oracle.attention(q[None], k[None], v[None], pre, post, causal=True, window=window)[0]
    return y.reshape(len(x), -1) @ p["out"]["kernel"].reshape(-1, x.shape[-1]) + p["out"].get("bias", 0)


def compose_weights(p, x, heads, rank):
    """Compute Eqn 5 and 6 as in Appendix D, for the sides and branches that `p` has."""
    fields = dict.fromkeys(("q1", "q2", "qg", "k1", "k2", "kg"))
    fields["static"] = p.get("w_b")
    for side in ("q", "k"):
        if f"w_{side}1" in p:
            both = ACTIVATIONS["gelu_tanh"](x @ p[f"w_{side}1"][:, 0]) @ p[f"w_{side}2"][0]
            down, up = (half.reshape(1, len(x), rank, heads) for half in np.split(both, 2, axis=-1))
            fields[f"{side}1"] = down / np.sqrt(np.mean(down**2, axis=-1, keepdims=True) + 1e-6)
            fields[f"{side}2"] = up
        if f"w_{side}g" in p:
            fields[f"{side}g"] = np.tanh(x @ p[f"w_{side}g"])[None]
    return fields
