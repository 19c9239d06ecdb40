"""DINOv2, also with registers: files of Hugging Face transformers (releases 4 and 5) and of facebookresearch/dinov2.

https://huggingface.co/docs/transformers/model_doc/dinov2, https://github.com/facebookresearch/dinov2. Features are the
class token; the classifier takes class token and mean of the patches (`pool_type="tok+gap"`).
"""

from __future__ import annotations

import re

from dcvit.weights import config_table, hf_config, hf_vision, preprocessing, vit_links
from dcvit.weights.config_table import Key, field
from dcvit.weights.family import Description
from dcvit.weights.hf_vision import sizes
from dcvit.weights.links import Link
from dcvit.weights.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from dcvit.weights.tensors import Json, Tensors

PREFIXES = ("dinov2_with_registers.", "dinov2.", "")
PATCHES = "embeddings.patch_embeddings.projection"
NORMS = ("norm1", "norm2")
SCALES = ("layer_scale1.lambda1", "layer_scale2.lambda1")
UNUSED = re.compile(r".*mask_token")  # of masked patches, which pretraining uses


def _keys(kind: str) -> list[Key]:
    """Return the table of config.json for a `model_type`. SwiGLU changes what `mlp_ratio` and `hidden_act` mean."""

    def gated(config: Json) -> bool:
        return hf_config.flag(config, "use_swiglu_ffn", False)

    def mlp_dim(config: Json, found: Json) -> Json:
        hidden = found["width"] * hf_config.size(config, "mlp_ratio", 4)
        return {"mlp_dim": (int(hidden * 2 / 3) + 7) // 8 * 8 if gated(config) else hidden}

    def activation(config: Json, _: Json) -> Json:
        return {"mlp": "swiglu" if gated(config) else hf_config.activation(config, "hidden_act", "gelu")}

    return [
        *sizes(16 if "register" in kind else 14),
        Key("mlp_ratio", mlp_dim),
        Key("hidden_act", activation),
        field("layerscale_value", "layer_scale", hf_config.number, 1.0),
        hf_vision.QKV_BIAS,
    ]


def matches(tensors: Tensors, config: Json) -> bool:
    """Return True for DINOv2's tensor names of Hugging Face, or of facebookresearch, which include `mask_token`."""
    prefix = vit_links.prefix_of(tensors, PREFIXES, f"{PATCHES}.weight")
    if prefix is not None:
        return f"{prefix}encoder.layer.0.{SCALES[0]}" in tensors
    return {"mask_token", "pos_embed", "blocks.0.ls1.gamma"} <= tensors.keys()


def describe(tensors: Tensors, config: Json) -> Description:
    prefix = vit_links.prefix_of(tensors, PREFIXES, f"{PATCHES}.weight")
    if prefix is None:
        return _describe_original(tensors)
    kind = hf_config.check_type(config, "dinov2", "dinov2_with_registers")
    fields, classes = (
        config_table.read(_keys(kind), config),
        vit_links.classes_of(tensors, "classifier.weight", "DINOv2"),
    )
    fields["pool_type"] = "tok" if classes is None else "tok+gap"
    if f"{prefix}embeddings.register_tokens" in tensors:
        fields["registers"] = vit_links.shape_of(tensors, f"{prefix}embeddings.register_tokens", "DINOv2", axes=3)[1]
    return hf_vision.described(fields, classes, config, tensors, f"{prefix}{PATCHES}", "Bit")


def links(description: Description, tensors: Tensors) -> list[Link]:
    fields = vit_links.settings(description)
    gated, registers = fields["mlp"] == "swiglu", fields["registers"]
    prefix = vit_links.prefix_of(tensors, PREFIXES, f"{PATCHES}.weight")
    before, embedded = ("", "") if prefix is None else (prefix, f"{prefix}embeddings.")
    tokens = ((f"{embedded}cls_token", 1), *([(f"{embedded}register_tokens", registers)] if registers else []))
    if prefix is None:
        mlp = ["mlp.w12", "mlp.w3"] if gated else ["mlp.fc1", "mlp.fc2"]
        scales = ("ls1.gamma", "ls2.gamma")
        block = vit_links.block("blocks.{}", NORMS, ("attn.qkv", "attn.proj"), mlp, scales, gated=gated)
        table = {"patch_embed.proj": "embedding", **block, "norm": "Transformer/encoder_norm"}
        return vit_links.model_links(description, table, vit_links.TokenNames("pos_embed", tokens, 1))
    newer = any(".attention.q_proj." in name for name in tensors)
    mlp = ["mlp.weights_in", "mlp.weights_out"] if gated else ["mlp.fc1", "mlp.fc2"]
    if gated and newer:
        mlp = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    attention = hf_vision.ATTENTION_5 if newer else hf_vision.ATTENTION_4
    block = vit_links.block(f"{before}encoder.layer.{{}}", NORMS, attention, mlp, SCALES, gated=gated)
    table = {f"{before}{PATCHES}": "embedding", **block, f"{before}layernorm": "Transformer/encoder_norm"}
    positions = vit_links.TokenNames(f"{embedded}position_embeddings", tokens, 1)
    return vit_links.model_links(description, table, positions, ["classifier"])


def _describe_original(tensors: Tensors) -> Description:
    """Return the description of a file of facebookresearch: a model without a classifier, with D = 64 in all sizes."""
    width, _, *patch = vit_links.shape_of(tensors, "patch_embed.proj.weight", "DINOv2", axes=4)
    gated = "blocks.0.mlp.w12.weight" in tensors
    last = vit_links.shape_of(tensors, f"blocks.0.mlp.{'w3' if gated else 'fc2'}.weight", "DINOv2")
    rows = vit_links.shape_of(tensors, "pos_embed", "DINOv2", axes=3)[1]
    side = round((rows - 1) ** 0.5)
    fields: Json = {
        "width": width, "depth": vit_links.depth_of(tensors, "blocks."), "num_heads": max(1, width // 64),
        "mlp_dim": last[1], "patch_size": tuple(patch), "pool_type": "tok", "mlp": "swiglu" if gated else "gelu",
        "layer_scale": 1e-5,
    }  # fmt: skip
    if "register_tokens" in tensors:
        fields["registers"] = vit_links.shape_of(tensors, "register_tokens", "DINOv2", axes=3)[1]
    size = (side * patch[0], side * patch[1])
    # The authors crop 224 of 256 pixels.
    steps = Preprocessing(size, preprocessing.resized(min(size), 0.875), "bicubic", IMAGENET_MEAN, IMAGENET_STD)
    return Description("vit", None, fields, preprocessing.to_pp(steps))
