"""GPT-2 of Hugging Face transformers (GPT2LMHeadModel).

Its linear layers store "in out", one of them for queries, keys and values. Files of the model without its head, such as
the first releases, have no prefix.
"""

from __future__ import annotations

import re

from dcvit.weights import hf_config as hf
from dcvit.weights import torch_layers
from dcvit.weights.config_table import field, only, written
from dcvit.weights.family import Description
from dcvit.weights.links import Link
from dcvit.weights.lm_fields import ConfigTable
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import ATTENTION, BLOCK, embedding_and_head

PREFIX = "transformer."
TABLE: torch_layers.Table = {
    "wpe.weight": "pos_embedding",
    "h.{}.ln_1": f"{BLOCK}/attention_norm",
    "h.{}.attn.c_attn": [f"{ATTENTION}/{name}" for name in ("query", "key", "value")],
    "h.{}.attn.c_proj": f"{ATTENTION}/out",
    "h.{}.ln_2": f"{BLOCK}/mlp_norm",
    "h.{}.mlp.c_fc": f"{BLOCK}/MlpBlock_0/in",
    "h.{}.mlp.c_proj": f"{BLOCK}/MlpBlock_0/out",
    "ln_f": "Transformer/decoder_norm",
}
UNUSED = re.compile(r"(.*\.)?attn\.(masked_)?bias")
CONFIG = ConfigTable(
    "GPT-2",
    {"gpt2": "GPT2LMHeadModel"},
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
    constants=lambda _: {"position": "learned", "norm": "layernorm", "use_bias": True},
    vocab_sizes={"gpt2": 50_257},
)


def matches(tensors: Tensors, config: Json) -> bool:
    return any(f"{prefix}h.0.attn.c_attn.weight" in tensors for prefix in (PREFIX, ""))


describe, config = CONFIG.describe, CONFIG.config


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    prefix = "" if tensors is not None and "wte.weight" in tensors else PREFIX
    table = {f"{prefix}{theirs}": ours for theirs, ours in TABLE.items()}
    found = embedding_and_head(f"{prefix}wte", "lm_head", description, tensors)
    return found + torch_layers.links(table, description, in_out=True)
