"""The forward pass of the authors' DCFormer and DCPythia, from the paper's equations and the names of their tensors.

In PyTorch and float64, on a dict of tensors; see Section 3 of the paper for the composition (Eqn 5-8). C counts the
four compositions of a layer: of scores by queries and keys, of weights by queries and keys.
"""

import math

import numpy as np


def random_state(torch, config, std=0.1):
    """Random tensors by the authors' names, as they would be in a file."""
    pythia = config["model_type"] == "dcpythia"
    m, h, f, v = config["dim"], config["n_head"], config["intermediate_size"], config["vocab_size"]
    inner = 4 * h
    shapes = {"tok_embeddings.weight": (v, m), "output.weight": (v, m), "norm.weight": (m,)}
    for i in range(config["n_layer"]):
        layer = {
            "attention_norm.weight": (m,), "ffn_norm.weight": (m,),
            "attention.wqkv.weight": (3 * m, m), "attention.wo.weight": (m, m),
            "attention.dyn_w_proj.dw1": (m, 1, 4, inner), "attention.dyn_w_proj.qkw": (1, 4, inner, 4, h),
            "attention.dyn_w_proj.dd": (m, 1, 4 * h), "feed_forward.w1.weight": (f, m),
            "feed_forward.w2.weight": (m, f),
        }  # fmt: skip
        if config["use_qk_norm"]:
            layer |= {f"attention.{n}_norm.scale": (m // h,) for n in "qk"}
        if not pythia:
            layer["feed_forward.w3.weight"] = (f, m)
        if config.get("mgate"):
            layer["feed_forward.mg.weight"] = (config["mgate_dim"], m)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if pythia:
        norms = [name for name in shapes if name.endswith("norm.weight")]
        biased = ("wqkv.weight", "wo.weight", "w1.weight", "w2.weight") if config["use_linear_bias"] else ()
        for name in [*norms, *(n for n in shapes if n.endswith(biased))] if biased else norms:
            shapes[name.replace(".weight", ".bias")] = shapes[name][:1]
    generator = torch.Generator().manual_seed(3)
    return {
        name: float("norm" in name and not name.endswith("bias")) + std * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def rms_norm(x, epsilon, scale=1.0):
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * scale


def rotate(torch, x, base, width):
    """Rotate the pairs (i, i + width/2) of B T H D as complex numbers."""
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    phase = torch.exp(1j * torch.arange(x.shape[1])[:, None] * frequency)[None, :, None]
    turned = torch.complex(x[..., : width // 2], x[..., width // 2 : width]) * phase
    return torch.cat([turned.real, turned.imag, x[..., width:]], -1)


def compose(torch, a, weights, first, static=None):
    """A + A·W_b + Σ over queries and keys of A·w_1·w_2 + A⊗gate, for A of shape B H T S."""
    down, up, gate = weights
    out = a if static is None else a + torch.einsum("bhts,hn->bnts", a, static.squeeze(0))
    for c, token in ((first, "t"), (first + 1, "s")):
        hidden = torch.einsum(f"bhts,b{token}rh->brts", a, down[:, :, c])
        out = out + torch.einsum(f"brts,b{token}rh->bhts", hidden, up[:, :, c])
        out = out + a * torch.einsum(f"b{token}h->bh{token}", gate[:, :, c]).unsqueeze(-1 if token == "t" else -2)
    return out


def attend(torch, config, p, x, visible):
    """Attention of a layer with tensors `p` on normalized inputs B T M; `visible` is the mask T S."""
    batch, length, width = x.shape
    heads = config["n_head"]
    fused = x @ p["wqkv.weight"].T + p.get("wqkv.bias", 0.0)
    q, k, v = (part.reshape(batch, length, heads, -1) for part in fused.split(width, -1))
    if config["use_qk_norm"]:
        q, k = (rms_norm(y, config.get("qk_epsilon", 1e-6), p[f"{n}_norm.scale"]) for y, n in ((q, "q"), (k, "k")))
    rotated = int(config.get("rotary_pct", 1.0) * (width // heads))
    q, k = (rotate(torch, y, config["rope_base"], rotated) for y in (q, k))
    hidden = torch.einsum("btm,mci->btci", x, p["dyn_w_proj.dw1"].squeeze(1))
    tanh = config.get("compose_gelu") == "tanh"
    cdf = torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)) if tanh else torch.erf(hidden / 2**0.5)
    hidden = 0.5 * hidden * (1 + cdf)
    both = torch.einsum("btci,cirh->btcrh", hidden, p["dyn_w_proj.qkw"].squeeze(0))
    gate = torch.tanh(x @ p["dyn_w_proj.dd"].squeeze(1)).reshape(batch, length, 4, heads)
    weights = rms_norm(both[:, :, :, :2], 1e-6), both[:, :, :, 2:], gate
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(width // heads)
    scores = compose(torch, scores, weights, 0, p.get("pre.w_b")).masked_fill(~visible, -math.inf)
    out = torch.einsum("bhts,bshd->bthd", compose(torch, scores.softmax(-1), weights, 2, p.get("post.w_b")), v)
    return out.reshape(batch, length, width) @ p["wo.weight"].T + p.get("wo.bias", 0.0)


def feed_forward(torch, config, p, x):
    hidden = x @ p["w1.weight"].T + p.get("w1.bias", 0.0)
    if config["model_type"] == "dcpythia":
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    else:
        hidden = hidden * torch.sigmoid(hidden) * (x @ p["w3.weight"].T)
    if config.get("mgate"):
        scores = (x @ p["mg.weight"].T).softmax(-1)
        hidden = (hidden.unflatten(-1, (config["mgate_dim"], -1)) * scores.unsqueeze(-1)).flatten(-2)
    return hidden @ p["w2.weight"].T + p.get("w2.bias", 0.0)


LOCAL = {None: "LG", "LG": "LG", "LGLL": "LGLL", "LGL6": "LGLLLLLL"}


def forward(torch, config, state, tokens, prompt=None):
    """Logits of tokens B T. The first `prompt` are read at once; their local layers see one token more."""
    state = {name: tensor.double() for name, tensor in state.items()}
    pythia = config["model_type"] == "dcpythia"
    length, epsilon = tokens.shape[1], config["norm_eps"]
    row, column = np.mgrid[:length, :length]
    window = np.where(row < (length if prompt is None else prompt), 1, 0) + (config["window_size"] or length)
    visible = {"G": column <= row, "L": (column <= row) & (column > row - window)}

    def norm(name, x):
        if not pythia:
            return rms_norm(x, epsilon, state[f"{name}.weight"])
        mean = x.mean(-1, keepdim=True)
        return rms_norm(x - mean, epsilon, state[f"{name}.weight"]) + state[f"{name}.bias"]

    def part(prefix):
        return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}

    x = state["tok_embeddings.weight"][torch.from_numpy(tokens).long()]
    pattern = LOCAL[config["window_type"]]
    for i in range(config["n_layer"]):
        mask = torch.from_numpy(visible[pattern[i % len(pattern)]])
        after = x + attend(torch, config, part(f"layers.{i}.attention."), norm(f"layers.{i}.attention_norm", x), mask)
        source = x if pythia and config["use_parallel_residual"] else after
        x = after + feed_forward(torch, config, part(f"layers.{i}.feed_forward."), norm(f"layers.{i}.ffn_norm", source))
    return (norm("norm", x) @ state["output.weight"].T).numpy()
