"""DINOv3's Vision Transformers: files of Hugging Face transformers.

https://huggingface.co/docs/transformers/model_doc/dinov3. Features are the class token. The token of masked patches is
not read, nor are the keys of config.json that concern training only: dropout, stochastic depth, and the augmentation of
positions.
"""

from __future__ import annotations

import re

from dcvit.errors import CheckpointError
from dcvit.models.fields import QKV_BIASES
from dcvit.weights import config_table, hf_config, hf_vision, torch_layers, vit_links
from dcvit.weights.config_table import Key, field, only
from dcvit.weights.dinov2 import NORMS, SCALES
from dcvit.weights.family import Description
from dcvit.weights.links import Link
from dcvit.weights.tensors import Json, Tensors

PATCHES, CLS, REGISTERS, MASK = (
    f"embeddings.{name}" for name in ("patch_embeddings", "cls_token", "register_tokens", "mask_token")
)
LAYERS = ("layer.{}", "model.layer.{}")  # in a file of `save_pretrained`, and of `state_dict`
UNUSED = re.compile(re.escape(MASK))  # of masked patches, which pretraining uses
BIASES = {"q": "query_bias", "k": "key_bias", "v": "value_bias"}


def _activation(config: Json, _: Json) -> Json:
    if not hf_config.flag(config, "use_gated_mlp", False):
        return {"mlp": hf_config.activation(config, "hidden_act", "gelu")}
    if (found := hf_config.text(config, "hidden_act", "gelu")) != "silu":
        raise CheckpointError(f"config.json: hidden_act={found!r} with use_gated_mlp is not supported, only 'silu'")
    return {"mlp": "swiglu"}


def _biases(config: Json, _: Json) -> Json:
    found = "".join(initial for initial, key in BIASES.items() if hf_config.flag(config, key, initial != "k"))
    if found not in QKV_BIASES:
        raise CheckpointError(f"config.json: biases of {', '.join(BIASES[x] for x in found)} alone are not supported")
    return {"qkv_bias": found}


def _registers(config: Json, _: Json) -> Json:
    return {"registers": hf_config.size(config, "num_register_tokens")} if config.get("num_register_tokens") else {}


KEYS = [
    *hf_vision.sizes(norm_epsilon=1e-5, width=384, heads=6),
    field("intermediate_size", "mlp_dim", default=1536),
    Key("hidden_act", _activation),
    field("layerscale_value", "layer_scale", hf_config.number, 1.0),
    Key("num_register_tokens", _registers),
    Key("query_bias", _biases),
    only("proj_bias", True),
    only("mlp_bias", True),
    only("rope_theta", 100.0),  # as in `dcvit.models.vit`
]


def matches(tensors: Tensors, config: Json) -> bool:
    """Return True for the tensors of DINOv3's ViTs, or the config of its ConvNeXts, which `describe` refuses."""
    is_convnext = config.get("model_type") == "dinov3_convnext"
    return is_convnext or any(f"{layer.format(0)}.{SCALES[0]}" in tensors for layer in LAYERS)


def describe(tensors: Tensors, config: Json) -> Description:
    hf_config.check_type(config, "dinov3_vit")
    fields = {**config_table.read(KEYS, config), "posemb": "rotary2d", "pool_type": "tok"}
    return hf_vision.described(fields, None, config, tensors, PATCHES, "DINOv3ViT")


def links(description: Description, tensors: Tensors) -> list[Link]:
    fields = vit_links.settings(description)
    layer = next((name for name in LAYERS if f"{name.format(0)}.{SCALES[0]}" in tensors), LAYERS[0])
    first = ("mlp.gate_proj", "mlp.up_proj") if fields["mlp"] == "swiglu" else ("mlp.up_proj",)
    block = vit_links.block(layer, NORMS, hf_vision.ATTENTION_5, (*first, "mlp.down_proj"), SCALES)
    front = {PATCHES: "embedding", CLS: "cls", REGISTERS: "registers"}
    found = torch_layers.links({**front, **block, "norm": "Transformer/encoder_norm"}, description)
    if not fields["registers"]:
        found.append(vit_links.ignored(REGISTERS, (1, 0, fields["width"])))
    return found
