"""The LLaMA family of Hugging Face transformers: LlamaForCausalLM, and Mistral and Qwen3, which share its layout."""

from __future__ import annotations

from dcvit.errors import CheckpointError
from dcvit.weights import hf_config as hf
from dcvit.weights.config_table import Key, field, only, written
from dcvit.weights.family import Description
from dcvit.weights.links import Link, same
from dcvit.weights.lm_fields import ConfigTable, LMFields
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import attention, block, checked, embedding_and_head, linear_layer, norm_layer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Defaults of transformers that differ between the types: context, and the sliding window of all layers.
CONTEXTS = {"llama": 2048, "mistral": 131_072, "qwen3": 32_768}
SLIDING_WINDOWS = {"llama": None, "mistral": 4096, "qwen3": None}


def _keys(kind: str) -> list[Key]:
    """Return the keys of a type. Only llama may have biases, and only qwen3 may name a window that it does not use."""

    def check_window(config: Json, found: Json) -> Json:
        hf.check_only(config, layer_types=["full_attention"] * found["depth"])
        window = config.get("sliding_window", SLIDING_WINDOWS[kind])
        if window is not None and (kind != "qwen3" or hf.flag(config, "use_sliding_window", False)):
            raise CheckpointError(f"config.json: sliding_window={window!r} is not supported, only null")
        return {}

    def bias(config: Json, _: Json) -> Json:
        use_bias = kind == "llama" and hf.flag(config, "attention_bias", False)
        hf.check_only(config, attention_bias=use_bias, mlp_bias=use_bias)
        return {"use_bias": use_bias}

    def epsilon(config: Json, _: Json) -> Json:
        return dict.fromkeys(("norm_epsilon", "qk_norm_epsilon"), hf.number(config, "rms_norm_eps", 1e-6))

    return [
        field("hidden_size", "width"),
        field("num_hidden_layers", "depth", hf.depth),
        field("num_attention_heads", "num_heads"),
        field("num_key_value_heads", "num_key_heads", default=lambda found: found["num_heads"]),
        Key("head_dim", _check_head_dim, lambda fields: fields["width"] // fields["num_heads"]),
        field("intermediate_size", "mlp_dim"),
        field("max_position_embeddings", "context", default=CONTEXTS[kind]),
        Key("rms_norm_eps", epsilon, lambda fields: fields["norm_epsilon"]),
        only("hidden_act", "silu"),
        Key("attention_bias", bias, lambda fields: fields["use_bias"] and kind == "llama"),
        written("mlp_bias", lambda fields: fields["use_bias"] and kind == "llama"),
        field("tie_word_embeddings", "tied", hf.flag, False),
        Key("rope_parameters", _rope, lambda fields: hf.rope_parameters(fields["rotary_base"])),
        Key("sliding_window", check_window, lambda _: None),
    ]


def _check_head_dim(config: Json, found: Json) -> Json:
    width, heads = found["width"], found["num_heads"]
    if hf.size(config, "head_dim", width // heads) * heads != width:
        raise CheckpointError(
            f"config.json: head_dim={config.get('head_dim', width // heads)!r} is not supported, "
            f"only hidden_size / num_attention_heads, {width}/{heads}"
        )
    return {}


def _rope(config: Json, _: Json) -> Json:
    if hf.rotary_fraction(config, "partial_rotary_factor", 1.0) != 1:
        raise CheckpointError("config.json: partial_rotary_factor is not supported, only 1")
    return {"rotary_base": hf.rotary_base(config)}


CONFIG = ConfigTable(
    "LLaMA",
    {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"},
    _keys,
    constants=lambda kind: {"norm": "rmsnorm", "mlp": "swiglu", "qk_norm": "rmsnorm" if kind == "qwen3" else None},
    vocab_sizes={"llama": 32_000, "mistral": 32_000, "qwen3": 151_936},
    type_of=lambda fields: "qwen3" if fields.qk_norm else "llama",
)


def matches(tensors: Tensors, config: Json) -> bool:
    return {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"} <= set(tensors)


def describe(tensors: Tensors, config: Json) -> Description:
    return CONFIG.describe(config)


def config(description: Description) -> Json:
    return CONFIG.config(description)


def unused(name: str) -> bool:
    return name.endswith(".rotary_emb.inv_freq")


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    fields = LMFields.of(description)
    width, bias = (fields.width,), fields.use_bias
    queries, keys = (fields.num_heads, fields.head_dim), (fields.key_heads, fields.head_dim)
    found = embedding_and_head(EMBEDDING, HEAD, description, tensors)
    for i in range(fields.depth):
        theirs, ours, mlp = f"model.layers.{i}", attention(i), f"{block(i)}/MlpBlock_0"
        found += norm_layer(f"{theirs}.input_layernorm", f"{block(i)}/attention_norm", fields.width, False)
        for name, heads in (("query", queries), ("key", keys), ("value", keys)):
            found += linear_layer(f"{theirs}.self_attn.{name[0]}_proj", f"{ours}/{name}", width, heads, bias)
        found += linear_layer(f"{theirs}.self_attn.o_proj", f"{ours}/out", queries, width, bias)
        if fields.qk_norm:
            for name in ("query", "key"):
                scale = same(f"{theirs}.self_attn.{name[0]}_norm.weight", f"{ours}/{name}_norm/scale")
                found.append(checked(scale, fields.head_dim))
        found += norm_layer(f"{theirs}.post_attention_layernorm", f"{block(i)}/mlp_norm", fields.width, False)
        for their_name, our_name in (("gate", "in"), ("up", "gate")):
            found += linear_layer(f"{theirs}.mlp.{their_name}_proj", f"{mlp}/{our_name}", width, (fields.hidden,), bias)
        found += linear_layer(f"{theirs}.mlp.down_proj", f"{mlp}/out", (fields.hidden,), width, bias)
    return found + norm_layer("model.norm", "Transformer/decoder_norm", fields.width, False)
