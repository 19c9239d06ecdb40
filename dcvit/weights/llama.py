"""The LLaMA family of Hugging Face transformers: LlamaForCausalLM, and Mistral and Qwen3, which share its layout."""

from __future__ import annotations

from dcvit.errors import CheckpointError
from dcvit.weights import hf_config as hf
from dcvit.weights.family import Description
from dcvit.weights.links import Link, same
from dcvit.weights.lm_fields import LMFields, check_expressible, vocab_size
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import attention, block, checked, embedding_and_head, linear_layer, norm_layer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Defaults of transformers that differ between the types: vocabulary, context, and the sliding window of all layers.
VOCAB_SIZES = {"llama": 32_000, "mistral": 32_000, "qwen3": 151_936}
CONTEXTS = {"llama": 2048, "mistral": 131_072, "qwen3": 32_768}
SLIDING_WINDOWS = {"llama": None, "mistral": 4096, "qwen3": None}


def matches(tensors: Tensors, config: Json) -> bool:
    return {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"} <= set(tensors)


def describe(tensors: Tensors, config: Json) -> Description:
    fields = _fields(config)
    return fields.describe(hf.size(config, "vocab_size", VOCAB_SIZES[config["model_type"]]))


def _fields(config: Json) -> LMFields:
    kind = hf.check_type(config, *VOCAB_SIZES)
    hf.check_only(config, hidden_act="silu", layer_types=_layer_types(config))
    window = config.get("sliding_window", SLIDING_WINDOWS[kind])
    if window is not None and (kind != "qwen3" or hf.flag(config, "use_sliding_window", False)):
        raise CheckpointError(f"config.json: sliding_window={window!r} is not supported, only null")
    width, heads = hf.size(config, "hidden_size"), hf.size(config, "num_attention_heads")
    if hf.size(config, "head_dim", width // heads) * heads != width:
        raise CheckpointError(
            f"config.json: head_dim={config.get('head_dim', width // heads)!r} is not supported, "
            f"only hidden_size / num_attention_heads, {width}/{heads}"
        )
    bias = kind == "llama" and hf.flag(config, "attention_bias", False)
    hf.check_only(config, attention_bias=bias, mlp_bias=bias)
    if hf.rotary_fraction(config, "partial_rotary_factor", 1.0) != 1:
        raise CheckpointError("config.json: partial_rotary_factor is not supported, only 1")
    epsilon = hf.number(config, "rms_norm_eps", 1e-6)
    return LMFields(
        width=width, depth=hf.depth(config, "num_hidden_layers"), num_heads=heads,
        num_key_heads=hf.size(config, "num_key_value_heads", heads), mlp_dim=hf.size(config, "intermediate_size"),
        context=hf.size(config, "max_position_embeddings", CONTEXTS[kind]), rotary_base=hf.rotary_base(config),
        norm="rmsnorm", norm_epsilon=epsilon, mlp="swiglu", use_bias=bias,
        tied=hf.flag(config, "tie_word_embeddings", False),
        qk_norm="rmsnorm" if kind == "qwen3" else None, qk_norm_epsilon=epsilon,
    ).canonical()  # fmt: skip


def _layer_types(config: Json) -> list[str]:
    return ["full_attention"] * hf.depth(config, "num_hidden_layers")


def config(description: Description) -> Json:
    fields = LMFields.of(description)
    kind, architecture = ("qwen3", "Qwen3ForCausalLM") if fields.qk_norm else ("llama", "LlamaForCausalLM")
    bias = fields.use_bias and kind == "llama"
    values = {
        "architectures": [architecture], "model_type": kind, "vocab_size": vocab_size(description),
        "hidden_size": fields.width, "num_hidden_layers": fields.depth, "num_attention_heads": fields.num_heads,
        "num_key_value_heads": fields.key_heads, "head_dim": fields.head_dim, "intermediate_size": fields.hidden,
        "max_position_embeddings": fields.context, "rms_norm_eps": fields.norm_epsilon, "hidden_act": "silu",
        "attention_bias": bias, "mlp_bias": bias, "tie_word_embeddings": fields.tied,
        "rope_parameters": hf.rope_parameters(fields.rotary_base), "sliding_window": None,
    }  # fmt: skip
    check_expressible(fields, _fields(values), "LLaMA")
    return values


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
