"""Families of language models: GPT-2, GPT-NeoX and LLaMA of Hugging Face transformers, and DCFormer of the authors.

Each is a row: the names of tensors and the keys of config.json in the other library. `LanguageModels` recognizes,
describes, reads and writes all of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from dcvit.errors import CheckpointError
from dcvit.models.fields import TRAINING_ONLY_FIELDS, WINDOW_PATTERNS
from dcvit.parallel.trees import Tensors
from dcvit.weights.family import Description, Row, check_only, defaults, shapes_of
from dcvit.weights.links import Link, Table, compositions, embedding_and_head, from_table, in_all_layers
from dcvit.weights.tensors import Json

BLOCK = "Transformer/decoderblock_{}"
ATTENTION, MLP = f"{BLOCK}/MultiHeadDotProductAttention_0", f"{BLOCK}/MlpBlock_0"
QKV = [f"{ATTENTION}/{name}" for name in ("query", "key", "value")]
LAST_NORM = "Transformer/decoder_norm"
# Fields of `dcvit.models.lm.LM` that files do not hold: they do not change the function of a document, or only where it
# begins.
NOT_IN_FILES = (*TRAINING_ONLY_FIELDS, "end_of_text")
DEFAULTS = defaults("lm", "end_of_text")  # of the others, which determine the parameters and the function

# Fields that have no effect if another field has a value.
WITHOUT_EFFECT: dict[tuple[str, object], Sequence[str]] = {
    ("position", "learned"): ("rotary_fraction", "rotary_base", "rotary_scaling"),
    ("window_pattern", "none"): ("window", "prefill_window"),
    ("qk_norm", None): ("qk_norm_epsilon",),
    ("compose", None): ("branches", "projection", "gate", "static", "rank", "groups", "compose_gelu", "compose_window"),
    ("projection", False): ("rank", "compose_gelu"),
}


def canonical(fields: Mapping[str, object]) -> Json:
    """Return all fields of a language model: sizes are explicit, and fields without effect have their defaults.

    Raises:
      CheckpointError: a field is unknown in files, the heads do not divide the width, or the key heads the heads.
    """
    if unknown := fields.keys() - DEFAULTS.keys():
        raise CheckpointError(f"a language model has no field {min(unknown)!r} in files")
    found = {**DEFAULTS, **fields}
    width, heads = found["width"], found["num_heads"]
    keys = found["num_key_heads"] or heads
    if width % heads or heads % keys:
        raise CheckpointError(f"{heads} heads should divide the width {width}, and {keys} key heads the heads")
    head_dim = width // heads
    found |= {
        "mlp_dim": found["mlp_dim"] or 4 * width, "num_key_heads": keys, "mlp_groups": found["mlp_groups"] or None,
        "prefill_window": None if found["prefill_window"] == found["window"] else found["prefill_window"],
        "rotary_fraction": round(found["rotary_fraction"] * head_dim) / head_dim,
        "rotary_scaling": found["rotary_scaling"] and list(found["rotary_scaling"]),
        "qkv_bias": None if found["qkv_bias"] == "qkv" * found["use_bias"] else found["qkv_bias"],
    }  # fmt: skip
    idle = [name for (field, value), names in WITHOUT_EFFECT.items() if found[field] == value for name in names]
    return found | {name: DEFAULTS[name] for name in idle}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModels(Row):
    """A family of language models.

    Fields:
      ends: names of the embedding and of the head. The head is named without prefix.
      table: names of the other modules; see `dcvit.weights.links.from_table`.
      classes: the class of the other library by `model_type`; written is the first whose config.json has all fields.
      in_out, by_head: how linear layers are stored; see `dcvit.weights.links.from_table`.
      dynamic: names of the weights of compositions; see `dcvit.weights.links.compositions`.
      shown: tensors by keys of config.json; without the key, the tensor shows if its value is true.
    """

    ends: tuple[str, str]
    table: Table
    classes: Mapping[str, str]
    in_out: bool = False
    by_head: bool = False
    dynamic: Sequence[str] = ()
    shown: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def describe(self, tensors: Tensors, config: Json) -> Description:
        """Return the description of the model of a config.json."""
        known = {key: name in tensors for key, name in self.shown.items()} if config else {}
        config, fields = self._read({**known, **config})
        differing = {name: value for name, value in fields.items() if value != DEFAULTS[name]}
        return Description("lm", config["vocab_size"], differing)

    def links(self, description: Description, tensors: Tensors | None = None) -> list[Link]:
        """Return the links of a model; `tensors` are those of a file, or None for writing."""
        found_prefix = self.prefix(tensors or {})
        prefix = self.prefixes[0] if found_prefix is None else found_prefix
        embedding, head = self.ends
        table = {f"{prefix}{theirs}": ours for theirs, ours in self.table.items()}
        found = embedding_and_head(f"{prefix}{embedding}", head, description, tensors)
        found += from_table(table, description, in_out=self.in_out, by_head=self.by_head)
        if self.dynamic:
            found += in_all_layers(compositions(self.dynamic, ATTENTION, shapes_of(description)), description)
        return found

    def config(self, description: Description) -> Json:
        """Return the content of config.json. Raises CheckpointError if no key can express a field's value."""
        if description.model_name != "lm" or description.num_outputs is None:
            raise CheckpointError("expected a language model with a vocabulary")
        fields = canonical({name: x for name, x in description.fields.items() if name not in NOT_IN_FILES})
        lacking: list[str] = []
        for kind, name in self.classes.items():
            values = {"architectures": [name], "vocab_size": description.num_outputs, **self.keys_of(fields, kind)}
            _, theirs = self._read(values)
            different = [f"{key}={x!r} (only {theirs[key]!r})" for key, x in fields.items() if x != theirs[key]]
            if not different:
                return values
            lacking = min(lacking or different, different, key=len)
        raise CheckpointError(f"{next(iter(self.classes.values()))} cannot express {', '.join(lacking)}")

    def _read(self, config: Json) -> tuple[Json, Json]:
        check_only(config, is_causal=True)
        config, fields = self.fields_of(config)
        width, heads = fields["width"], fields["num_heads"]
        if (config.get("head_dim") or width // heads) * heads != width:
            raise CheckpointError(f"config.json: head_dim={config['head_dim']!r} is not {width}/{heads}")
        return config, canonical(fields)


GPT2 = LanguageModels(
    marks=["h.0.attn.c_attn.weight"],
    prefixes=("transformer.", ""),  # the first releases are files of the model without its head
    ends=("wte", "lm_head"),
    in_out=True,
    table={
        "wpe.weight": "pos_embedding",
        "h.{}.ln_1": f"{BLOCK}/attention_norm",
        "h.{}.attn.c_attn": QKV,
        "h.{}.attn.c_proj": f"{ATTENTION}/out",
        "h.{}.ln_2": f"{BLOCK}/mlp_norm",
        "h.{}.mlp.c_fc": f"{MLP}/in",
        "h.{}.mlp.c_proj": f"{MLP}/out",
        "ln_f": LAST_NORM,
    },
    unused=re.compile(r"(.*\.)?attn\.(masked_)?bias"),
    classes={"gpt2": "GPT2LMHeadModel"},
    defaults={
        "gpt2": {
            "vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "n_positions": 1024,
            "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True,
        }
    },
    keys={
        "n_embd": "width", "n_layer": "depth", "n_head": "num_heads", "n_inner": "mlp_dim", "n_positions": "context",
        "layer_norm_epsilon": "norm_epsilon", "activation_function": "mlp", "tie_word_embeddings": "tied",
    },
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    constants={"position": "learned", "norm": "layernorm", "use_bias": True},
    write=lambda *_: dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
)  # fmt: skip

ORIGINAL = "original_max_position_embeddings"
SCALING = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)


def _rope(config: Json, context: int, base: str = "rope_theta") -> tuple[Json, Json]:
    """Return the object of config.json about rotary embeddings, and `rotary_base` and `rotary_scaling` of a model.

    Args:
      config: the content of config.json, in the form of transformers 5 or of earlier releases.
      context: the context before scaling (of pretraining), unless the file says it.
      base: the key of the base in earlier releases.

    Raises:
      CheckpointError: the scaling is neither by a factor ("linear") nor that of LLaMA 3.
    """
    rope: Json = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if layers := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise CheckpointError(f"config.json: rotary embeddings for each kind of layer ({layers[0]}) are not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"config.json: rope_type={kind!r} is not supported, only default, linear and llama3")
    found: Json = {"rotary_base": float(rope.get("rope_theta") or config.get(base) or 10_000.0)}
    if kind == "linear":
        found["rotary_scaling"] = [float(rope["factor"])]
    elif kind == "llama3":
        original = config.get(ORIGINAL) or rope.get(ORIGINAL) or context
        found["rotary_scaling"] = [*(float(rope[name]) for name in SCALING[:3]), original]
    return rope, found


def _rope_parameters(fields: Json, **others: float) -> Json:
    """Return the entry `rope_parameters` of transformers 5 for the fields of a model."""
    numbers = fields["rotary_scaling"] or []
    kind = {0: "default", 1: "linear"}.get(len(numbers), "llama3")
    scaling = zip(SCALING, [*numbers[:3], *map(int, numbers[3:])], strict=False)
    found = {"rope_type": kind, "rope_theta": fields["rotary_base"], **dict(scaling), **others}
    return {"rope_parameters": found}


def _read_neox(config: Json, found: Json) -> Json:
    """Return the fields of GPT-NeoX's rotary embedding; its width, a fraction of D, is rounded down to an integer."""
    rope, fields = _rope(config, found["context"], "rotary_emb_base")
    head_dim = found["width"] // found["num_heads"]
    rotary = int(head_dim * rope.get("partial_rotary_factor", config["rotary_pct"]))
    if rotary < 2 or rotary % 2:
        raise CheckpointError(f"config.json: rotary_pct rotates {rotary} of a head's {head_dim} numbers, not pairs")
    return {**fields, "rotary_fraction": rotary / head_dim}


SIZES = {
    "hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim", "max_position_embeddings": "context", "tie_word_embeddings": "tied",
}  # fmt: skip
GPT_NEOX = LanguageModels(  # and Pythia
    marks=["layers.0.attention.query_key_value.weight"],
    prefixes=("gpt_neox.",),
    ends=("embed_in", "embed_out"),
    by_head=True,
    table={
        "layers.{}.input_layernorm": f"{BLOCK}/attention_norm",
        "layers.{}.attention.query_key_value": QKV,
        "layers.{}.attention.dense": f"{ATTENTION}/out",
        "layers.{}.post_attention_layernorm": f"{BLOCK}/mlp_norm",
        "layers.{}.mlp.dense_h_to_4h": f"{MLP}/in",
        "layers.{}.mlp.dense_4h_to_h": f"{MLP}/out",
        "final_layer_norm": LAST_NORM,
    },
    unused=re.compile(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
    classes={"gpt_neox": "GPTNeoXForCausalLM"},
    defaults={
        "gpt_neox": {
            "vocab_size": 50_432, "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
            "use_parallel_residual": True, "tie_word_embeddings": False, "rotary_pct": 0.25,
        }
    },
    keys={**SIZES, "layer_norm_eps": "norm_epsilon", "hidden_act": "mlp", "use_parallel_residual": "parallel"},
    fixed={"attention_bias": True},
    constants={"norm": "layernorm", "use_bias": True},
    read=_read_neox,
    write=lambda fields, _: _rope_parameters(fields, partial_rotary_factor=fields["rotary_fraction"]),
)  # fmt: skip

TYPES = {"G": "full_attention", "L": "sliding_attention"}  # by the letters of `WINDOW_PATTERNS`


def _read_llama(config: Json, found: Json) -> Json:
    """Return biases, windows and rotary embedding. Only llama may have all biases; qwen2 those of q, k, v."""
    kind = config["model_type"]
    use_bias = kind == "llama" and config.get("attention_bias", False)
    check_only(config, attention_bias=use_bias, mlp_bias=use_bias)
    rope, rotary = _rope(config, found["context"])
    check_only({**config, **rope}, partial_rotary_factor=1)
    return {
        "use_bias": use_bias, "qkv_bias": "qkv" if kind == "qwen2" else None, "qk_norm_epsilon": found["norm_epsilon"],
        "qk_norm": "rmsnorm" if kind == "qwen3" else None, **rotary, **_read_windows(config, found["depth"]),
    }  # fmt: skip


def _read_windows(config: Json, depth: int) -> Json:
    """Return the fields of the windows: mistral's window is in all layers, Qwen's in the layers that the file lists."""
    kind, window, first = config["model_type"], config["sliding_window"], 0
    if kind.startswith("qwen"):
        window, first = window if config["use_sliding_window"] else None, config["max_window_layers"]
    found = [TYPES["G" if window is None or layer < first else "L"] for layer in range(depth)]
    if kind.startswith("qwen"):
        found = config.get("layer_types") or found
    else:
        check_only(config, layer_types=found, **({"sliding_window": None} if kind == "llama" else {}))
    pattern = next((name for name in WINDOW_PATTERNS if found == _layer_types(name, depth)), None)
    if pattern is None:
        shown = f"layer_types={found!r:.200}, of sliding_window={window!r} and max_window_layers={first}"
        raise CheckpointError(f"config.json: {shown} is not supported; supported: {', '.join(WINDOW_PATTERNS)}")
    if pattern == "none":
        return {"window_pattern": pattern}
    if window is None:
        raise CheckpointError("config.json: layer_types has windows, but use_sliding_window is false")
    return {"window_pattern": pattern, "window": window}


def _layer_types(pattern: str, depth: int) -> list[str]:
    letters = WINDOW_PATTERNS[pattern]
    return [TYPES[letters[layer % len(letters)]] for layer in range(depth)]


def _write_llama(fields: Json, kind: str) -> Json:
    is_local, bias = fields["window_pattern"] != "none", fields["use_bias"] and kind == "llama"
    found = {
        "head_dim": fields["width"] // fields["num_heads"], "attention_bias": bias, "mlp_bias": bias,
        "sliding_window": fields["window"] if is_local and kind != "llama" else None, **_rope_parameters(fields),
    }  # fmt: skip
    if kind.startswith("qwen"):
        found["use_sliding_window"] = is_local
        found["layer_types"] = _layer_types(fields["window_pattern"], fields["depth"])
    return found


BASE: Json = {
    "vocab_size": 32_000, "max_position_embeddings": 2048, "num_key_value_heads": None, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip
MISTRAL = {**BASE, "max_position_embeddings": 131_072, "sliding_window": 4096}
QWEN = {
    **MISTRAL, "vocab_size": 151_936, "max_position_embeddings": 32_768, "use_sliding_window": False,
    "max_window_layers": 28,
}  # fmt: skip
LLAMA = LanguageModels(  # and Mistral, Qwen2 and Qwen3, of the same layout
    marks=["layers.0.mlp.gate_proj.weight"],
    prefixes=("model.",),
    ends=("embed_tokens", "lm_head"),
    table={
        "layers.{}.input_layernorm": f"{BLOCK}/attention_norm",
        **{f"layers.{{}}.self_attn.{x[0]}_proj": f"{ATTENTION}/{x}" for x in ("query", "key", "value", "out")},
        **{f"layers.{{}}.self_attn.{x[0]}_norm": f"{ATTENTION}/{x}_norm" for x in ("query", "key")},
        "layers.{}.post_attention_layernorm": f"{BLOCK}/mlp_norm",
        "layers.{}.mlp.gate_proj": f"{MLP}/in",
        "layers.{}.mlp.up_proj": f"{MLP}/gate",
        "layers.{}.mlp.down_proj": f"{MLP}/out",
        "norm": LAST_NORM,
    },
    unused=re.compile(r".*\.rotary_emb\.inv_freq"),
    classes={
        "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    },
    defaults={"llama": BASE, "mistral": MISTRAL, "qwen2": QWEN, "qwen3": QWEN},
    keys={**SIZES, "num_key_value_heads": "num_key_heads", "rms_norm_eps": "norm_epsilon"},
    fixed={"hidden_act": "silu"},
    constants={"norm": "rmsnorm", "mlp": "swiglu"},
    read=_read_llama,
    write=_write_llama,
)  # fmt: skip

# Window patterns of DCFormer by its `window_type`. A pattern of local and global layers in turn needs no name, and may
# then have any window.
PATTERNS = {None: "1:1", "LG": "1:1", "LGLL": "3:1", "LGL6": "7:1"}
NAMED = {ours: theirs for theirs, ours in PATTERNS.items() if theirs != "LG"}
WINDOW = 256  # of every named pattern


def _read_dcformer(config: Json, found: Json) -> Json:
    """Return the fields of DCFormer or DCPythia. A prompt's tokens see one token more than generated tokens do."""
    heads, name, window = found["num_heads"], config["window_type"], config["window_size"]
    if name not in PATTERNS or (name and window != WINDOW):
        raise CheckpointError(
            f"config.json: window_type={name!r} with window_size={window!r} is not supported; supported: null with any "
            f"size, and LG, LGLL and LGL6 with {WINDOW}"
        )
    size = window or WINDOW
    fields = {
        "window_pattern": PATTERNS[name] if window else "none", "window": size, "prefill_window": size + 1,
        "qk_norm": "rmsnorm" if config["use_qk_norm"] else None, "rotary_base": float(config["rope_base"]),
    }  # fmt: skip
    if config["model_type"] == "dcformer":
        groups = config["mgate_dim"] if config["mgate"] else None
        return {**fields, "norm": "rmsnorm", "mlp": "swiglu", "mlp_groups": groups}
    head_dim = found["width"] // heads
    return {
        **fields, "norm": "layernorm", "mlp": "gelu", "use_bias": config["use_linear_bias"],
        "parallel": config["use_parallel_residual"], "rotary_fraction": int(head_dim * config["rotary_pct"]) / head_dim,
    }  # fmt: skip


def _write_dcformer(fields: Json, kind: str) -> Json:
    heads, pattern, groups = fields["num_heads"], fields["window_pattern"], fields["mlp_groups"]
    found: Json = {
        "n_local_heads": heads, "head_dim": fields["width"] // heads, "use_qk_norm": fields["qk_norm"] is not None,
        "window_type": NAMED.get(pattern), "window_size": fields["window"] if pattern != "none" else None,
        "is_training": False,
    }  # fmt: skip
    if kind == "dcformer":
        return found | ({"mgate": True, "mgate_dim": groups} if groups else {})
    return found | {
        "rotary_pct": fields["rotary_fraction"], "use_linear_bias": fields["use_bias"],
        "use_parallel_residual": fields["parallel"],
    }  # fmt: skip


WINDOWED = {"block_size": 2048, "norm_eps": 1e-5, "use_qk_norm": False, "window_type": None, "window_size": WINDOW}
# DCFormer and DCPythia, in PyTorch (github.com/Caiyun-AI/DCFormer). Their rotary embedding has float16 tables, that of
# this project float32.
DCFORMER = LanguageModels(
    marks=["layers.0.attention.dyn_w_proj.qkw"],
    ends=("tok_embeddings", "output"),
    table={
        "layers.{}.attention_norm": f"{BLOCK}/attention_norm",
        "layers.{}.attention.wqkv": QKV,
        "layers.{}.attention.wo": f"{ATTENTION}/out",
        "layers.{}.attention.q_norm.scale": f"{ATTENTION}/query_norm/scale",
        "layers.{}.attention.k_norm.scale": f"{ATTENTION}/key_norm/scale",
        "layers.{}.ffn_norm": f"{BLOCK}/mlp_norm",
        "layers.{}.feed_forward.w1": f"{MLP}/in",
        "layers.{}.feed_forward.w2": f"{MLP}/out",
        "layers.{}.feed_forward.w3": f"{MLP}/gate",
        "layers.{}.feed_forward.mg": f"{MLP}/group_gate",
        "norm": LAST_NORM,
    },
    dynamic=[f"layers.{{}}.attention.dyn_w_proj.{name}" for name in ("dw1", "qkw", "dd")],
    shown={"use_qk_norm": "layers.0.attention.q_norm.scale"},
    # Copies of other weights for decoding, the identity in place of a static projection, and caches.
    unused=re.compile(r".*\.attention\.((dyn_w_proj\.)?((pre|post)_proj\.w|dw_m|qkw_m|sw)|kv_cache\.\w+)"),
    classes={"dcformer": "DCFormer", "dcpythia": "DCPythia"},
    defaults={
        "dcformer": {**WINDOWED, "mgate": False, "mgate_dim": 44},
        "dcpythia": {
            **WINDOWED, "intermediate_size": None, "rotary_pct": 0.25, "use_linear_bias": True,
            "use_parallel_residual": True,
        },
    },
    keys={
        "dim": "width", "n_layer": "depth", "n_head": "num_heads", "intermediate_size": "mlp_dim",
        "block_size": "context", "norm_eps": "norm_epsilon", "rope_base": "rotary_base",
    },
    fixed={"tie_word_embeddings": False, "use_dcmha": True, "query_wise": False},
    constants={"compose": "both", "compose_gelu": "exact"},
    read=_read_dcformer,
    write=_write_dcformer,
)  # fmt: skip

# In the order in which exports try them; DCFormer's is the authors' own code, which transformers does not have.
ROWS = {"gpt2": GPT2, "llama": LLAMA, "gpt_neox": GPT_NEOX, "dcformer": DCFORMER}
