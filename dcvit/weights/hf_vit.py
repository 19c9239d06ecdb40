"""ViT and DeiT of Hugging Face transformers, with the names of releases 4 (also written by 5) and 5.

https://huggingface.co/docs/transformers/model_doc/vit. DeiT's distillation token is a register here: it takes part in
attention, but only the class token is classified.
"""

from __future__ import annotations

from dcvit.errors import CheckpointError
from dcvit.weights import hf_config, hf_processor, vit_links
from dcvit.weights.family import Description
from dcvit.weights.links import Link
from dcvit.weights.tensors import Json, Tensors

PREFIXES = ("vit.", "deit.", "")
PATCHES, CLS, DISTILLATION = "embeddings.patch_embeddings.projection", "embeddings.cls_token", "distillation_token"
POOLER = ("pooler.dense.weight", "pooler.dense.bias")
BLOCK_4 = vit_links.BlockNames(
    ("layernorm_before", "layernorm_after"),
    ("attention.attention.query", "attention.attention.key", "attention.attention.value", "attention.output.dense"),
    ("intermediate.dense", "output.dense"),
)
BLOCK_5 = vit_links.BlockNames(
    BLOCK_4.norms, tuple(f"attention.{name}_proj" for name in "qkvo"), ("mlp.fc1", "mlp.fc2")
)  # fmt: skip


def matches(tensors: Tensors, config: Json) -> bool:
    """Recognize the names of ViT and DeiT, with or without a classifier."""
    prefix = _prefix(tensors)
    return prefix is not None and any(f"{prefix}{layers}.0.layernorm_before.weight" in tensors
                                      for layers in ("encoder.layer", "layers"))  # fmt: skip


def describe(tensors: Tensors, config: Json) -> Description:
    """Describe the model; see `dcvit.weights.family.Family`."""
    if "cls_classifier.weight" in tensors:
        raise CheckpointError("DeiT with a second classifier for the distillation token, which dcvit's ViT lacks")
    kind = hf_config.check_type(config, "vit", "deit")
    hf_config.check_only(config, qkv_bias=True, pooler_act="tanh")
    prefix = _prefix(tensors)
    fields: Json = {
        **vit_links.read_sizes(config, norm_epsilon=1e-12),
        "mlp_dim": hf_config.size(config, "intermediate_size", 3072),
        "pool_type": "tok",
        "mlp": hf_config.activation(config, "hidden_act", "gelu"),
    }
    if f"{prefix}embeddings.{DISTILLATION}" in tensors:
        fields["registers"] = 1
    classes = vit_links.shape_of(tensors, "classifier.weight", "ViT")[0] if "classifier.weight" in tensors else None
    if classes is None and any(f"{prefix}{name}" in tensors for name in POOLER):  # a classifier takes the class token
        size = vit_links.shape_of(tensors, f"{prefix}{POOLER[0]}", "ViT")[0]
        fields["rep_size"] = True if size == fields["width"] else size
    image_size, before = vit_links.pair(config, "image_size", 224), 1 + fields.get("registers", 0)
    vit_links.check_positions(tensors, f"{prefix}embeddings.position_embeddings", fields, image_size, before)
    channels = vit_links.channels_of(config, tensors, f"{prefix}{PATCHES}")
    processor = "DeiT" if kind == "deit" else "ViT"
    return Description("vit", classes, fields, hf_processor.read(config, processor, image_size, channels))


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
            f"{prefix}{PATCHES}", in_front, f"{prefix}{layers}", block, f"{prefix}layernorm", "classifier"
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
        description, "Hugging Face's ViT", pool_type=("tok",), registers=(0, 1), layer_scale=(None,),
        mlp=("gelu", "gelu_tanh"), rep_size=(False, 0) if classes else (rep_size,),
    )  # fmt: skip
    if not classes and not rep_size:
        raise CheckpointError("Hugging Face's ViT cannot express features without pre_logits: ViTModel has a pooler")
    kind = "DeiT" if fields["registers"] else "ViT"
    found: Json = {
        "architectures": [f"{kind}ForImageClassification" if classes else f"{kind}Model"],
        "model_type": kind.lower(),
        **vit_links.write_sizes(description),
        "intermediate_size": fields["mlp_dim"],
        "hidden_act": hf_config.activation_name(fields["mlp"]),
        "qkv_bias": True,
    }
    if rep_size:
        found |= {"pooler_act": "tanh", "pooler_output_size": fields["width"] if rep_size is True else rep_size}
    return found | ({"num_labels": classes} if classes else {})


def _prefix(tensors: Tensors) -> str | None:
    """Return the prefix of the names, or None for another family."""
    return next((prefix for prefix in PREFIXES if f"{prefix}{PATCHES}.weight" in tensors), None)
