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
from dcvit.weights.config_table import ABSENT, Key, field, only, written
from dcvit.weights.family import Description
from dcvit.weights.links import Arrays, Link, linear, same
from dcvit.weights.lm_fields import ConfigTable, LMFields
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import attention, block, checked, embedding_and_head, linear_layer, norm_layer

EMBEDDING, HEAD, QK_NORM = "tok_embeddings.weight", "output.weight", "layers.0.attention.q_norm.scale"
PATTERNS = {None: "1:1", "LG": "1:1", "LGLL": "3:1", "LGL6": "7:1"}
# A pattern of local and global layers in turn needs no name, and may then have any window.
NAMED = {ours: theirs for theirs, ours in PATTERNS.items() if theirs != "LG"}
WINDOW = 256  # of every named pattern
COMPOSITIONS = [(where, side) for where in ("pre", "post") for side in "qk"]
# Copies of other weights for decoding, the identity in place of a static projection, and caches.
UNUSED = re.compile(
    r"layers\.\d+\.attention\.(dyn_w_proj\.(dw_m|qkw_m|sw|(pre|post)_proj\.w)|kv_cache\.\w+|(pre|post)_proj\.w)"
)


def _keys(kind: str) -> list[Key]:
    """Return the keys of a type; some of them only one of the types has."""
    pythia = kind == "dcpythia"
    keys = [
        field("dim", "width"),
        field("n_layer", "depth", hf.depth),
        field("n_head", "num_heads"),
        Key("n_local_heads", _check_key_heads, lambda fields: fields["num_heads"]),
        written("head_dim", lambda fields: fields["width"] // fields["num_heads"]),
        field("intermediate_size", "mlp_dim", default=lambda found: 4 * found["width"] if pythia else None),
        field("block_size", "context", default=2048),
        field("norm_eps", "norm_epsilon", hf.number, 1e-5),
        field("rope_base", "rotary_base", hf.number),
        only("tie_word_embeddings", False),
        only("use_dcmha", True),
        only("query_wise", False),
        written("is_training", False),
        Key(
            "use_qk_norm",
            lambda config, _: {"qk_norm": "rmsnorm" if hf.flag(config, "use_qk_norm", False) else None},
            lambda fields: fields["qk_norm"] is not None,
        ),
        Key("window_type", _windows, lambda fields: NAMED.get(fields["window_pattern"])),
        written("window_size", lambda fields: None if fields["window_pattern"] == "none" else fields["window"]),
    ]
    if pythia:
        return [
            *keys,
            Key("rotary_pct", _rotary_fraction, lambda fields: fields["rotary_fraction"]),
            field("use_linear_bias", "use_bias", hf.flag, True),
            field("use_parallel_residual", "parallel", hf.flag, True),
        ]
    return [
        *keys,
        Key("mgate", _mlp_groups, lambda fields: True if fields["mlp_groups"] else ABSENT),
        written("mgate_dim", lambda fields: fields["mlp_groups"] or ABSENT),
    ]


def _check_key_heads(config: Json, found: Json) -> Json:
    if config.get("n_local_heads") not in (None, -1, found["num_heads"]):
        raise CheckpointError(f"config.json: n_local_heads={config['n_local_heads']!r} is not supported, only n_head")
    return {}


def _windows(config: Json, _: Json) -> Json:
    """Return the fields of the windows, of `window_type` and `window_size`."""
    kind, size = config.get("window_type"), config.get("window_size", WINDOW)
    if kind not in (*PATTERNS,):
        raise CheckpointError(f"config.json: window_type={kind!r} is not supported; supported: LG, LGLL, LGL6, null")
    if kind is not None and size != WINDOW:
        raise CheckpointError(f"config.json: window_size={size!r} with window_type={kind!r} is not supported")
    window = WINDOW if size is None else hf.size(config, "window_size", WINDOW)
    pattern = "none" if size is None else PATTERNS[kind]
    return {"window_pattern": pattern, "window": window, "prefill_window": window + 1}


def _rotary_fraction(config: Json, found: Json) -> Json:
    head_dim = found["width"] // found["num_heads"]
    rotary = int(head_dim * hf.fraction(config, "rotary_pct", 0.25))
    return {"rotary_fraction": rotary / max(head_dim, 1)}


def _mlp_groups(config: Json, _: Json) -> Json:
    return {"mlp_groups": hf.size(config, "mgate_dim", 44) if hf.flag(config, "mgate", False) else None}


SHARED: Json = {"compose": "both", "compose_gelu": "exact"}
CONSTANTS: dict[str, Json] = {
    "dcformer": {**SHARED, "norm": "rmsnorm", "mlp": "swiglu"},
    "dcpythia": {**SHARED, "norm": "layernorm", "mlp": "gelu"},
}
CONFIG = ConfigTable(
    "",
    {"dcformer": "DCFormer", "dcpythia": "DCPythia"},
    _keys,
    constants=CONSTANTS.__getitem__,
    type_of=lambda fields: "dcpythia" if fields.norm == "layernorm" else "dcformer",
)


def matches(tensors: Tensors, config: Json) -> bool:
    return {EMBEDDING, "layers.0.attention.dyn_w_proj.qkw"} <= set(tensors)


def describe(tensors: Tensors, config: Json) -> Description:
    return CONFIG.describe({"use_qk_norm": QK_NORM in tensors, **config} if config else {})


def config(description: Description) -> Json:
    return CONFIG.config(description)


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
