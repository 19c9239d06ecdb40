"""Family of the folders that `dcvit convert --to hf` writes for models with DCMHA, with the code `modeling_dcvit.py`.

Its modules have the structure of the models of this project, so that any of them can be expressed.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcvit.errors import CheckpointError
from dcvit.parallel.trees import Tensors
from dcvit.weights.family import Description, defaults
from dcvit.weights.links import Link, Table, from_table, shape_of
from dcvit.weights.lm_families import BLOCK as LAYER
from dcvit.weights.tensors import Json
from dcvit.weights.vit_families import ATTENTION, BLOCK

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
    },
}  # fmt: skip
# The fields that the modeling file reads, with the defaults of `dcvit.models`.
FIELDS = {
    name: {key: value for key, value in defaults(name).items() if key != "compose_window"} for name in ("vit", "lm")
}

POOL = "MAPHead_0"
TABLES: dict[str, Table] = {
    "vit": {
        "patches": "embedding", "position": "pos_embedding", "cls": "cls", "registers": "registers",
        "pre_norm": "pre_norm",
        "layers.{}.attention_norm": f"{BLOCK}/LayerNorm_0", "layers.{}.mlp_norm": f"{BLOCK}/LayerNorm_1",
        "layers.{}.layer_scale_0": f"{BLOCK}/layer_scale_0", "layers.{}.layer_scale_1": f"{BLOCK}/layer_scale_1",
        "layers.{}.attention": f"{BLOCK}/{ATTENTION}",
        "layers.{}.mlp.fc_in": f"{BLOCK}/MlpBlock_0/Dense_0", "layers.{}.mlp.fc_out": f"{BLOCK}/MlpBlock_0/Dense_1",
        "layers.{}.mlp.fc_gate": f"{BLOCK}/MlpBlock_0/gate",
        "pool.probe": f"{POOL}/probe", "pool.attention": f"{POOL}/{ATTENTION}", "pool.norm": f"{POOL}/LayerNorm_0",
        "pool.mlp.fc_in": f"{POOL}/MlpBlock_0/Dense_0", "pool.mlp.fc_out": f"{POOL}/MlpBlock_0/Dense_1",
        "pool.mlp.fc_gate": f"{POOL}/MlpBlock_0/gate",
        "pre_logits": "pre_logits", "head": "head",
    },
    "lm": {
        "embed": "embedding", "position": "pos_embedding",
        "layers.{}.attention_norm": f"{LAYER}/attention_norm", "layers.{}.mlp_norm": f"{LAYER}/mlp_norm",
        "layers.{}.attention": f"{LAYER}/{ATTENTION}",
        "layers.{}.mlp.fc_in": f"{LAYER}/MlpBlock_0/in", "layers.{}.mlp.fc_out": f"{LAYER}/MlpBlock_0/out",
        "layers.{}.mlp.fc_gate": f"{LAYER}/MlpBlock_0/gate",
        "layers.{}.mlp.group_gate": f"{LAYER}/MlpBlock_0/group_gate",
        "norm": "Transformer/decoder_norm", "lm_head": "head",
    },
}  # fmt: skip


def matches(tensors: Tensors, config: Json) -> bool:
    """Return True if config.json has a `model_type` of the modeling file."""
    return config.get("model_type") in (*CLASSES,)  # a tuple, because the value may be a list


def describe(tensors: Tensors, config: Json) -> Description:
    name = "vit" if config["model_type"] == IMAGE else "lm"
    known = {**config, "tied": config.get("tie_word_embeddings", False)}
    fields = {key: known[key] for key, value in FIELDS[name].items() if key in known and known[key] != value}
    if name == "lm":
        return Description(name, config["vocab_size"], fields)
    labels = config.get("id2label") or {}
    # The file decides: transformers writes no `id2label` for two classes without names.
    classes = shape_of(tensors, "head.weight")[0] if "head.weight" in tensors else len(labels) or None
    return Description(name, classes, fields, config.get("pp", ""))


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
        labels = [f"LABEL_{i}" for i in range(description.num_outputs or 0)]
        return {**found, **id2label(labels), "pp": description.pp}
    return {**found, "vocab_size": description.num_outputs, "tie_word_embeddings": found.pop("tied")}


def id2label(names: Sequence[str]) -> Json:
    """Return the entries `id2label` and `label2id`, which hold class names in a config.json of transformers."""
    numbers = {name: i for i, name in enumerate(names)}
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": numbers}


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    table = TABLES[description.model_name]
    if description.model_name == "vit":
        last = "pool_norm" if description.fields.get("pool_norm") else "Transformer/encoder_norm"
        table = {**table, "norm": last}
    return from_table(table, description)
