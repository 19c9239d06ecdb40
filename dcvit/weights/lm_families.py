"""Families of language models: GPT-2, GPT-NeoX and LLaMA of Hugging Face transformers, and DCFormer of the authors.

Each is a row: the names of tensors and the keys of config.json in the other library. `LanguageModels` recognizes,
describes, reads and writes all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcvit.errors import CheckpointError
from dcvit.models.fields import TRAINING_ONLY_FIELDS, WINDOW_PATTERNS
from dcvit.weights import hf_config as hf
from dcvit.weights.family import Description, defaults, shapes_of
from dcvit.weights.hf_config import ABSENT, Key, field, only, written
from dcvit.weights.links import Link, Table, compositions, embedding_and_head, from_table, in_all_layers
from dcvit.weights.tensors import Json, Tensors

BLOCK = "Transformer/decoderblock_{}"
ATTENTION, MLP = f"{BLOCK}/MultiHeadDotProductAttention_0", f"{BLOCK}/MlpBlock_0"
QKV = [f"{ATTENTION}/{name}" for name in ("query", "key", "value")]
LAST_NORM = "Transformer/decoder_norm"
# Fields of `dcvit.models.lm.LM` that files do not hold: they do not change the function of a document, or only where it
# begins.
NOT_IN_FILES = (*TRAINING_ONLY_FIELDS, "end_of_text")
DEFAULTS = defaults("lm", "end_of_text")  # of the others, which determine the parameters and the function


def canonical(fields: Mapping[str, Any]) -> Json:
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
    without_effect: list[str] = []
    if found["position"] == "learned":
        without_effect += ["rotary_fraction", "rotary_base", "rotary_scaling"]
    if found["window_pattern"] == "none":
        without_effect += ["window", "prefill_window"]
    if found["qk_norm"] is None:
        without_effect += ["qk_norm_epsilon"]
    if found["compose"] is None:
        without_effect += ["branches", "projection", "gate", "static", "rank", "groups", "compose_gelu"]
    elif not found["projection"]:
        without_effect += ["rank", "compose_gelu"]
    return found | {name: DEFAULTS[name] for name in without_effect}


@dataclasses.dataclass(frozen=True)
class LanguageModels:
    """A family of language models.

    Fields:
      marks: tensors that all files of the family have, and those of other families do not.
      ends: names of the embedding and of the head. The head is named without prefix.
      table: names of the other modules; see `dcvit.weights.links.from_table`.
      classes: the class of the other library by `model_type`.
      keys: function from the `model_type` to its keys, without `vocab_size`, in the order in which they are written.
      constants: function from the `model_type` to the fields that are the same for all its models.
      vocab_sizes: the default of `vocab_size` by `model_type`; without one, the key is required.
      type_of: function from the fields of a model to the `model_type` that is written; by default the first.
      prefixes: beginnings of the names, by release; the first is written.
      in_out, by_head: how linear layers are stored; see `dcvit.weights.links.from_table`.
      dynamic: names of the weights of compositions; see `dcvit.weights.links.compositions`.
      shown: tensors by keys of config.json; without the key, the tensor shows if its value is true.
      unused: matches the names of tensors that are not parameters, such as buffers.
    """

    marks: Sequence[str]
    ends: tuple[str, str]
    table: Table
    classes: Mapping[str, str]
    keys: Callable[[str], Sequence[Key]]
    constants: Callable[[str], Json]
    vocab_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    type_of: Callable[[Json], str] | None = None
    prefixes: Sequence[str] = ("",)
    in_out: bool = False
    by_head: bool = False
    dynamic: Sequence[str] = ()
    shown: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: re.Pattern[str] | None = None

    def _prefix(self, tensors: Tensors) -> str | None:
        return next((x for x in self.prefixes if all(f"{x}{mark}" in tensors for mark in self.marks)), None)

    def matches(self, tensors: Tensors, config: Json) -> bool:
        """Return True if the tensors have the family's names."""
        return self._prefix(tensors) is not None

    def describe(self, tensors: Tensors, config: Json) -> Description:
        """Return the description of the model of a config.json."""
        known = {key: name in tensors for key, name in self.shown.items()} if config else {}
        fields = self._read({**known, **config})
        vocab_size = hf.size(config, "vocab_size", self.vocab_sizes.get(config["model_type"]))
        return Description("lm", vocab_size, {name: x for name, x in fields.items() if x != DEFAULTS[name]})

    def links(self, description: Description, tensors: Tensors | None = None) -> list[Link]:
        """Return the links of a model; `tensors` are those of a file, or None for writing."""
        prefix = self._prefix(tensors or {})
        prefix = self.prefixes[0] if prefix is None else prefix
        embedding, head = self.ends
        table = {f"{prefix}{theirs}": ours for theirs, ours in self.table.items()}
        found = embedding_and_head(f"{prefix}{embedding}", head, description, tensors)
        found += from_table(table, description, in_out=self.in_out, by_head=self.by_head)
        if self.dynamic:
            found += in_all_layers(compositions(self.dynamic, ATTENTION, shapes_of(description)), description)
        return found

    def config(self, description: Description) -> Json:
        """Return the content of config.json. Raises CheckpointError if no key can express a field's value."""
        if description.model_name != "lm":
            raise CheckpointError(f"a model {description.model_name!r} is not a language model")
        fields = canonical({name: x for name, x in description.fields.items() if name not in NOT_IN_FILES})
        kind = self.type_of(fields) if self.type_of else next(iter(self.classes))
        if description.num_outputs is None:
            raise CheckpointError("a language model needs a vocabulary, found num_outputs=None")
        values = {
            "architectures": [self.classes[kind]], "model_type": kind, "vocab_size": description.num_outputs,
            **hf.write(self.keys(kind), fields),
        }  # fmt: skip
        theirs = self._read(values)
        lacking = [f"{name}={x!r} (only {theirs[name]!r})" for name, x in fields.items() if x != theirs[name]]
        if lacking:
            raise CheckpointError(f"{self.classes[kind]} cannot express {', '.join(lacking)}")
        return values

    def _read(self, config: Json) -> Json:
        kind = hf.check_type(config, *self.classes)
        hf.check_only(config, is_causal=True)
        return canonical({**self.constants(kind), **hf.read(self.keys(kind), config)})


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
    vocab_sizes={"gpt2": 50_257},
    constants=lambda _: {"position": "learned", "norm": "layernorm", "use_bias": True},
    keys=lambda _: [
        field("n_embd", "width", default=768),
        field("n_layer", "depth", default=12),
        field("n_head", "num_heads", default=12),
        field("n_inner", "mlp_dim", default=lambda found: 4 * found["width"]),
        field("n_positions", "context", default=1024),
        field("layer_norm_epsilon", "norm_epsilon", hf.number, 1e-5),
        field("activation_function", "mlp", hf.activation, "gelu_new", hf.activation_name),
        field("tie_word_embeddings", "tied", hf.flag, True),
        *(written(name, 0.0) for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")),
        only("scale_attn_weights", True, written=False),
        only("scale_attn_by_inverse_layer_idx", False, written=False),
        only("add_cross_attention", False, written=False),
    ],
)


def _rotary_pct(config: Json, found: Json) -> Json:
    """Return the fields of GPT-NeoX's rotary embedding; its width, a fraction of D, is rounded down to an integer."""
    head_dim = found["width"] // found["num_heads"]
    rotary = int(head_dim * hf.rotary_fraction(config, "rotary_pct", 0.25))
    if rotary < 2 or rotary % 2:
        raise CheckpointError(
            f"config.json: rotary_pct rotates {rotary} of a head's {head_dim} numbers; expected pairs"
        )
    return {"rotary_fraction": rotary / head_dim, **hf.rotary(config, found["context"], "rotary_emb_base")}


SIZES = [
    field("hidden_size", "width"),
    field("num_hidden_layers", "depth"),
    field("num_attention_heads", "num_heads"),
]
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
    vocab_sizes={"gpt_neox": 50_432},
    constants=lambda _: {"norm": "layernorm", "use_bias": True},
    keys=lambda _: [
        *SIZES,
        Key("head_dim", hf.check_head_dim),
        field("intermediate_size", "mlp_dim"),
        field("max_position_embeddings", "context", default=2048),
        field("layer_norm_eps", "norm_epsilon", hf.number, 1e-5),
        field("hidden_act", "mlp", hf.activation, "gelu", hf.activation_name),
        only("attention_bias", True),
        field("use_parallel_residual", "parallel", hf.flag, True),
        field("tie_word_embeddings", "tied", hf.flag, False),
        Key(
            "rope_parameters",
            _rotary_pct,
            lambda fields: hf.rope_parameters(fields, partial_rotary_factor=fields["rotary_fraction"]),
        ),
    ],
)

CONTEXTS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}  # defaults of transformers
QWEN = ("qwen2", "qwen3")
TYPES = {"G": "full_attention", "L": "sliding_attention"}  # by the letters of `WINDOW_PATTERNS`


def _llama_keys(kind: str) -> list[Key]:
    """Return the table of config.json for a `model_type`. Only llama may have all biases; qwen2 those of q, k, v."""

    def bias(config: Json, _: Json) -> Json:
        use_bias = kind == "llama" and hf.flag(config, "attention_bias", False)
        hf.check_only(config, attention_bias=use_bias, mlp_bias=use_bias)
        return {"use_bias": use_bias, "qkv_bias": "qkv" if kind == "qwen2" else None}

    def epsilon(config: Json, _: Json) -> Json:
        return dict.fromkeys(("norm_epsilon", "qk_norm_epsilon"), hf.number(config, "rms_norm_eps", 1e-6))

    def rope(config: Json, found: Json) -> Json:
        if hf.rotary_fraction(config, "partial_rotary_factor", 1.0) != 1:
            raise CheckpointError("config.json: partial_rotary_factor is not supported, only 1")
        return hf.rotary(config, found["context"])

    return [
        *SIZES,
        field("num_key_value_heads", "num_key_heads", default=lambda found: found["num_heads"]),
        Key("head_dim", hf.check_head_dim, lambda fields: fields["width"] // fields["num_heads"]),
        field("intermediate_size", "mlp_dim"),
        field("max_position_embeddings", "context", default=CONTEXTS[kind]),
        Key("rms_norm_eps", epsilon, lambda fields: fields["norm_epsilon"]),
        only("hidden_act", "silu"),
        Key("attention_bias", bias, lambda fields: fields["use_bias"] and kind == "llama"),
        written("mlp_bias", lambda fields: fields["use_bias"] and kind == "llama"),
        field("tie_word_embeddings", "tied", hf.flag, False),
        Key("rope_parameters", rope, hf.rope_parameters),
        Key(
            "sliding_window",
            functools.partial(_llama_windows, kind),
            lambda fields: fields["window"] if _is_local(fields) and kind != "llama" else None,
        ),
        *([written("use_sliding_window", _is_local), written("layer_types", _layer_types)] if kind in QWEN else []),
    ]


def _llama_windows(kind: str, config: Json, found: Json) -> Json:
    """Return the fields of the windows: mistral's window is in all layers, Qwen's in the layers that the file lists."""
    window = config.get("sliding_window", None if kind == "llama" else 4096)
    if kind == "llama":
        hf.check_only(config, sliding_window=None)
    elif kind in QWEN and not hf.flag(config, "use_sliding_window", False):
        window = None
    first = hf.size(config, "max_window_layers", 28) if kind in QWEN and config.get("max_window_layers") != 0 else 0
    types = [TYPES["G" if window is None or layer < first else "L"] for layer in range(found["depth"])]
    if kind in QWEN:
        types = config.get("layer_types") or types
    else:
        hf.check_only(config, layer_types=types)
    pattern = next((x for x in WINDOW_PATTERNS if types == _layer_types({**found, "window_pattern": x})), None)
    if pattern is None:
        shown = f"layer_types={types!r:.200}, of sliding_window={window!r} and max_window_layers={first}"
        raise CheckpointError(f"config.json: {shown} is not supported; supported: {', '.join(WINDOW_PATTERNS)}")
    size = {} if pattern == "none" else {"window": hf.size({"sliding_window": window}, "sliding_window")}
    return {"window_pattern": pattern, **size}


def _is_local(fields: Json) -> bool:
    return bool(fields["window_pattern"] != "none")


def _layer_types(fields: Json) -> list[str]:
    pattern = WINDOW_PATTERNS[fields["window_pattern"]]
    return [TYPES[pattern[layer % len(pattern)]] for layer in range(fields["depth"])]


def _llama_type(fields: Json) -> str:
    if fields["qk_norm"] or fields["qkv_bias"]:
        return "qwen3" if fields["qk_norm"] else "qwen2"
    return "mistral" if fields["window_pattern"] == "1:0" else "llama"


LLAMA = LanguageModels(  # and Mistral, Qwen2 and Qwen3, of the same layout
    marks=["layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight"],
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
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    },
    vocab_sizes={"llama": 32_000, "mistral": 32_000, "qwen2": 151_936, "qwen3": 151_936},
    constants=lambda kind: {"norm": "rmsnorm", "mlp": "swiglu", "qk_norm": "rmsnorm" if kind == "qwen3" else None},
    keys=_llama_keys,
    type_of=_llama_type,
)


# Window patterns of DCFormer by its `window_type`. A pattern of local and global layers in turn needs no name, and may
# then have any window.
PATTERNS = {None: "1:1", "LG": "1:1", "LGLL": "3:1", "LGL6": "7:1"}
NAMED = {ours: theirs for theirs, ours in PATTERNS.items() if theirs != "LG"}
WINDOW = 256  # of every named pattern


def _dcformer_keys(kind: str) -> list[Key]:
    """Return the table of config.json for a `model_type`, "dcformer" or "dcpythia"."""
    pythia = kind == "dcpythia"

    def qk_norm(config: Json, _: Json) -> Json:
        return {"qk_norm": "rmsnorm" if hf.flag(config, "use_qk_norm", False) else None}

    def rotary_fraction(config: Json, found: Json) -> Json:
        head_dim = found["width"] // found["num_heads"]
        return {"rotary_fraction": int(head_dim * hf.number(config, "rotary_pct", 0.25)) / max(head_dim, 1)}

    def mlp_groups(config: Json, _: Json) -> Json:
        return {"mlp_groups": hf.size(config, "mgate_dim", 44) if hf.flag(config, "mgate", False) else None}

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
        Key("use_qk_norm", qk_norm, lambda fields: fields["qk_norm"] is not None),
        Key("window_type", _dcformer_windows, lambda fields: NAMED.get(fields["window_pattern"])),
        written("window_size", lambda fields: fields["window"] if _is_local(fields) else None),
    ]
    if pythia:
        return [
            *keys,
            Key("rotary_pct", rotary_fraction, lambda fields: fields["rotary_fraction"]),
            field("use_linear_bias", "use_bias", hf.flag, True),
            field("use_parallel_residual", "parallel", hf.flag, True),
        ]
    return [
        *keys,
        Key("mgate", mlp_groups, lambda fields: True if fields["mlp_groups"] else ABSENT),
        written("mgate_dim", lambda fields: fields["mlp_groups"] or ABSENT),
    ]


def _check_key_heads(config: Json, found: Json) -> Json:
    if config.get("n_local_heads") not in (None, -1, found["num_heads"]):
        raise CheckpointError(f"config.json: n_local_heads={config['n_local_heads']!r} is not supported, only n_head")
    return {}


def _dcformer_windows(config: Json, _: Json) -> Json:
    """Return the fields of the windows. A prompt's tokens see one token more than generated tokens do."""
    kind, size = config.get("window_type"), config.get("window_size", WINDOW)
    if kind not in (*PATTERNS,):
        raise CheckpointError(f"config.json: window_type={kind!r} is not supported; supported: LG, LGLL, LGL6, null")
    if kind is not None and size != WINDOW:
        raise CheckpointError(f"config.json: window_size={size!r} with window_type={kind!r} is not supported")
    window = WINDOW if size is None else hf.size(config, "window_size", WINDOW)
    pattern = "none" if size is None else PATTERNS[kind]
    return {"window_pattern": pattern, "window": window, "prefill_window": window + 1}


# DCFormer and DCPythia, in PyTorch (github.com/Caiyun-AI/DCFormer). Their rotary embedding has float16 tables, that of
# this project float32.
DCFORMER = LanguageModels(
    marks=["tok_embeddings.weight", "layers.0.attention.dyn_w_proj.qkw"],
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
    constants=lambda kind: {
        "compose": "both", "compose_gelu": "exact",
        **({"norm": "rmsnorm", "mlp": "swiglu"} if kind == "dcformer" else {"norm": "layernorm", "mlp": "gelu"}),
    },
    keys=_dcformer_keys,
    type_of=lambda fields: "dcpythia" if fields["norm"] == "layernorm" else "dcformer",
)  # fmt: skip

# In the order in which exports try them; DCFormer's is the authors' own code, which transformers does not have.
ROWS = {"gpt2": GPT2, "llama": LLAMA, "gpt_neox": GPT_NEOX, "dcformer": DCFORMER}
