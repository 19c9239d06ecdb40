"""The LLaMA family of Hugging Face transformers: LlamaForCausalLM, and Mistral, Qwen2 and Qwen3 of the same layout."""

from __future__ import annotations

import functools
import re

from dcvit.errors import CheckpointError
from dcvit.models.fields import WINDOW_PATTERNS
from dcvit.weights import hf_config as hf
from dcvit.weights import torch_layers
from dcvit.weights.config_table import Key, field, only, written
from dcvit.weights.family import Description
from dcvit.weights.links import Link
from dcvit.weights.lm_fields import ConfigTable
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import ATTENTION, BLOCK, embedding_and_head

TABLE: torch_layers.Table = {
    "model.layers.{}.input_layernorm": f"{BLOCK}/attention_norm",
    **{
        f"model.layers.{{}}.self_attn.{name[0]}_proj": f"{ATTENTION}/{name}"
        for name in ("query", "key", "value", "out")
    },
    **{f"model.layers.{{}}.self_attn.{name[0]}_norm": f"{ATTENTION}/{name}_norm" for name in ("query", "key")},
    "model.layers.{}.post_attention_layernorm": f"{BLOCK}/mlp_norm",
    "model.layers.{}.mlp.gate_proj": f"{BLOCK}/MlpBlock_0/in",
    "model.layers.{}.mlp.up_proj": f"{BLOCK}/MlpBlock_0/gate",
    "model.layers.{}.mlp.down_proj": f"{BLOCK}/MlpBlock_0/out",
    "model.norm": "Transformer/decoder_norm",
}
UNUSED = re.compile(r".*\.rotary_emb\.inv_freq")
CONTEXTS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}  # defaults of transformers
QWEN = ("qwen2", "qwen3")
TYPES = {"G": "full_attention", "L": "sliding_attention"}  # by the letters of `WINDOW_PATTERNS`


def _keys(kind: str) -> list[Key]:
    """Return the table of config.json for a `model_type`. Only llama may have all biases; qwen2 those of q, k, v."""

    def bias(config: Json, _: Json) -> Json:
        use_bias = kind == "llama" and hf.flag(config, "attention_bias", False)
        hf.check_only(config, attention_bias=use_bias, mlp_bias=use_bias)
        return {"use_bias": use_bias, "qkv_bias": "qkv" if kind == "qwen2" else None}

    def epsilon(config: Json, _: Json) -> Json:
        return dict.fromkeys(("norm_epsilon", "qk_norm_epsilon"), hf.number(config, "rms_norm_eps", 1e-6))

    return [
        field("hidden_size", "width"),
        field("num_hidden_layers", "depth"),
        field("num_attention_heads", "num_heads"),
        field("num_key_value_heads", "num_key_heads", default=lambda found: found["num_heads"]),
        Key("head_dim", hf.check_head_dim, lambda fields: fields["width"] // fields["num_heads"]),
        field("intermediate_size", "mlp_dim"),
        field("max_position_embeddings", "context", default=CONTEXTS[kind]),
        Key("rms_norm_eps", epsilon, lambda fields: fields["norm_epsilon"]),
        only("hidden_act", "silu"),
        Key("attention_bias", bias, lambda fields: fields["use_bias"] and kind == "llama"),
        written("mlp_bias", lambda fields: fields["use_bias"] and kind == "llama"),
        field("tie_word_embeddings", "tied", hf.flag, False),
        Key("rope_parameters", _rope, hf.rope_parameters),
        Key(
            "sliding_window",
            functools.partial(_windows, kind),
            lambda fields: fields["window"] if _local(fields) and kind != "llama" else None,
        ),
        *([written("use_sliding_window", _local), written("layer_types", _layer_types)] if kind in QWEN else []),
    ]


def _windows(kind: str, config: Json, found: Json) -> Json:
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


def _local(fields: Json) -> bool:
    return bool(fields["window_pattern"] != "none")


def _layer_types(fields: Json) -> list[str]:
    pattern = WINDOW_PATTERNS[fields["window_pattern"]]
    return [TYPES[pattern[layer % len(pattern)]] for layer in range(fields["depth"])]


def _rope(config: Json, found: Json) -> Json:
    if hf.rotary_fraction(config, "partial_rotary_factor", 1.0) != 1:
        raise CheckpointError("config.json: partial_rotary_factor is not supported, only 1")
    return hf.rotary(config, found["context"])


def _kind(fields: Json) -> str:
    """Return the `model_type` to write for the fields; `ConfigTable.config` raises if it cannot express them."""
    if fields["qk_norm"] or fields["qkv_bias"]:
        return "qwen3" if fields["qk_norm"] else "qwen2"
    return "mistral" if fields["window_pattern"] == "1:0" else "llama"


CONFIG = ConfigTable(
    "LLaMA",
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    },
    _keys,
    constants=lambda kind: {"norm": "rmsnorm", "mlp": "swiglu", "qk_norm": "rmsnorm" if kind == "qwen3" else None},
    vocab_sizes={"llama": 32_000, "mistral": 32_000, "qwen2": 151_936, "qwen3": 151_936},
    type_of=_kind,
)


def matches(tensors: Tensors, config: Json) -> bool:
    return {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"} <= set(tensors)


describe, config = CONFIG.describe, CONFIG.config


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    found = embedding_and_head("model.embed_tokens", "lm_head", description, tensors)
    return found + torch_layers.links(TABLE, description)
