"""GPT-NeoX and Pythia of Hugging Face transformers (GPTNeoXForCausalLM).

One linear layer holds the query, key and value of each head in turn.
"""

from __future__ import annotations

import re

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights import hf_config as hf
from dcvit.weights.config_table import ABSENT, Key, field, only
from dcvit.weights.family import Description
from dcvit.weights.links import Arrays, Link
from dcvit.weights.lm_fields import ConfigTable, LMFields
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import attention, block, checked, embedding_and_head, linear_layer, norm_layer

EMBEDDING, HEAD = "gpt_neox.embed_in.weight", "embed_out.weight"
BUFFERS = re.compile(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")


def _rope(config: Json, found: Json) -> Json:
    """Return the fields of the rotary embedding, whose width is rounded down to whole numbers of a head."""
    head_dim = found["width"] // found["num_heads"]
    rotary = int(head_dim * hf.rotary_fraction(config, "rotary_pct", 0.25))
    if rotary < 2 or rotary % 2:
        raise CheckpointError(
            f"config.json: rotary_pct rotates {rotary} of a head's {head_dim} numbers; expected pairs"
        )
    return {"rotary_fraction": rotary / head_dim, **hf.rotary(config, found["context"], "rotary_emb_base")}


CONFIG = ConfigTable(
    "GPT-NeoX",
    {"gpt_neox": "GPTNeoXForCausalLM"},
    keys=lambda _: [
        field("hidden_size", "width"),
        field("num_hidden_layers", "depth", hf.depth),
        field("num_attention_heads", "num_heads"),
        Key("head_dim", hf.check_head_dim, lambda _: ABSENT),
        field("intermediate_size", "mlp_dim"),
        field("max_position_embeddings", "context", default=2048),
        field("layer_norm_eps", "norm_epsilon", hf.number, 1e-5),
        field("hidden_act", "mlp", hf.activation, "gelu", hf.activation_name),
        only("attention_bias", True),
        field("use_parallel_residual", "parallel", hf.flag, True),
        field("tie_word_embeddings", "tied", hf.flag, False),
        Key(
            "rope_parameters",
            _rope,
            lambda fields: hf.rope_parameters(fields, partial_rotary_factor=fields["rotary_fraction"]),
        ),
    ],
    constants=lambda _: {"norm": "layernorm", "use_bias": True},
    vocab_sizes={"gpt_neox": 50_432},
)


def matches(tensors: Tensors, config: Json) -> bool:
    return "gpt_neox.layers.0.attention.query_key_value.weight" in tensors


def describe(tensors: Tensors, config: Json) -> Description:
    return CONFIG.describe(config)


def config(description: Description) -> Json:
    return CONFIG.config(description)


def unused(name: str) -> bool:
    return BUFFERS.fullmatch(name) is not None


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    fields = LMFields.of(description)
    width, hidden = (fields.width,), (fields.hidden,)
    found = embedding_and_head(EMBEDDING, HEAD, description, tensors)
    for i in range(fields.depth):
        theirs, ours, mlp = f"gpt_neox.layers.{i}", attention(i), f"{block(i)}/MlpBlock_0"
        found += norm_layer(f"{theirs}.input_layernorm", f"{block(i)}/attention_norm", fields.width, True)
        found += [_fused(f"{theirs}.attention.query_key_value", ours, part, fields) for part in ("weight", "bias")]
        found += linear_layer(
            f"{theirs}.attention.dense", f"{ours}/out", (fields.num_heads, fields.head_dim), width, True
        )
        found += norm_layer(f"{theirs}.post_attention_layernorm", f"{block(i)}/mlp_norm", fields.width, True)
        found += linear_layer(f"{theirs}.mlp.dense_h_to_4h", f"{mlp}/in", width, hidden, True)
        found += linear_layer(f"{theirs}.mlp.dense_4h_to_h", f"{mlp}/out", hidden, width, True)
    return found + norm_layer("gpt_neox.final_layer_norm", "Transformer/decoder_norm", fields.width, True)


def _fused(theirs: str, ours: str, part: str, fields: LMFields) -> Link:
    """Link the rows of each head's query, key and value."""
    heads, head_dim = fields.num_heads, fields.head_dim
    end = "kernel" if part == "weight" else "bias"

    def to_ours(x: np.ndarray) -> Arrays:
        split = x.reshape(heads, 3, head_dim, *x.shape[1:])
        return [np.moveaxis(split[:, j], (0, 1), (-2, -1)) for j in range(3)]  # M H D, or H D of a bias

    def to_theirs(*parts: np.ndarray) -> Arrays:
        split = np.stack([np.moveaxis(y, (-2, -1), (0, 1)) for y in parts], axis=1)
        return (split.reshape(3 * fields.width, *split.shape[3:]),)

    paths = tuple(f"{ours}/{name}/{end}" for name in ("query", "key", "value"))
    rows = 3 * fields.width
    shape = (rows, fields.width) if part == "weight" else (rows,)
    return checked(Link((f"{theirs}.{part}",), paths, to_ours, to_theirs), *shape)
