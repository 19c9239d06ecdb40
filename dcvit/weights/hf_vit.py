"""ViT and DeiT of Hugging Face transformers, with the tensor names of version 4 (which version 5 also writes) and of 5.

https://huggingface.co/docs/transformers/model_doc/vit. DeiT's distillation token is a register here. If the file has a
classifier for it, its output counts as `pool_type="tok+reg"` says.
"""

from __future__ import annotations

import re

from dcvit.errors import CheckpointError
from dcvit.weights import config_table, hf_config, hf_vision, vit_links
from dcvit.weights.config_table import ABSENT, Key, field, only, written
from dcvit.weights.family import Description
from dcvit.weights.hf_vision import sizes
from dcvit.weights.links import Link
from dcvit.weights.tensors import Json, Tensors

PREFIXES = ("vit.", "deit.", "")
PATCHES, CLS, DISTILLATION = "embeddings.patch_embeddings.projection", "embeddings.cls_token", "distillation_token"
HEADS = ("classifier", "cls_classifier")  # alone, and beside that of the distillation token
NORMS = ("layernorm_before", "layernorm_after")
BLOCK_4 = vit_links.block("encoder.layer.{}", NORMS, hf_vision.ATTENTION_4, ("intermediate.dense", "output.dense"))
BLOCK_5 = vit_links.block("layers.{}", NORMS, hf_vision.ATTENTION_5, ("mlp.fc1", "mlp.fc2"))
MODULES = {PATCHES: "embedding", "layernorm": "Transformer/encoder_norm", "pooler.dense": "pre_logits"}
# The token of masked patches, which pretraining uses, and a pooler beside a classifier.
UNUSED = re.compile(r".*(embeddings\.mask_token|pooler\.dense\.(weight|bias))")


def _written_pooler(fields: Json) -> object:
    """Return the width of the pooler, a layer before the head (`pre_logits` here), or `ABSENT` without it."""
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
    """Return True if the tensors have the names of ViT or DeiT, with or without a classifier."""
    prefix = vit_links.prefix_of(tensors, PREFIXES, f"{PATCHES}.weight")
    return prefix is not None and any(f"{prefix}{layers}.0.layernorm_before.weight" in tensors
                                      for layers in ("encoder.layer", "layers"))  # fmt: skip


def describe(tensors: Tensors, config: Json) -> Description:
    kind = hf_config.check_type(config, "vit", "deit")
    prefix = vit_links.prefix_of(tensors, PREFIXES, f"{PATCHES}.weight")
    fields = config_table.read(KEYS, config)
    head = next((name for name in HEADS if f"{name}.weight" in tensors), None)
    fields["pool_type"] = "tok+reg" if head == HEADS[1] else "tok"
    if f"{prefix}embeddings.{DISTILLATION}" in tensors or head == HEADS[1]:
        fields["registers"] = 1
    classes = vit_links.classes_of(tensors, f"{head}.weight", "ViT")
    if classes is None and (size := vit_links.classes_of(tensors, f"{prefix}pooler.dense.weight", "ViT")):
        fields["rep_size"] = True if size == fields["width"] else size
    processor = "DeiT" if kind == "deit" else "ViT"
    return hf_vision.described(fields, classes, config, tensors, f"{prefix}{PATCHES}", processor)


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    fields = vit_links.settings(description)
    tokens: list[tuple[str, int]] = [(CLS, 1)]
    if fields["registers"]:
        tokens.append((f"embeddings.{DISTILLATION}", 1))
    prefix: str | None = ("deit." if fields["registers"] else "vit.") if description.num_outputs else ""
    newer = False
    if tensors is not None:
        prefix = vit_links.prefix_of(tensors, PREFIXES, f"{PATCHES}.weight")
        newer = any(".attention.q_proj." in name for name in tensors)
    table = {f"{prefix}{theirs}": ours for theirs, ours in {**MODULES, **(BLOCK_5 if newer else BLOCK_4)}.items()}
    in_front = vit_links.TokenNames(
        f"{prefix}embeddings.position_embeddings", tuple((f"{prefix}{name}", n) for name, n in tokens), len(tokens)
    )
    heads = (HEADS[fields["pool_type"] == "tok+reg"], "distillation_classifier")
    return vit_links.model_links(description, table, in_front, heads)


def config(description: Description) -> Json:
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
