"""ViT and DeiT of Hugging Face transformers, with the names of releases 4 (also written by 5) and 5.

https://huggingface.co/docs/transformers/model_doc/vit. DeiT's distillation token is a register here: it takes part in
attention, and is classified if it has a classifier of its own.
"""

from __future__ import annotations

from dcvit.errors import CheckpointError
from dcvit.weights import hf_config, hf_processor, hf_vision, vit_links
from dcvit.weights.config_table import ABSENT, Key, field, only, written
from dcvit.weights.family import Description
from dcvit.weights.hf_vision import sizes
from dcvit.weights.links import Link
from dcvit.weights.tensors import Json, Tensors

PREFIXES = ("vit.", "deit.", "")
PATCHES, CLS, DISTILLATION = "embeddings.patch_embeddings.projection", "embeddings.cls_token", "distillation_token"
HEADS = ("classifier", "cls_classifier")  # alone, and beside that of the distillation token
POOLER = ("pooler.dense.weight", "pooler.dense.bias")
BLOCK_4 = vit_links.BlockNames(
    ("layernorm_before", "layernorm_after"),
    ("attention.attention.query", "attention.attention.key", "attention.attention.value", "attention.output.dense"),
    ("intermediate.dense", "output.dense"),
)
BLOCK_5 = vit_links.BlockNames(
    BLOCK_4.norms, tuple(f"attention.{name}_proj" for name in "qkvo"), ("mlp.fc1", "mlp.fc2")
)  # fmt: skip


def _written_pooler(fields: Json) -> object:
    """Return the width of the pooler, a layer before the head."""
    return fields["width"] if fields["rep_size"] is True else fields["rep_size"] or ABSENT


KEYS = [
    *sizes(norm_epsilon=1e-12),
    field("intermediate_size", "mlp_dim", default=3072),
    field("hidden_act", "mlp", hf_config.activation, "gelu", hf_config.activation_name),
    hf_vision.QKV_BIAS,
    Key("pooler_act", only("pooler_act", "tanh").read, lambda fields: "tanh" if fields["rep_size"] else ABSENT),
    written("pooler_output_size", _written_pooler),
]


def matches(tensors: Tensors, config: Json) -> bool:
    """Recognize the names of ViT and DeiT, with or without a classifier."""
    prefix = _prefix(tensors)
    return prefix is not None and any(f"{prefix}{layers}.0.layernorm_before.weight" in tensors
                                      for layers in ("encoder.layer", "layers"))  # fmt: skip


def describe(tensors: Tensors, config: Json) -> Description:
    """Describe the model; see `dcvit.weights.family.Family`."""
    kind = hf_config.check_type(config, "vit", "deit")
    prefix = _prefix(tensors)
    fields, image_size = hf_vision.read(KEYS, config)
    head = next((name for name in HEADS if f"{name}.weight" in tensors), None)
    fields["pool_type"] = "tok+reg" if head == HEADS[1] else "tok"
    if f"{prefix}embeddings.{DISTILLATION}" in tensors or head == HEADS[1]:
        fields["registers"] = 1
    classes = vit_links.shape_of(tensors, f"{head}.weight", "ViT")[0] if head else None
    if classes is None and any(f"{prefix}{name}" in tensors for name in POOLER):  # a classifier takes the class token
        size = vit_links.shape_of(tensors, f"{prefix}{POOLER[0]}", "ViT")[0]
        fields["rep_size"] = True if size == fields["width"] else size
    before = 1 + fields.get("registers", 0)
    vit_links.check_positions(tensors, f"{prefix}embeddings.position_embeddings", fields, image_size, before)
    channels = hf_vision.channels_of(config, tensors, f"{prefix}{PATCHES}")
    processor = "DeiT" if kind == "deit" else "ViT"
    return Description(
        "vit", classes, hf_vision.ordered(fields), hf_processor.read(config, processor, image_size, channels)
    )


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    """Return the links; see `dcvit.weights.family.Family`."""
    fields = vit_links.settings(description)
    tokens: list[tuple[str, int]] = [(CLS, 1)]
    if fields["registers"]:
        tokens.append((f"embeddings.{DISTILLATION}", 1))
    prefix: str | None = ("deit." if fields["registers"] else "vit.") if description.num_outputs else ""
    newer = False
    if tensors is not None:
        prefix = _prefix(tensors)
        newer = any(".attention.q_proj." in name for name in tensors)
    in_front = vit_links.TokenNames(
        f"{prefix}embeddings.position_embeddings", tuple((f"{prefix}{name}", n) for name, n in tokens), len(tokens)
    )
    layers, block = ("layers.{}", BLOCK_5) if newer else ("encoder.layer.{}", BLOCK_4)
    found = vit_links.model_links(
        description,
        vit_links.Names(
            f"{prefix}{PATCHES}", in_front, f"{prefix}{layers}", block, f"{prefix}layernorm",
            HEADS[fields["pool_type"] == "tok+reg"], "distillation_classifier",
        ),
    )  # fmt: skip
    if fields["rep_size"]:
        size = fields["width"] if fields["rep_size"] is True else fields["rep_size"]
        found += vit_links.dense(f"{prefix}pooler.dense", "pre_logits", (fields["width"],), (size,))
    return found


def unused(name: str) -> bool:
    """Return True for the token of masked patches, which pretraining uses, and a pooler beside a classifier."""
    return name.endswith(("embeddings.mask_token", *POOLER))


def config(description: Description) -> Json:
    """Return the content of config.json; see `dcvit.weights.family.Family`."""
    fields = vit_links.settings(description)
    classes, rep_size = description.num_outputs, fields["rep_size"]
    vit_links.check_expressible(
        description, "Hugging Face's ViT", pool_type=("tok", *["tok+reg"] * bool(classes)), registers=(0, 1),
        layer_scale=(None,), mlp=("gelu", "gelu_tanh"), rep_size=(False, 0) if classes else (rep_size,),
        qkv_bias=("qkv", ""),
    )  # fmt: skip
    if not classes and not rep_size:
        raise CheckpointError("Hugging Face's ViT cannot express features without pre_logits: ViTModel has a pooler")
    kind = "DeiT" if fields["registers"] else "ViT"
    head = "ForImageClassification" + "WithTeacher" * (fields["pool_type"] == "tok+reg")
    found: Json = {
        "architectures": [f"{kind}{head if classes else 'Model'}"],
        "model_type": kind.lower(),
        **hf_vision.write(KEYS, description),
    }
    return found | ({"num_labels": classes} if classes else {})


def _prefix(tensors: Tensors) -> str | None:
    """Return the prefix of the names, or None for another family."""
    return next((prefix for prefix in PREFIXES if f"{prefix}{PATCHES}.weight" in tensors), None)
