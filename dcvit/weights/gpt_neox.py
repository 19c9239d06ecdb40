"""GPT-NeoX and Pythia of Hugging Face transformers (GPTNeoXForCausalLM).

The outputs of one linear layer are the query, the key and the value of the first head, then those of the next head, ….
"""

from __future__ import annotations

import re

from dcvit.errors import CheckpointError
from dcvit.weights import hf_config as hf
from dcvit.weights import torch_layers
from dcvit.weights.config_table import Key, field, only
from dcvit.weights.family import Description
from dcvit.weights.links import Link
from dcvit.weights.lm_fields import ConfigTable
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import ATTENTION, BLOCK, embedding_and_head

TABLE: torch_layers.Table = {
    "gpt_neox.layers.{}.input_layernorm": f"{BLOCK}/attention_norm",
    "gpt_neox.layers.{}.attention.query_key_value": [f"{ATTENTION}/{name}" for name in ("query", "key", "value")],
    "gpt_neox.layers.{}.attention.dense": f"{ATTENTION}/out",
    "gpt_neox.layers.{}.post_attention_layernorm": f"{BLOCK}/mlp_norm",
    "gpt_neox.layers.{}.mlp.dense_h_to_4h": f"{BLOCK}/MlpBlock_0/in",
    "gpt_neox.layers.{}.mlp.dense_4h_to_h": f"{BLOCK}/MlpBlock_0/out",
    "gpt_neox.final_layer_norm": "Transformer/decoder_norm",
}
UNUSED = re.compile(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")


def _rope(config: Json, found: Json) -> Json:
    """Return the fields of the rotary embedding; its width, a fraction of D, is rounded down to an integer."""
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
        field("num_hidden_layers", "depth"),
        field("num_attention_heads", "num_heads"),
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
            _rope,
            lambda fields: hf.rope_parameters(fields, partial_rotary_factor=fields["rotary_fraction"]),
        ),
    ],
    constants=lambda _: {"norm": "layernorm", "use_bias": True},
    vocab_sizes={"gpt_neox": 50_432},
)


def matches(tensors: Tensors, config: Json) -> bool:
    return "gpt_neox.layers.0.attention.query_key_value.weight" in tensors


describe, config = CONFIG.describe, CONFIG.config


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    found = embedding_and_head("gpt_neox.embed_in", "embed_out", description, tensors)
    return found + torch_layers.links(TABLE, description, by_head=True)
