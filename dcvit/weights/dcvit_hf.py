"""Family of the folders that `dcvit convert --to hf` writes for models with DCMHA: those of `modeling_dcvit.py`.

Its modules have the structure of the models of this project, so that any of them can be expressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights import field_checks, hf_config, hf_vision, vit_links
from dcvit.weights.family import Description, defaults
from dcvit.weights.links import Link, linear, same
from dcvit.weights.tensors import Json, Tensors

MODULE = "modeling_dcvit"
IMAGE, TEXT = "dcvit", "dcformer"  # model types in config.json
AUTO = {IMAGE: "AutoModelForImageClassification", TEXT: "AutoModelForCausalLM"}  # with the head of the run
CLASSES = {  # of the modeling file, for transformers' automatic classes
    IMAGE: {
        "AutoConfig": "DCViTConfig", "AutoModel": "DCViTModel",
        "AutoModelForImageClassification": "DCViTForImageClassification",
    },
    TEXT: {
        "AutoConfig": "DCFormerConfig", "AutoModel": "DCFormerModel", "AutoModelForCausalLM": "DCFormerForCausalLM",
        "AutoModelForSequenceClassification": "DCFormerForSequenceClassification",
    },
}  # fmt: skip
SHARED = (
    "width", "depth", "num_heads", "num_key_heads", "mlp_dim", "compose", "branches", "projection", "gate", "static",
    "rank", "groups", "compose_gelu", "qk_norm", "qk_norm_epsilon",
)  # fmt: skip
# The fields that the modeling file reads, in the order of its config.json, with the defaults of `dcvit.models`.
FIELDS: dict[str, Json] = {
    "vit": defaults("vit", (
        *SHARED, "patch_size", "posemb", "pool_type", "registers", "rep_size", "mlp", "norm_epsilon", "layer_scale",
        "qkv_bias", "pre_norm", "pool_norm",
    )),
    "lm": defaults("lm", (
        *SHARED, "context", "position", "rotary_fraction", "rotary_base", "rotary_scaling", "norm", "norm_epsilon",
        "mlp", "mlp_groups", "use_bias", "qkv_bias", "parallel", "tied", "window_pattern", "window", "prefill_window",
        "end_of_text",
    )),
}  # fmt: skip


def matches(tensors: Tensors, config: Json) -> bool:
    """Return True for a folder of the modeling file."""
    return config.get("model_type") in (*CLASSES,)  # a tuple, because the value may be a list


def describe(tensors: Tensors, config: Json) -> Description:
    """Return the model."""
    name = "vit" if config["model_type"] == IMAGE else "lm"
    known = {**config, "tied": config.get("tie_word_embeddings", False)}
    fields = {key: known[key] for key, value in FIELDS[name].items() if key in known and known[key] != value}
    pp = hf_config.text(config, "pp", "")
    if name == "lm":
        return field_checks.check(Description(name, hf_config.size(config, "vocab_size"), fields, pp))
    labels = config.get("id2label") or {}
    if not isinstance(labels, dict):
        raise CheckpointError(f"config.json: id2label={labels!r:.100}; expected an object")
    hf_vision.pair(config, "image_size", 224)  # transformers needs it; the parameters show the same
    classes = len(labels) or None
    if "head.weight" in tensors:  # transformers writes no `id2label` for two classes without names
        classes = vit_links.shape_of(tensors, "head.weight", "the file")[0]
    return field_checks.check(Description(name, classes, fields, pp))


def config(description: Description) -> Json:
    """Return the content of config.json, without the size of images.

    Raises:
      CheckpointError: the modeling file does not have a field.
    """
    known = FIELDS[description.model_name]
    if unknown := [f"{key}={value!r}" for key, value in description.fields.items() if key not in known]:
        raise CheckpointError(f"{MODULE}.py cannot express {', '.join(unknown)}")
    kind = IMAGE if description.model_name == "vit" else TEXT
    found: Json = {
        "model_type": kind, "architectures": [CLASSES[kind][AUTO[kind]]], "dtype": "float32",
        "auto_map": {name: f"{MODULE}.{class_name}" for name, class_name in CLASSES[kind].items()},
        **known, **description.fields,
    }  # fmt: skip
    if kind == IMAGE:
        names = {str(i): f"LABEL_{i}" for i in range(description.num_outputs or 0)}
        return {**found, "id2label": names, "label2id": {v: int(k) for k, v in names.items()}, "pp": description.pp}
    return {**found, "vocab_size": description.num_outputs, "tie_word_embeddings": found.pop("tied")}


def unused(name: str) -> bool:
    """Return False: the modeling file stores no tensor but parameters."""
    return False


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    """Return the links of a model."""
    fields = {**FIELDS[description.model_name], **description.fields}
    return (_image_links if description.model_name == "vit" else _text_links)(fields, description.num_outputs)


def _text_links(fields: Mapping[str, Any], outputs: int | None) -> list[Link]:
    found = [same("embed.weight", "embedding/embedding")]
    if fields["position"] == "learned":
        found.append(same("position", "pos_embedding"))
    norm_bias = fields["norm"] == "layernorm"
    names = {"fc_in": "in", "fc_out": "out", "fc_gate": "gate", "group_gate": "group_gate"}
    for i in range(fields["depth"]):
        theirs, ours = f"layers.{i}", f"Transformer/decoderblock_{i}"
        for name in ("attention_norm", "mlp_norm"):
            found += _norm(f"{theirs}.{name}", f"{ours}/{name}", norm_bias)
        at = f"{ours}/MultiHeadDotProductAttention_0"
        found += _attention(f"{theirs}.attention", at, fields, bias=fields["use_bias"])
        found += _mlp(f"{theirs}.mlp", f"{ours}/MlpBlock_0", names, fields, bias=fields["use_bias"])
    found += _norm("norm", "Transformer/decoder_norm", norm_bias)
    return found + ([] if fields["tied"] else [linear("lm_head.weight", "head/kernel")])


def _image_links(fields: Mapping[str, Any], outputs: int | None) -> list[Link]:
    found = [
        Link(("patches.weight",), ("embedding/kernel",), _from_convolution, _to_convolution),
        *(_norm("pre_norm", "pre_norm", True) if fields["pre_norm"] else [same("patches.bias", "embedding/bias")]),
    ]
    if fields["posemb"] == "learn":
        found.append(same("position", "pos_embedding"))
    if fields["pool_type"].startswith("tok"):
        found.append(same("cls", "cls"))
    if fields["registers"]:
        found.append(same("registers", "registers"))
    names = {"fc_in": "Dense_0", "fc_out": "Dense_1", "fc_gate": "gate"}
    for i in range(fields["depth"]):
        theirs, ours = f"layers.{i}", f"Transformer/encoderblock_{i}"
        found += _norm(f"{theirs}.attention_norm", f"{ours}/LayerNorm_0", True)
        found += _norm(f"{theirs}.mlp_norm", f"{ours}/LayerNorm_1", True)
        if fields["layer_scale"] is not None:
            found += [same(f"{theirs}.layer_scale_{j}", f"{ours}/layer_scale_{j}") for j in range(2)]
        found += _attention(f"{theirs}.attention", f"{ours}/MultiHeadDotProductAttention_0", fields, bias=True)
        found += _mlp(f"{theirs}.mlp", f"{ours}/MlpBlock_0", names, fields, bias=True)
    found += _norm("norm", "pool_norm" if fields["pool_norm"] else "Transformer/encoder_norm", True)
    if fields["pool_type"] == "map":
        plain = {**fields, "compose": None, "qk_norm": None, "num_key_heads": None, "qkv_bias": "qkv"}
        found.append(same("pool.probe", "MAPHead_0/probe"))
        found += _attention("pool.attention", "MAPHead_0/MultiHeadDotProductAttention_0", plain, bias=True)
        found += _norm("pool.norm", "MAPHead_0/LayerNorm_0", True)
        found += _mlp("pool.mlp", "MAPHead_0/MlpBlock_0", names, fields, bias=True)
    heads = [name for name, present in (("pre_logits", fields["rep_size"]), ("head", outputs)) if present]
    for name in heads:
        found += [linear(f"{name}.weight", f"{name}/kernel"), same(f"{name}.bias", f"{name}/bias")]
    return found


def _from_convolution(x: np.ndarray) -> Sequence[np.ndarray]:
    return (x.transpose(2, 3, 1, 0),)


def _to_convolution(x: np.ndarray) -> Sequence[np.ndarray]:
    return (x.transpose(3, 2, 0, 1),)


def _norm(theirs: str, ours: str, bias: bool) -> list[Link]:
    found = [same(f"{theirs}.weight", f"{ours}/scale")]
    return found + ([same(f"{theirs}.bias", f"{ours}/bias")] if bias else [])


def _attention(theirs: str, ours: str, fields: Mapping[str, Any], *, bias: bool) -> list[Link]:
    width, heads = fields["width"], fields["num_heads"]
    head_dim = width // heads
    biases = "qkv" * bias if fields["qkv_bias"] is None else fields["qkv_bias"]
    found = []
    for name in ("query", "key", "value"):
        own = heads if name == "query" else fields.get("num_key_heads") or heads
        found.append(linear(f"{theirs}.{name}.weight", f"{ours}/{name}/kernel", (width,), (own, head_dim)))
        if name[0] in biases:
            found.append(same(f"{theirs}.{name}.bias", f"{ours}/{name}/bias", (own, head_dim), (own * head_dim,)))
    found.append(linear(f"{theirs}.out.weight", f"{ours}/out/kernel", (heads, head_dim), (width,)))
    if bias:
        found.append(same(f"{theirs}.out.bias", f"{ours}/out/bias"))
    if fields["qk_norm"]:
        found += [same(f"{theirs}.{name}.weight", f"{ours}/{name}/scale") for name in ("query_norm", "key_norm")]
    kinds = "12" * fields["projection"] + "g" * fields["gate"]
    names = [f"w_{side}{kind}" for side in fields["branches"] for kind in kinds] + ["w_b"] * fields["static"]
    for where in ("pre", "post"):
        if fields["compose"] in (where, "both"):
            found += [same(f"{theirs}.{where}.{name}", f"{ours}/{where}/{name}") for name in names]
    return found


def _mlp(theirs: str, ours: str, names: Mapping[str, str], fields: Mapping[str, Any], *, bias: bool) -> list[Link]:
    """Return the links of an MLP; `names` maps the layers of the modeling file to those of this project."""
    present = ["fc_in", "fc_out"] + (["fc_gate"] if fields["mlp"] == "swiglu" else [])
    found = [linear(f"{theirs}.{name}.weight", f"{ours}/{names[name]}/kernel") for name in present]
    if bias:
        found += [same(f"{theirs}.{name}.bias", f"{ours}/{names[name]}/bias") for name in present]
    if fields.get("mlp_groups"):
        found.append(linear(f"{theirs}.group_gate.weight", f"{ours}/{names['group_gate']}/kernel"))
    return found
