"""Vision tower of SigLIP in Hugging Face transformers, alone or inside the model of both towers.

https://huggingface.co/docs/transformers/model_doc/siglip. The pooling head is big_vision's `MAPHead_0`, whose
projections PyTorch fuses.
"""

from __future__ import annotations

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights import hf_config, hf_processor, hf_vision, vit_links
from dcvit.weights.config_table import field, written
from dcvit.weights.family import Description
from dcvit.weights.hf_vision import sizes
from dcvit.weights.links import Link
from dcvit.weights.tensors import Json, Tensors

PREFIXES = ("vision_model.", "")
PATCHES = "embeddings.patch_embedding"
BLOCK = vit_links.BlockNames(
    ("layer_norm1", "layer_norm2"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    ("mlp.fc1", "mlp.fc2"),
)

KEYS = [
    *sizes(),
    field("intermediate_size", "mlp_dim", default=3072),
    field("hidden_act", "mlp", hf_config.activation, "gelu_pytorch_tanh", hf_config.activation_name),
    written("vision_use_head", lambda fields: fields["pool_type"] != "none"),
]


def matches(tensors: Tensors, config: Json) -> bool:
    """Recognize the names of the vision tower, which are CLIP's except for the last norm and the bias of the stem."""
    prefix = _prefix(tensors)
    return prefix is not None and f"{prefix}post_layernorm.weight" in tensors and f"{prefix}{PATCHES}.bias" in tensors


def describe(tensors: Tensors, config: Json) -> Description:
    """Describe the model; see `dcvit.weights.family.Family`."""
    hf_config.check_type(config, "siglip_vision_model", "siglip")
    vision = config.get("vision_config", {})
    if not isinstance(vision, dict):
        raise CheckpointError(f"config.json: vision_config={vision!r}; expected an object")
    config = {**config, **vision}
    prefix, classes = _prefix(tensors), None
    pool = "map" if f"{prefix}head.probe" in tensors else "none"
    if "classifier.weight" in tensors:  # it takes the mean of the patches, and leaves the pooling head unused
        pool, classes = "gap", vit_links.shape_of(tensors, "classifier.weight", "SigLIP")[0]
    fields, image_size = hf_vision.read(KEYS, config)
    fields["pool_type"] = pool
    vit_links.check_positions(tensors, f"{prefix}embeddings.position_embedding.weight", fields, image_size, 0)
    channels = hf_vision.channels_of(config, tensors, f"{prefix}{PATCHES}")
    return Description(
        "vit", classes, hf_vision.ordered(fields), hf_processor.read(config, "Siglip", image_size, channels)
    )


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    """Return the links; see `dcvit.weights.family.Family`."""
    fields = vit_links.settings(description)
    prefix = ("vision_model." if description.num_outputs else "") if tensors is None else _prefix(tensors)
    names = vit_links.Names(
        f"{prefix}{PATCHES}", vit_links.TokenNames(f"{prefix}embeddings.position_embedding.weight", batched=False),
        f"{prefix}encoder.layers.{{}}", BLOCK, f"{prefix}post_layernorm", "classifier",
    )  # fmt: skip
    found, head = vit_links.model_links(description, names), _head(fields, f"{prefix}head")
    if fields["pool_type"] == "map":
        return found + head
    if fields["pool_type"] == "gap" and (tensors is None or f"{prefix}head.probe" in tensors):
        return found + [_ignored(link) for link in head]
    return found


def unused(name: str) -> bool:
    """Return True for tensors of the text tower and of the loss, and for buffers."""
    return name.startswith(("text_model.", "logit_")) or name.endswith("position_ids")


def config(description: Description) -> Json:
    """Return the content of config.json; see `dcvit.weights.family.Family`."""
    classes = description.num_outputs
    vit_links.check_expressible(
        description, "Hugging Face's SigLIP", pool_type=("gap",) if classes else ("map", "none"), registers=(0,),
        layer_scale=(None,), mlp=("gelu", "gelu_tanh"),
    )  # fmt: skip
    hf_vision.check_square(description, "Hugging Face's SigLIP")
    vision: Json = {"model_type": "siglip_vision_model", **hf_vision.write(KEYS, description)}
    if not classes:
        return {"architectures": ["SiglipVisionModel"], **vision}
    return {
        "architectures": ["SiglipForImageClassification"], "model_type": "siglip", "vision_config": vision,
        "num_labels": classes,
    }  # fmt: skip


def _head(fields: Json, head: str) -> list[Link]:
    """Return the links of the pooling head."""
    width, heads = fields["width"], fields["num_heads"]
    inner, ours = (heads, width // heads), f"MAPHead_0/{vit_links.ATTENTION}"
    return [
        vit_links.tensor(f"{head}.probe", "MAPHead_0/probe", (1, 1, width)),
        *vit_links.fused(
            (f"{head}.attention.in_proj_weight", f"{head}.attention.in_proj_bias"),
            [f"{ours}/{name}" for name in ("query", "key", "value")], width, inner,
        ),
        *vit_links.dense(f"{head}.attention.out_proj", f"{ours}/out", inner, (width,)),
        *vit_links.norm(f"{head}.layernorm", "MAPHead_0/LayerNorm_0", width),
        *vit_links.mlp((f"{head}.mlp.fc1", f"{head}.mlp.fc2"), "MAPHead_0/MlpBlock_0", width, fields["mlp_dim"], False),
    ]  # fmt: skip


def _ignored(link: Link) -> Link:
    """Return the link of tensors that must exist but have no effect: not read, and written as zeros."""
    shapes = [[size or 1 for size in shape] for shape in link.shapes]
    return Link(link.theirs, (), lambda *_: (), lambda: [np.zeros(s, np.float32) for s in shapes], link.shapes)


def _prefix(tensors: Tensors) -> str | None:
    """Return the prefix of the names, or None for another family."""
    return next((prefix for prefix in PREFIXES if f"{prefix}{PATCHES}.weight" in tensors), None)
