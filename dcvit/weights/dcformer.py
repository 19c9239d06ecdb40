"""DCFormer and DCPythia of the paper's authors, in PyTorch (github.com/Caiyun-AI/DCFormer).

One tensor holds the weights of the same kind for all compositions of a layer, in the order pre-compose of queries and
of keys, post-compose of queries and of keys. The rank is 2, and all heads are one group. The tables of their rotary
embedding are float16, those of this project float32; a prompt's attention in their local layers sees one token more
than that of the tokens after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights import hf_config as hf
from dcvit.weights.family import Description
from dcvit.weights.links import Arrays, Link, linear, same
from dcvit.weights.lm_fields import LMFields, check_expressible, vocab_size
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import attention, block, checked, embedding_and_head, linear_layer, norm_layer

EMBEDDING, HEAD, QK_NORM = "tok_embeddings.weight", "output.weight", "layers.0.attention.q_norm.scale"
ARCHITECTURES = {"dcformer": "DCFormer", "dcpythia": "DCPythia"}
PATTERNS = {None: "1:1", "LG": "1:1", "LGLL": "3:1", "LGL6": "7:1"}
WINDOW = 256  # of every named pattern
COMPOSITIONS = [(where, side) for where in ("pre", "post") for side in "qk"]
# Copies of other weights for decoding, the identity in place of a static projection, and caches.
UNUSED = re.compile(
    r"layers\.\d+\.attention\.(dyn_w_proj\.(dw_m|qkw_m|sw|(pre|post)_proj\.w)|kv_cache\.\w+|(pre|post)_proj\.w)"
)


def matches(tensors: Tensors, config: Json) -> bool:
    return {EMBEDDING, "layers.0.attention.dyn_w_proj.qkw"} <= set(tensors)


def describe(tensors: Tensors, config: Json) -> Description:
    fields = _fields({"use_qk_norm": QK_NORM in tensors, **config} if config else {})
    return fields.describe(hf.size(config, "vocab_size"))


def _fields(config: Json) -> LMFields:
    pythia = hf.check_type(config, *ARCHITECTURES) == "dcpythia"
    width, heads = hf.size(config, "dim"), hf.size(config, "n_head")
    hf.check_only(config, use_dcmha=True, query_wise=False, tie_word_embeddings=False)
    if config.get("n_local_heads") not in (None, -1, heads):
        raise CheckpointError(f"config.json: n_local_heads={config['n_local_heads']!r} is not supported, only n_head")
    kind, size = config.get("window_type"), config.get("window_size", WINDOW)
    if kind not in (*PATTERNS,):
        raise CheckpointError(f"config.json: window_type={kind!r} is not supported; supported: LG, LGLL, LGL6, null")
    if kind is not None and size != WINDOW:
        raise CheckpointError(f"config.json: window_size={size!r} with window_type={kind!r} is not supported")
    window = WINDOW if size is None else hf.size(config, "window_size", WINDOW)
    head_dim = width // heads
    rotary = int(head_dim * hf.fraction(config, "rotary_pct", 0.25)) if pythia else head_dim
    mgate = not pythia and hf.flag(config, "mgate", False)
    return LMFields(
        width=width, depth=hf.depth(config, "n_layer"), num_heads=heads, context=hf.size(config, "block_size", 2048),
        mlp_dim=hf.size(config, "intermediate_size", 4 * width if pythia else None),
        mlp="gelu" if pythia else "swiglu", mlp_groups=hf.size(config, "mgate_dim", 44) if mgate else None,
        rotary_fraction=rotary / max(head_dim, 1), rotary_base=hf.number(config, "rope_base"),
        norm="layernorm" if pythia else "rmsnorm", norm_epsilon=hf.number(config, "norm_eps", 1e-5),
        use_bias=pythia and hf.flag(config, "use_linear_bias", True),
        parallel=pythia and hf.flag(config, "use_parallel_residual", True),
        window_pattern="none" if size is None else PATTERNS[kind], window=window, prefill_window=window + 1,
        qk_norm="rmsnorm" if hf.flag(config, "use_qk_norm", False) else None, compose="both", compose_gelu="exact",
    ).canonical()  # fmt: skip


def config(description: Description) -> Json:
    fields = LMFields.of(description)
    pythia = fields.norm == "layernorm"
    kind = "dcpythia" if pythia else "dcformer"
    local = fields.window_pattern != "none"
    # A pattern of local and global layers in turn needs no name, and may then have any window.
    named = {ours: theirs for theirs, ours in PATTERNS.items() if theirs != "LG"}
    values = {
        "architectures": [ARCHITECTURES[kind]], "model_type": kind, "vocab_size": vocab_size(description),
        "dim": fields.width, "n_layer": fields.depth, "n_head": fields.num_heads, "n_local_heads": fields.num_heads,
        "head_dim": fields.head_dim, "intermediate_size": fields.hidden, "block_size": fields.context,
        "norm_eps": fields.norm_epsilon, "rope_base": fields.rotary_base, "tie_word_embeddings": False,
        "use_dcmha": True, "query_wise": False, "is_training": False, "use_qk_norm": fields.qk_norm is not None,
        "window_type": named.get(fields.window_pattern), "window_size": fields.window if local else None,
    }  # fmt: skip
    if pythia:
        values |= {
            "rotary_pct": fields.rotary_fraction, "use_linear_bias": fields.use_bias,
            "use_parallel_residual": fields.parallel,
        }  # fmt: skip
    elif fields.mlp_groups:
        values |= {"mgate": True, "mgate_dim": fields.mlp_groups}
    check_expressible(fields, _fields(values), ARCHITECTURES[kind])
    return values


def unused(name: str) -> bool:
    return UNUSED.fullmatch(name) is not None


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    fields = LMFields.of(description)
    width, hidden, bias = (fields.width,), (fields.hidden,), fields.use_bias
    norm_bias = fields.norm == "layernorm"
    mlps = [("w1", "in", width, hidden), ("w2", "out", hidden, width)]
    if fields.mlp == "swiglu":
        mlps.append(("w3", "gate", width, hidden))
    found = embedding_and_head(EMBEDDING, HEAD, description, tensors)
    for i in range(fields.depth):
        theirs, ours = f"layers.{i}", attention(i)
        found += norm_layer(f"{theirs}.attention_norm", f"{block(i)}/attention_norm", fields.width, norm_bias)
        for part in ("weight", "bias") if bias else ("weight",):
            found.append(_fused(f"{theirs}.attention.wqkv", ours, part, fields))
        heads = (fields.num_heads, fields.head_dim)
        found += linear_layer(f"{theirs}.attention.wo", f"{ours}/out", heads, width, bias)
        if fields.qk_norm:
            found += [
                checked(same(f"{theirs}.attention.{name[0]}_norm.scale", f"{ours}/{name}_norm/scale"), fields.head_dim)
                for name in ("query", "key")
            ]
        found += compositions([f"{theirs}.attention.dyn_w_proj.{name}" for name in ("dw1", "qkw", "dd")], ours, fields)
        found += norm_layer(f"{theirs}.ffn_norm", f"{block(i)}/mlp_norm", fields.width, norm_bias)
        for their_name, our_name, inputs, outputs in mlps:
            path = f"{block(i)}/MlpBlock_0/{our_name}"
            found += linear_layer(f"{theirs}.feed_forward.{their_name}", path, inputs, outputs, bias)
        if fields.mlp_groups:
            gate = f"{block(i)}/MlpBlock_0/group_gate/kernel"
            found.append(linear(f"{theirs}.feed_forward.mg.weight", gate, width, (fields.mlp_groups,)))
    return found + norm_layer("norm", "Transformer/decoder_norm", fields.width, norm_bias)


def _fused(theirs: str, ours: str, part: str, fields: LMFields) -> Link:
    """Link the rows of the queries, then those of the keys and of the values."""
    split, rows = (3, fields.num_heads, fields.head_dim), 3 * fields.width
    end = "kernel" if part == "weight" else "bias"

    def to_ours(x: np.ndarray) -> Arrays:
        return [np.moveaxis(y, (0, 1), (-2, -1)) for y in x.reshape(*split, *x.shape[1:])]  # M H D, or H D

    def to_theirs(*parts: np.ndarray) -> Arrays:
        joined = np.stack([np.moveaxis(y, (-2, -1), (0, 1)) for y in parts])
        return (joined.reshape(rows, *joined.shape[3:]),)

    paths = tuple(f"{ours}/{name}/{end}" for name in ("query", "key", "value"))
    shape = (rows, fields.width) if part == "weight" else (rows,)
    return checked(Link((f"{theirs}.{part}",), paths, to_ours, to_theirs), *shape)


def compositions(theirs: Sequence[str], ours: str, fields: LMFields) -> list[Link]:
    """Link the weights of the C = 4 compositions of a layer, in G = 1 group.

    Args:
      theirs: names of the dynamic projections, M G C I then G C I 2R H, and of the gates, M G C·H.
      ours: path of the attention.
      fields: of the model.
    """
    inner = 2 * fields.rank * fields.num_heads
    width, heads = fields.width, fields.num_heads
    first, second, gates = theirs

    def paths(end: str) -> tuple[str, ...]:
        return tuple(f"{ours}/{where}/w_{side}{end}" for where, side in COMPOSITIONS)

    return [
        Link(
            (first,), paths("1"),
            lambda x: [x.reshape(width, 1, 4, inner)[:, :, c] for c in range(4)],
            lambda *parts: (np.stack(parts, axis=2),), ((width, 1, 4, inner),),
        ),
        Link(
            (second,), paths("2"),
            lambda x: [x.reshape(1, 4, inner, inner)[:, c] for c in range(4)],
            lambda *parts: (np.stack(parts, axis=1).reshape(1, 4, inner, 2 * fields.rank, heads),),
            ((1, 4, inner, 2 * fields.rank, heads),),
        ),
        Link(
            (gates,), paths("g"),
            lambda x: [x.reshape(width, 4, heads)[:, c] for c in range(4)],
            lambda *parts: (np.stack(parts, axis=1).reshape(width, 1, 4 * heads),), ((width, 1, 4 * heads),),
        ),
    ]  # fmt: skip
