"""DCFormer and DCPythia of the paper's authors, in PyTorch (github.com/Caiyun-AI/DCFormer).

One tensor holds the weights of the same kind for all compositions of a layer, in the order pre-compose query-wise and
key-wise, post-compose query-wise and key-wise. The rank is 2, and all heads are one group. Their rotary embedding has
float16 tables, that of this project float32. In their local layers, the window of a prompt's tokens is larger by one
token than that of generated tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights import hf_config as hf
from dcvit.weights import torch_layers
from dcvit.weights.config_table import ABSENT, Key, field, only, written
from dcvit.weights.family import Description, shapes_of
from dcvit.weights.links import Link, Shape
from dcvit.weights.lm_fields import ConfigTable
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import ATTENTION, BLOCK, embedding_and_head

EMBEDDING, QK_NORM = "tok_embeddings.weight", "layers.0.attention.q_norm.scale"
TABLE: torch_layers.Table = {
    "layers.{}.attention_norm": f"{BLOCK}/attention_norm",
    "layers.{}.attention.wqkv": [f"{ATTENTION}/{name}" for name in ("query", "key", "value")],
    "layers.{}.attention.wo": f"{ATTENTION}/out",
    "layers.{}.attention.q_norm.scale": f"{ATTENTION}/query_norm/scale",
    "layers.{}.attention.k_norm.scale": f"{ATTENTION}/key_norm/scale",
    "layers.{}.ffn_norm": f"{BLOCK}/mlp_norm",
    "layers.{}.feed_forward.w1": f"{BLOCK}/MlpBlock_0/in",
    "layers.{}.feed_forward.w2": f"{BLOCK}/MlpBlock_0/out",
    "layers.{}.feed_forward.w3": f"{BLOCK}/MlpBlock_0/gate",
    "layers.{}.feed_forward.mg": f"{BLOCK}/MlpBlock_0/group_gate",
    "norm": "Transformer/decoder_norm",
}
PATTERNS = {None: "1:1", "LG": "1:1", "LGLL": "3:1", "LGL6": "7:1"}
# A pattern of local and global layers in turn needs no name, and may then have any window.
NAMED = {ours: theirs for theirs, ours in PATTERNS.items() if theirs != "LG"}
WINDOW = 256  # of every named pattern
COMPOSITIONS = [(stage, side) for stage in ("pre", "post") for side in "qk"]
# Copies of other weights for decoding, the identity in place of a static projection, and caches.
UNUSED = re.compile(
    r"layers\.\d+\.attention\.(dyn_w_proj\.(dw_m|qkw_m|sw|(pre|post)_proj\.w)|kv_cache\.\w+|(pre|post)_proj\.w)"
)


def _keys(kind: str) -> list[Key]:
    """Return the table of config.json for a `model_type`, "dcformer" or "dcpythia"."""
    pythia = kind == "dcpythia"
    keys = [
        field("dim", "width"),
        field("n_layer", "depth"),
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
    """Return the fields `window_pattern`, `window` and `prefill_window`, from `window_type` and `window_size`."""
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
    rotary = int(head_dim * hf.number(config, "rotary_pct", 0.25))
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
    type_of=lambda fields: "dcpythia" if fields["norm"] == "layernorm" else "dcformer",
)


def matches(tensors: Tensors, config: Json) -> bool:
    return {EMBEDDING, "layers.0.attention.dyn_w_proj.qkw"} <= set(tensors)


def describe(tensors: Tensors, config: Json) -> Description:
    return CONFIG.describe(tensors, {"use_qk_norm": QK_NORM in tensors, **config} if config else {})


config = CONFIG.config


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    found = embedding_and_head("tok_embeddings", "output", description, tensors)
    found += torch_layers.links(TABLE, description)
    names = [f"layers.{{}}.attention.dyn_w_proj.{name}" for name in ("dw1", "qkw", "dd")]
    return found + torch_layers.in_all_layers(compositions(names, ATTENTION, shapes_of(description)), description)


def compositions(theirs: Sequence[str], ours: str, shapes: Mapping[str, Shape]) -> list[Link]:
    """Link the weights of the C = 4 compositions of a layer, in G = 1 group.

    Args:
      theirs: names of both layers of the dynamic projections (M G C I and G C I 2R H), and of the gates (M G C·H).
      ours: path of the attention.
      shapes: the parameters of the model.
    """
    width, _, inner = (size or 0 for size in shapes[f"{ours}/pre/w_q1"])
    heads = shapes[f"{ours}/pre/w_qg"][1] or 0
    first, second, gates = theirs
    up = (1, 4, inner, inner // max(heads, 1), heads)

    def paths(end: str) -> tuple[str, ...]:
        return tuple(f"{ours}/{stage}/w_{side}{end}" for stage, side in COMPOSITIONS)

    return [
        Link(
            (first,), paths("1"),
            lambda x: [x.reshape(width, 1, 4, inner)[:, :, c] for c in range(4)],
            lambda *parts: (np.stack(parts, axis=2),), ((width, 1, 4, inner),),
        ),
        Link(
            (second,), paths("2"),
            lambda x: [x.reshape(1, 4, inner, inner)[:, c] for c in range(4)],
            lambda *parts: (np.stack(parts, axis=1).reshape(up),), (up,),
        ),
        Link(
            (gates,), paths("g"),
            lambda x: [x.reshape(width, 4, heads)[:, c] for c in range(4)],
            lambda *parts: (np.stack(parts, axis=1).reshape(width, 1, 4 * heads),), ((width, 1, 4 * heads),),
        ),
    ]  # fmt: skip
