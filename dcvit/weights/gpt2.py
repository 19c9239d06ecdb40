"""GPT-2 of Hugging Face transformers (GPT2LMHeadModel).

Its linear layers store "in out", one of them for queries, keys and values. Files of the model without its head, such as
the first releases, have no prefix.
"""

from __future__ import annotations

import re

import numpy as np

from dcvit.weights import hf_config as hf
from dcvit.weights.family import Description
from dcvit.weights.links import Arrays, Link, same
from dcvit.weights.lm_fields import LMFields, check_expressible, vocab_size
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import attention, block, checked, embedding_and_head, norm_layer

PREFIX, HEAD = "transformer.", "lm_head.weight"
BUFFERS = re.compile(r"(.*\.)?attn\.(masked_)?bias")


def matches(tensors: Tensors, config: Json) -> bool:
    return any(f"{prefix}h.0.attn.c_attn.weight" in tensors for prefix in (PREFIX, ""))


def describe(tensors: Tensors, config: Json) -> Description:
    fields = _fields(config)
    return fields.describe(hf.size(config, "vocab_size", 50257))


def _fields(config: Json) -> LMFields:
    hf.check_type(config, "gpt2")
    hf.check_only(
        config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )  # fmt: skip
    width = hf.size(config, "n_embd", 768)
    return LMFields(
        width=width, depth=hf.depth(config, "n_layer", 12), num_heads=hf.size(config, "n_head", 12),
        mlp_dim=hf.size(config, "n_inner", 4 * width), context=hf.size(config, "n_positions", 1024),
        position="learned", norm="layernorm", norm_epsilon=hf.number(config, "layer_norm_epsilon", 1e-5),
        mlp=hf.activation(config, "activation_function", "gelu_new"), use_bias=True,
        tied=hf.flag(config, "tie_word_embeddings", True),
    ).canonical()  # fmt: skip


def config(description: Description) -> Json:
    fields = LMFields.of(description)
    values = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocab_size(description),
        "n_embd": fields.width, "n_layer": fields.depth, "n_head": fields.num_heads, "n_inner": fields.hidden,
        "n_positions": fields.context, "layer_norm_epsilon": fields.norm_epsilon,
        "activation_function": hf.activation_name(fields.mlp), "tie_word_embeddings": fields.tied,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip
    check_expressible(fields, _fields(values), "GPT-2")
    return values


def unused(name: str) -> bool:
    return BUFFERS.fullmatch(name) is not None


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    fields, prefix = LMFields.of(description), _prefix(tensors)
    found = embedding_and_head(f"{prefix}wte.weight", HEAD, description, tensors)
    found.append(checked(same(f"{prefix}wpe.weight", "pos_embedding"), fields.context, fields.width))
    width, hidden, split = fields.width, fields.hidden, (fields.num_heads, fields.head_dim)
    for i in range(fields.depth):
        theirs, ours = f"{prefix}h.{i}", attention(i)
        found += norm_layer(f"{theirs}.ln_1", f"{block(i)}/attention_norm", fields.width, True)
        found += [_fused(f"{theirs}.attn.c_attn", ours, part, fields) for part in ("weight", "bias")]
        out = same(f"{theirs}.attn.c_proj.weight", f"{ours}/out/kernel", (*split, width), (width, width))
        found += [checked(out, width, width), checked(same(f"{theirs}.attn.c_proj.bias", f"{ours}/out/bias"), width)]
        found += norm_layer(f"{theirs}.ln_2", f"{block(i)}/mlp_norm", fields.width, True)
        for their_name, our_name, shape in (("c_fc", "in", (width, hidden)), ("c_proj", "out", (hidden, width))):
            their_path, our_path = f"{theirs}.mlp.{their_name}", f"{block(i)}/MlpBlock_0/{our_name}"
            found.append(checked(same(f"{their_path}.weight", f"{our_path}/kernel"), *shape))
            found.append(checked(same(f"{their_path}.bias", f"{our_path}/bias"), shape[1]))
    return found + norm_layer(f"{prefix}ln_f", "Transformer/decoder_norm", fields.width, True)


def _prefix(tensors: Tensors | None) -> str:
    return "" if tensors is not None and "wte.weight" in tensors else PREFIX


def _fused(theirs: str, ours: str, part: str, fields: LMFields) -> Link:
    """Link the columns of queries, keys and values."""
    heads = (fields.num_heads, fields.head_dim)
    end = "kernel" if part == "weight" else "bias"

    def to_ours(x: np.ndarray) -> Arrays:
        return [y.reshape(*y.shape[:-1], *heads) for y in np.split(x, 3, axis=-1)]

    def to_theirs(*parts: np.ndarray) -> Arrays:
        return (np.concatenate([y.reshape(*y.shape[:-2], fields.width) for y in parts], axis=-1),)

    paths = tuple(f"{ours}/{name}/{end}" for name in ("query", "key", "value"))
    columns = 3 * fields.width
    shape = (fields.width, columns) if part == "weight" else (columns,)
    return checked(Link((f"{theirs}.{part}",), paths, to_ours, to_theirs), *shape)
