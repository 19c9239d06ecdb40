"""Families of Vision Transformers of Hugging Face transformers: ViT, DeiT, SigLIP, DINOv2 and DINOv3.

Each is a row: the names of tensors in each release, and the keys of config.json. `VisionModels` recognizes, describes,
reads and, for ViT and DeiT, writes all of them. https://huggingface.co/docs/transformers/model_doc/vit
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from dcvit.errors import CheckpointError
from dcvit.models.fields import QKV_BIASES
from dcvit.parallel.trees import Tensors
from dcvit.weights import hf_processor
from dcvit.weights.family import Description, Row, activation, check_only, defaults
from dcvit.weights.links import Link, Table, averaged, from_table, shape_of, tokens_in_front
from dcvit.weights.preprocessing import channels_of, size_of, square
from dcvit.weights.tensors import Json

BLOCK = "Transformer/encoderblock_{}"
ATTENTION = "MultiHeadDotProductAttention_0"
NORM = "Transformer/encoder_norm"
DEFAULTS = defaults("vit")
QKVO = [f"{BLOCK}/{ATTENTION}/{name}" for name in ("query", "key", "value", "out")]
POOL = "MAPHead_0"
POOL_QKV, POOL_OUT = [f"{POOL}/{ATTENTION}/{name}" for name in ("query", "key", "value")], f"{POOL}/{ATTENTION}/out"
NORMS = ("norm1", "norm2")
LAYER_SCALES = ("layer_scale1.lambda1", "layer_scale2.lambda1")
# Layers of attention by their names in transformers 4, and in 5.
ATTENTION_4 = (*(f"attention.attention.{name}" for name in ("query", "key", "value")), "attention.output.dense")
ATTENTION_5 = tuple(f"attention.{name}_proj" for name in "qkvo")


def settings(description: Description) -> Json:
    """Return the fields of a model that links and exports read, with defaults filled in and `mlp_dim` as a number."""
    fields = {**DEFAULTS, **description.fields}
    fields["mlp_dim"] = fields["mlp_dim"] or 4 * fields["width"]
    return fields


def layer(
    at: str, norms: Sequence[str], attention: Sequence[str], mlp: Sequence[str], scales: Sequence[str] = ()
) -> Table:
    """Return the table of a layer, see `dcvit.weights.links.from_table`, from names in the other library.

    Args:
      at: the name of a layer, with "{}" for its number.
      norms: the norms of attention and MLP.
      attention: query, key, value and output; or the fused projection of the first three, and the output.
      mlp: the first and the last layer; or the first, the gate of SwiGLU and the last. A first layer "NAME+" is fused
        with the gate.
      scales: tensors of LayerScale.
    """
    first, gate, last = (f"{BLOCK}/MlpBlock_0/{name}" for name in ("Dense_0", "gate", "Dense_1"))
    fused = mlp[0].endswith("+")
    entries: list[tuple[str, str | Sequence[str]]] = [
        *zip(norms, (f"{BLOCK}/LayerNorm_0", f"{BLOCK}/LayerNorm_1"), strict=True),
        *zip(attention, (QKVO[:3], QKVO[3]) if len(attention) == 2 else QKVO, strict=True),
        *zip(mlp, (first, gate, last) if len(mlp) == 3 else ((first, gate) if fused else first, last), strict=True),
        *zip(scales, (f"{BLOCK}/layer_scale_0", f"{BLOCK}/layer_scale_1"), strict=False),
    ]
    return {f"{at}.{theirs.removesuffix('+')}": ours for theirs, ours in entries}


def head_links(description: Description, heads: Sequence[str]) -> list[Link]:
    """Link the classifier, and for `pool_type="tok+reg"` a second one, that of the first register."""
    fields, outputs = settings(description), description.num_outputs
    if not heads or not outputs:
        return []
    if fields["pool_type"] == "tok+reg":
        return averaged(heads[:2], "head", fields["width"], outputs)
    return from_table({heads[0]: "head"}, description)


def check_expressible(description: Description, what: str, **values: tuple[object, ...]) -> None:
    """Raise CheckpointError if a field of a model has a value that a library does not support.

    Args:
      description: the model.
      what: the library.
      **values: by field, the tuple of supported values, instead of those in the code.
    """
    if description.model_name != "vit":
        raise CheckpointError(f"{what} is for model 'vit', found {description.model_name!r}")
    fields = settings(description)
    possible: dict[str, tuple[object, ...]] = {
        "compose": (None,), "qk_norm": (None,), "posemb": ("learn",), "qkv_bias": ("qkv",),
        "rep_size": (False, 0), "pre_norm": (False,), "pool_norm": (False,), **values,
    }  # fmt: skip
    for name, known in possible.items():
        if fields[name] not in known:
            shown = " or ".join(map(repr, known))
            raise CheckpointError(f"{what} cannot express {name}={fields[name]!r}, only {shown}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionModels(Row):
    """A family of Vision Transformers.

    Fields:
      processors: the class of the image processor by `model_type`; see `kind` of `dcvit.weights.hf_processor.read`.
      patches: the module that embeds patches.
      modules: names of the other modules outside of layers; see `dcvit.weights.links.from_table`.
      layers: names in a layer, by release and kind of MLP; the first are written.
      pools: `pool_type` by the name of the classifier that a file has; None is a file without one.
      tokens: names of the tokens before the patches: the class token, and the registers.
      positions, embedded: see `dcvit.weights.links.tokens_in_front`; "" is a model without position embeddings.
      class_of: function from a description to the class and the `model_type` that are written; None: files are read
        only.
    """

    processors: Mapping[str, str]
    patches: str
    modules: Table
    layers: Sequence[Table]
    pools: Mapping[str | None, str]
    tokens: Sequence[str] = ()
    positions: str = ""
    embedded: int = 0
    class_of: Callable[[Description], tuple[str, str]] | None = None

    def describe(self, tensors: Tensors, config: Json) -> Description:
        """Return the description of the model of a config.json."""
        prefix = self.prefix(tensors)
        config, fields = self.fields_of({**config, **config.get("vision_config", {}), **_type_of(config)})
        fields["patch_size"], image_size = (_pair(config[key]) for key in ("patch_size", "image_size"))
        head = next((name for name in self.pools if f"{name}.weight" in tensors), None)
        classes = shape_of(tensors, f"{head}.weight")[0] if head else None
        fields["pool_type"] = self.pools[head]
        if fields["pool_type"] == "map" and not any(name.startswith(f"{prefix}head.") for name in tensors):
            fields["pool_type"] = "none"
        more = [f"{prefix}{name}" for name in self.tokens[1:]]
        registers = sum(tensors[name].shape[1] for name in more if name in tensors)  # without any, the shape is 1 0 M
        fields |= {"registers": registers} if registers else {}
        pooler = f"{prefix}pooler.dense.weight"
        if "pooler.dense" in self.modules and not head and pooler in tensors:
            size = shape_of(tensors, pooler)[0]
            fields["rep_size"] = True if size == fields["width"] else size
        channels = shape_of(tensors, f"{prefix}{self.patches}.weight", 4)[1]
        pp = hf_processor.read(config, self.processors[config["model_type"]], image_size, channels)
        return Description("vit", classes, fields, pp)

    def links(self, description: Description, tensors: Tensors | None = None) -> list[Link]:
        """Return the links of a model; `tensors` are those of a file, or None for writing."""
        fields, there = settings(description), tensors or {}
        if tensors is not None:
            prefix = self.prefix(tensors) or ""
        else:
            prefix = f"{self._class_of(description)[1]}." if description.num_outputs else ""
        block = max(self.layers, key=lambda x: sum(f"{prefix}{name.format(0)}.weight" in there for name in x))
        table = {self.patches: "embedding", **self.modules, **block}
        found = []
        if self.positions:
            counts = zip(self.tokens, (1, fields["registers"]), strict=False)
            before = {f"{prefix}{name}": count for name, count in counts if count}
            embedded = min(self.embedded, sum(before.values()))
            found.append(tokens_in_front(f"{prefix}{self.positions}", before, embedded, description))
        found += from_table({f"{prefix}{name}": ours for name, ours in table.items()}, description)
        heads = [head for head, pool in self.pools.items() if head and pool == fields["pool_type"]]
        return found + head_links(description, [*heads, "distillation_classifier"] if heads else [])

    def config(self, description: Description) -> Json:
        """Return the content of config.json. Raises CheckpointError if no key can express a field's value."""
        name, kind = self._class_of(description)
        images = {"image_size": square(size_of(description.pp)), "num_channels": channels_of(description.pp)}
        labels = {"num_labels": description.num_outputs} if description.num_outputs else {}
        return {"architectures": [name], **self.keys_of(settings(description), kind), **images, **labels}

    def _class_of(self, description: Description) -> tuple[str, str]:
        if self.class_of is None:
            raise CheckpointError(f"files of {next(iter(self.processors))} are read, but not written")
        return self.class_of(description)


def _type_of(config: Json) -> Json:
    """Return the `model_type` of a model of images and texts, which its part for images repeats in other words."""
    return {"model_type": config["model_type"]} if "model_type" in config else {}


def _pair(value: int | list[int]) -> tuple[int, int]:
    """Return a height and width from a config.json, in which one number may stand for both."""
    height, width = value if isinstance(value, list) else (value, value)
    return height, width


KEYS = {"hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "num_heads",
        "layer_norm_eps": "norm_epsilon"}  # fmt: skip
MLP_KEYS = {**KEYS, "intermediate_size": "mlp_dim", "hidden_act": "mlp"}
BASE: Json = {  # defaults of transformers that most families share
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "layer_norm_eps": 1e-6,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu", "intermediate_size": 3072, "qkv_bias": True,
}  # fmt: skip
VIT_DEFAULTS, SIGLIP_DEFAULTS = {**BASE, "layer_norm_eps": 1e-12}, {**BASE, "hidden_act": "gelu_pytorch_tanh"}


def _class_of_vit(description: Description) -> tuple[str, str]:
    """Return the class and the model type of ViT, or of DeiT, whose distillation token is a register here."""
    fields, classes = settings(description), description.num_outputs
    rep_size = fields["rep_size"]
    check_expressible(
        description, "Hugging Face's ViT", pool_type=("tok", *["tok+reg"] * bool(classes)), registers=(0, 1),
        layer_scale=(None,), mlp=("gelu", "gelu_tanh"), rep_size=(False, 0) if classes else (rep_size,),
        qkv_bias=("qkv", ""),
    )  # fmt: skip
    if not classes and not rep_size:
        raise CheckpointError("Hugging Face's ViT cannot express features without pre_logits: ViTModel has a pooler")
    kind = "DeiT" if fields["registers"] else "ViT"
    head = "ForImageClassification" + "WithTeacher" * (fields["pool_type"] == "tok+reg")
    return f"{kind}{head if classes else 'Model'}", kind.lower()


def _qkv_bias(config: Json, _: Json) -> Json:
    return {"qkv_bias": "qkv" if config["qkv_bias"] else ""}


def _write_vit(fields: Json, _: str) -> Json:
    """Return further keys; the pooler is a layer before the head, `pre_logits` here."""
    found = {"qkv_bias": fields["qkv_bias"] == "qkv", "patch_size": square(fields["patch_size"])}
    size = fields["width"] if fields["rep_size"] is True else fields["rep_size"]
    return {**found, "pooler_output_size": size} if size else found


VIT = VisionModels(  # and DeiT; if a file has a classifier for the distillation token, pool_type is "tok+reg"
    processors={"vit": "ViT", "deit": "DeiT"},
    prefixes=("vit.", "deit.", ""),
    patches="embeddings.patch_embeddings.projection",
    marks=["encoder.layer.0.layernorm_before.weight", "layers.0.layernorm_before.weight"],
    tokens=("embeddings.cls_token", "embeddings.distillation_token"),
    positions="embeddings.position_embeddings",
    embedded=2,
    modules={"layernorm": NORM, "pooler.dense": "pre_logits"},
    layers=[
        layer("encoder.layer.{}", ("layernorm_before", "layernorm_after"), ATTENTION_4,
              ("intermediate.dense", "output.dense")),
        # Release 5 also writes the names of release 4.
        layer("layers.{}", ("layernorm_before", "layernorm_after"), ATTENTION_5, ("mlp.fc1", "mlp.fc2")),
    ],
    pools={"classifier": "tok", "cls_classifier": "tok+reg", None: "tok"},
    # The token of masked patches, which pretraining uses, and a pooler beside a classifier.
    unused=re.compile(r".*(embeddings\.mask_token|pooler\.dense\.(weight|bias))"),
    defaults={"vit": VIT_DEFAULTS, "deit": VIT_DEFAULTS},
    keys=MLP_KEYS,
    fixed={"pooler_act": "tanh"},
    read=_qkv_bias,
    write=_write_vit,
    class_of=_class_of_vit,
)  # fmt: skip

SIGLIP = VisionModels(  # its vision tower; the patch embedding of CLIP's has no bias
    processors={"siglip_vision_model": "Siglip", "siglip": "Siglip"},
    prefixes=("vision_model.", ""),
    patches="embeddings.patch_embedding",
    marks=["embeddings.patch_embedding.bias"],
    positions="embeddings.position_embedding.weight",
    modules={
        "post_layernorm": NORM,
        "head.probe": f"{POOL}/probe",
        "head.attention.in_proj_": POOL_QKV,
        "head.attention.out_proj": POOL_OUT,
        "head.layernorm": f"{POOL}/LayerNorm_0",
        "head.mlp.fc1": f"{POOL}/MlpBlock_0/Dense_0",
        "head.mlp.fc2": f"{POOL}/MlpBlock_0/Dense_1",
    },
    layers=[
        layer(
            "encoder.layers.{}",
            ("layer_norm1", "layer_norm2"),
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
            ("mlp.fc1", "mlp.fc2"),
        )
    ],
    # The classifier takes the mean of the patches, and leaves the pooling head unused.
    pools={"classifier": "gap", None: "map"},
    # The text tower, the loss, buffers, and the pooling head beside a classifier.
    unused=re.compile(
        r"text_model\..*|logit_.*|.*position_ids|(vision_model\.)?head\.(probe|(attention|layernorm|mlp)\..*)"
    ),
    defaults={"siglip_vision_model": SIGLIP_DEFAULTS, "siglip": SIGLIP_DEFAULTS},
    keys=MLP_KEYS,
)


def _read_dinov2(config: Json, found: Json) -> Json:
    """Return MLP and biases. SwiGLU changes what `mlp_ratio` and `hidden_act` mean."""
    hidden = found["width"] * config["mlp_ratio"]
    fields = _qkv_bias(config, found)
    if config["use_swiglu_ffn"]:
        return {**fields, "mlp_dim": (int(hidden * 2 / 3) + 7) // 8 * 8, "mlp": "swiglu"}
    return {**fields, "mlp_dim": hidden, "mlp": activation(config, "hidden_act")}


DINOV2_DEFAULTS = {**BASE, "mlp_ratio": 4, "use_swiglu_ffn": False, "layerscale_value": 1.0}
DINOV2 = VisionModels(  # the classifier takes class token and mean of the patches
    processors={"dinov2": "Bit", "dinov2_with_registers": "Bit"},
    prefixes=("dinov2_with_registers.", "dinov2.", ""),
    patches="embeddings.patch_embeddings.projection",
    marks=["encoder.layer.0.layer_scale1.lambda1"],
    tokens=("embeddings.cls_token", "embeddings.register_tokens"),
    positions="embeddings.position_embeddings",
    embedded=1,
    modules={"layernorm": NORM},
    layers=[
        layer("encoder.layer.{}", NORMS, attention, mlp, LAYER_SCALES)
        for attention, mlp in (
            (ATTENTION_4, ("mlp.fc1", "mlp.fc2")),
            (ATTENTION_5, ("mlp.fc1", "mlp.fc2")),
            (ATTENTION_4, ("mlp.weights_in+", "mlp.weights_out")),
            (ATTENTION_5, ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
        )
    ],
    pools={"classifier": "tok+gap", None: "tok"},
    unused=re.compile(r".*mask_token"),  # of masked patches, which pretraining uses
    defaults={"dinov2": {**DINOV2_DEFAULTS, "patch_size": 14}, "dinov2_with_registers": DINOV2_DEFAULTS},
    keys={**KEYS, "layerscale_value": "layer_scale"},
    read=_read_dinov2,
)


def _read_dinov3(config: Json, _: Json) -> Json:
    biases = "".join(name[0] for name in ("query", "key", "value") if config[f"{name}_bias"])
    if biases not in QKV_BIASES:
        raise CheckpointError(f"config.json: biases of {' and '.join(biases)} alone are not supported")
    if config["use_gated_mlp"]:
        check_only(config, hidden_act="silu")
    return {"qkv_bias": biases, "mlp": "swiglu" if config["use_gated_mlp"] else activation(config, "hidden_act")}


DINOV3 = VisionModels(
    processors={"dinov3_vit": "DINOv3ViT"},
    patches="embeddings.patch_embeddings",
    marks=["layer.0.layer_scale1.lambda1", "model.layer.0.layer_scale1.lambda1"],
    tokens=("embeddings.cls_token", "embeddings.register_tokens"),
    modules={"embeddings.cls_token": "cls", "embeddings.register_tokens": "registers", "norm": NORM},
    layers=[
        layer(at, NORMS, ATTENTION_5, mlp, LAYER_SCALES)
        for at in ("layer.{}", "model.layer.{}")  # in a file of `save_pretrained`, and of `state_dict`
        for mlp in (("mlp.up_proj", "mlp.down_proj"), ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
    ],
    pools={None: "tok"},
    constants={"posemb": "rotary2d"},
    # The token of masked patches, which pretraining uses, and the registers of a model that has none.
    unused=re.compile(r"embeddings\.(mask_token|register_tokens)"),
    defaults={
        "dinov3_vit": {
            **BASE, "layer_norm_eps": 1e-5, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536,
            "layerscale_value": 1.0, "use_gated_mlp": False, "query_bias": True, "key_bias": False, "value_bias": True,
        }
    },
    keys={**KEYS, "intermediate_size": "mlp_dim", "layerscale_value": "layer_scale"},
    # Keys of training, such as dropout and the augmentation of positions, are not read.
    fixed={"proj_bias": True, "mlp_bias": True, "rope_theta": 100.0},  # the base as in `dcvit.models.vit`
    read=_read_dinov3,
)  # fmt: skip

ROWS = {"hf_vit": VIT, "siglip": SIGLIP, "dinov2": DINOV2, "dinov3": DINOV3}
