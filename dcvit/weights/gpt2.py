"""GPT-2 of Hugging Face transformers (GPT2LMHeadModel).

Its linear layers store "in out", one of them for queries, keys and values. Files of the model without its head, such as
the first releases, have no prefix.
"""

from __future__ import annotations

import re

import numpy as np

from dcvit.weights import hf_config as hf
from dcvit.weights.config_table import field, only, written
from dcvit.weights.family import Description
from dcvit.weights.links import Arrays, Link, same
from dcvit.weights.lm_fields import ConfigTable, LMFields
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import attention, block, checked, embedding_and_head, norm_layer

PREFIX, HEAD = "transformer.", "lm_head.weight"
BUFFERS = re.compile(r"(.*\.)?attn\.(masked_)?bias")
CONFIG = ConfigTable(
    "GPT-2",
    {"gpt2": "GPT2LMHeadModel"},
    keys=lambda _: [
        field("n_embd", "width", default=768),
        field("n_layer", "depth", hf.depth, 12),
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
    constants=lambda _: {"position": "learned", "norm": "layernorm", "use_bias": True},
    vocab_sizes={"gpt2": 50_257},
)


def matches(tensors: Tensors, config: Json) -> bool:
    return any(f"{prefix}h.0.attn.c_attn.weight" in tensors for prefix in (PREFIX, ""))


def describe(tensors: Tensors, config: Json) -> Description:
    return CONFIG.describe(config)


def config(description: Description) -> Json:
    return CONFIG.config(description)


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
        out = same(f"{theirs}.attn.c_proj.weight", f"{ours}/out/kernel", (*split, width), (-1, width))
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
