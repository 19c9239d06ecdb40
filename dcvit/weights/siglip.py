"""Vision tower of SigLIP in Hugging Face transformers, alone or inside the model of both towers.

https://huggingface.co/docs/transformers/model_doc/siglip. The pooling head is big_vision's `MAPHead_0`, whose
projections PyTorch fuses.
"""

from __future__ import annotations

import re

from dcvit.errors import CheckpointError
from dcvit.weights import config_table, hf_config, hf_vision, torch_layers, vit_links
from dcvit.weights.config_table import field
from dcvit.weights.family import Description
from dcvit.weights.hf_vision import sizes
from dcvit.weights.links import Link
from dcvit.weights.tensors import Json, Tensors

PREFIXES = ("vision_model.", "")
PATCHES = "embeddings.patch_embedding"
UNUSED = re.compile(r"text_model\..*|logit_.*|.*position_ids")  # the text tower, the loss, and buffers
BLOCK = vit_links.block(
    "encoder.layers.{}",
    ("layer_norm1", "layer_norm2"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    ("mlp.fc1", "mlp.fc2"),
)
QKV, OUT = vit_links.attention_modules(f"MAPHead_0/{vit_links.ATTENTION}")
HEAD: torch_layers.Table = {
    "probe": "MAPHead_0/probe", "attention.in_proj_": QKV, "attention.out_proj": OUT,
    "layernorm": "MAPHead_0/LayerNorm_0", "mlp.fc1": "MAPHead_0/MlpBlock_0/Dense_0",
    "mlp.fc2": "MAPHead_0/MlpBlock_0/Dense_1",
}  # fmt: skip
KEYS = [
    *sizes(),
    field("intermediate_size", "mlp_dim", default=3072),
    field("hidden_act", "mlp", hf_config.activation, "gelu_pytorch_tanh"),
]


def matches(tensors: Tensors, config: Json) -> bool:
    """Return True if the tensors include the vision tower's last norm and its patch embedding's bias, unlike CLIP's."""
    prefix = vit_links.prefix_of(tensors, PREFIXES, f"{PATCHES}.weight")
    return prefix is not None and f"{prefix}post_layernorm.weight" in tensors and f"{prefix}{PATCHES}.bias" in tensors


def describe(tensors: Tensors, config: Json) -> Description:
    hf_config.check_type(config, "siglip_vision_model", "siglip")
    vision = config.get("vision_config", {})
    if not isinstance(vision, dict):
        raise CheckpointError(f"config.json: vision_config={vision!r}; expected an object")
    config = {**config, **vision}
    prefix = vit_links.prefix_of(tensors, PREFIXES, f"{PATCHES}.weight")
    classes = vit_links.classes_of(tensors, "classifier.weight", "SigLIP")
    fields = config_table.read(KEYS, config)
    fields["pool_type"] = "map" if f"{prefix}head.probe" in tensors else "none"
    if classes is not None:  # the classifier takes the mean of the patches, and leaves the pooling head unused
        fields["pool_type"] = "gap"
    return hf_vision.described(fields, classes, config, tensors, f"{prefix}{PATCHES}", "Siglip")


def links(description: Description, tensors: Tensors) -> list[Link]:
    prefix = vit_links.prefix_of(tensors, PREFIXES, f"{PATCHES}.weight")
    modules = {PATCHES: "embedding", **BLOCK, "post_layernorm": "Transformer/encoder_norm"}
    table = {f"{prefix}{theirs}": ours for theirs, ours in modules.items()}
    positions = vit_links.TokenNames(f"{prefix}embeddings.position_embedding.weight", batched=False)
    found = vit_links.model_links(description, table, positions, ["classifier"])
    pool_type = vit_links.settings(description)["pool_type"]
    if pool_type == "none":
        return found
    pooled = description._replace(fields={**description.fields, "pool_type": "map"})
    head = torch_layers.links({f"{prefix}head.{theirs}": ours for theirs, ours in HEAD.items()}, pooled)
    if pool_type == "map":
        return found + head
    if f"{prefix}head.probe" in tensors:
        found += [vit_links.ignored(name, shape) for x in head for name, shape in zip(x.theirs, x.shapes, strict=True)]
    return found
