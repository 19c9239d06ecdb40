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
from dcvit.weights import hf_config as hf
from dcvit.weights import hf_processor
from dcvit.weights.family import Description
from dcvit.weights.hf_config import ABSENT, Key, field, only, written
from dcvit.weights.links import Link, Table, depth_of, shape_of
from dcvit.weights.preprocessing import IMAGENET_MEAN, IMAGENET_STD, channels_of, resized, size_of, square
from dcvit.weights.tensors import PROCESSOR, Json, Tensors
from dcvit.weights.vit_links import (
    MAP_OUT,
    MAP_QKV,
    NORM,
    Tokens,
    check_expressible,
    layer,
    model_links,
    settings,
)

# Layers of attention by their names in transformers 4, and in 5.
ATTENTION_4 = (*(f"attention.attention.{name}" for name in ("query", "key", "value")), "attention.output.dense")
ATTENTION_5 = tuple(f"attention.{name}_proj" for name in "qkvo")
NORMS = ("norm1", "norm2")


@dataclasses.dataclass(frozen=True)
class VisionModels:
    """A family of Vision Transformers.

    Fields:
      processors: the class of the image processor by `model_type`; see `kind` of `dcvit.weights.hf_processor.read`.
      patches: the module that embeds patches.
      marks: tensors of which all files of the family have one, and those of other families have none.
      modules: names of the other modules outside of layers; see `dcvit.weights.links.from_table`.
      layers: names in a layer, by release and kind of MLP; the first are written.
      keys: function from the `model_type` to its keys, in the order in which they are written.
      pools: `pool_type` by the name of the classifier that a file has; None is a file without one.
      constants: fields that are the same for all models.
      prefixes: beginnings of the names, for models alone and inside of others.
      tokens: names of the tokens before the patches: the class token, and the registers.
      positions, embedded, batched: see `dcvit.weights.vit_links.Tokens`; "" is a model without position embeddings.
      assumed: function from the tensors to the content of config.json, for files that have none.
      class_of: function from a description to the class and the `model_type` that are written; None: files are read
        only.
      unused: matches the names of tensors that are not parameters of the model.
    """

    processors: Mapping[str, str]
    patches: str
    marks: Sequence[str]
    modules: Table
    layers: Sequence[Table]
    keys: Callable[[str], Sequence[Key]]
    pools: Mapping[str | None, str]
    constants: Json = dataclasses.field(default_factory=dict)
    prefixes: Sequence[str] = ("",)
    tokens: Sequence[str] = ()
    positions: str = ""
    embedded: int = 0
    batched: bool = True
    assumed: Callable[[Tensors], Json] | None = None
    class_of: Callable[[Description], tuple[str, str]] | None = None
    unused: re.Pattern[str] | None = None

    def _prefix(self, tensors: Tensors) -> str | None:
        return next((prefix for prefix in self.prefixes if f"{prefix}{self.patches}.weight" in tensors), None)

    def matches(self, tensors: Tensors, config: Json) -> bool:
        """Return True if the tensors have the family's names."""
        prefix = self._prefix(tensors)
        return prefix is not None and any(f"{prefix}{mark}" in tensors for mark in self.marks)

    def describe(self, tensors: Tensors, config: Json) -> Description:
        """Return the description of the model of a config.json."""
        config, prefix = self.assumed(tensors) if self.assumed else config, self._prefix(tensors)
        kind = hf.check_type(config, *self.processors)
        vision = config.get("vision_config", {})  # of a model of images and texts
        if not isinstance(vision, dict):
            raise CheckpointError(f"config.json: vision_config={vision!r}; expected an object")
        config = {**config, **vision}
        fields = {**hf.read(self.keys(kind), config), **self.constants}
        image_size = fields.pop("image_size")
        head = next((name for name in self.pools if f"{name}.weight" in tensors), None)
        classes = shape_of(tensors, f"{head}.weight")[0] if head else None
        fields["pool_type"] = self.pools[head]
        if fields["pool_type"] == "map" and not any(name.startswith(f"{prefix}head.") for name in tensors):
            fields["pool_type"] = "none"
        shapes = [tensors[f"{prefix}{name}"].shape for name in self.tokens[1:] if f"{prefix}{name}" in tensors]
        registers = sum(shape[1] for shape in shapes if len(shape) == 3)
        hf.check_only(config, num_register_tokens=registers)
        fields |= {"registers": registers} if registers else {}
        pooler = f"{prefix}pooler.dense.weight"
        if "pooler.dense" in self.modules and not head and pooler in tensors:
            size = shape_of(tensors, pooler)[0]
            fields["rep_size"] = True if size == fields["width"] else size
        channels, found = hf.size(config, "num_channels", 3), shape_of(tensors, f"{prefix}{self.patches}.weight", 4)[1]
        if channels != found:
            raise CheckpointError(f"config.json: num_channels={channels}, but {self.patches} has {found} channels")
        pp = hf_processor.read(config, self.processors[kind], image_size, channels)
        return Description("vit", classes, fields, pp)

    def links(self, description: Description, tensors: Tensors | None = None) -> list[Link]:
        """Return the links of a model; `tensors` are those of a file, or None for writing."""
        fields, there = settings(description), tensors or {}
        if tensors is not None:
            prefix = self._prefix(tensors) or ""
        else:
            prefix = f"{self._class_of(description)[1]}." if description.num_outputs else ""
        block = max(self.layers, key=lambda x: sum(f"{prefix}{name.format(0)}.weight" in there for name in x))
        table = {self.patches: "embedding", **self.modules, **block}
        tokens = None
        if self.positions:
            counts = zip(self.tokens, (1, fields["registers"]), strict=False)
            before = tuple((f"{prefix}{name}", count) for name, count in counts if count)
            embedded = min(self.embedded, sum(count for _, count in before))
            tokens = Tokens(f"{prefix}{self.positions}", before, embedded, self.batched)
        heads = [head for head, pool in self.pools.items() if head and pool == fields["pool_type"]]
        heads += ["distillation_classifier"] if fields["pool_type"] == "tok+reg" else []
        return model_links(description, {f"{prefix}{name}": ours for name, ours in table.items()}, tokens, heads)

    def config(self, description: Description) -> Json:
        """Return the content of config.json. Raises CheckpointError if no key can express a field's value."""
        name, kind = self._class_of(description)
        about = {
            "image_size": size_of(description.pp), "channels": channels_of(description.pp),
            "num_outputs": description.num_outputs,
        }  # fmt: skip
        entries = hf.write(self.keys(kind), {**settings(description), **about})
        return {"architectures": [name], "model_type": kind, **entries}

    def _class_of(self, description: Description) -> tuple[str, str]:
        if self.class_of is None:
            raise CheckpointError(f"files of {next(iter(self.processors))} are read, but not written")
        return self.class_of(description)


def _sizes(patch_size: int = 16, norm_epsilon: float = 1e-6, width: int = 768, heads: int = 12) -> list[Key]:
    """Return the table of keys that all families share; the arguments are the defaults of transformers."""

    def pair(name: str, default: int) -> Key:
        return Key(name, lambda config, _: {name: _pair(config, name, default)}, lambda fields: square(fields[name]))

    return [
        field("hidden_size", "width", default=width),
        field("num_hidden_layers", "depth", default=12),
        field("num_attention_heads", "num_heads", default=heads),
        field("layer_norm_eps", "norm_epsilon", hf.number, norm_epsilon),
        pair("image_size", 224),
        pair("patch_size", patch_size),
        written("num_channels", lambda fields: fields["channels"]),
    ]


def _pair(config: Json, key: str, default: int) -> tuple[int, int]:
    """Return a height and width from a config.json, in which one number may stand for both."""
    value = default if config.get(key) is None else config[key]
    height, width = value if isinstance(value, list) and len(value) == 2 else (value, value)
    return hf.size({key: height}, key), hf.size({key: width}, key)


def _qkv_bias(config: Json, name: str, default: bool) -> str:
    return "qkv" if hf.flag(config, name, default) else ""


QKV_BIAS = field("qkv_bias", "qkv_bias", _qkv_bias, True, lambda found: found == "qkv")


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


def _pooler_size(fields: Json) -> object:
    """Return the width of the pooler, a layer before the head (`pre_logits` here), or `ABSENT` without it."""
    return fields["width"] if fields["rep_size"] is True else fields["rep_size"] or ABSENT


_LAYER_4 = layer("encoder.layer.{}", ("layernorm_before", "layernorm_after"), ATTENTION_4,
                 ("intermediate.dense", "output.dense"))  # fmt: skip
_LAYER_5 = layer("layers.{}", ("layernorm_before", "layernorm_after"), ATTENTION_5, ("mlp.fc1", "mlp.fc2"))
VIT = VisionModels(  # and DeiT; if a file has a classifier for the distillation token, pool_type is "tok+reg"
    processors={"vit": "ViT", "deit": "DeiT"},
    prefixes=("vit.", "deit.", ""),
    patches="embeddings.patch_embeddings.projection",
    marks=["encoder.layer.0.layernorm_before.weight", "layers.0.layernorm_before.weight"],
    tokens=("embeddings.cls_token", "embeddings.distillation_token"),
    positions="embeddings.position_embeddings",
    embedded=2,
    modules={"layernorm": NORM, "pooler.dense": "pre_logits"},
    layers=[_LAYER_4, _LAYER_5],  # release 5 also writes the names of release 4
    pools={"classifier": "tok", "cls_classifier": "tok+reg", None: "tok"},
    # The token of masked patches, which pretraining uses, and a pooler beside a classifier.
    unused=re.compile(r".*(embeddings\.mask_token|pooler\.dense\.(weight|bias))"),
    keys=lambda _: [
        *_sizes(norm_epsilon=1e-12),
        field("intermediate_size", "mlp_dim", default=3072),
        field("hidden_act", "mlp", hf.activation, "gelu", hf.activation_name),
        QKV_BIAS,
        Key("pooler_act", only("pooler_act", "tanh").read, lambda fields: "tanh" if fields["rep_size"] else ABSENT),
        written("pooler_output_size", _pooler_size),
        written("num_labels", lambda fields: fields["num_outputs"] or ABSENT),
    ],
    class_of=_class_of_vit,
)

SIGLIP = VisionModels(  # its vision tower; the patch embedding of CLIP's has no bias
    processors={"siglip_vision_model": "Siglip", "siglip": "Siglip"},
    prefixes=("vision_model.", ""),
    patches="embeddings.patch_embedding",
    marks=["embeddings.patch_embedding.bias"],
    positions="embeddings.position_embedding.weight",
    batched=False,
    modules={
        "post_layernorm": NORM,
        "head.probe": "MAPHead_0/probe",
        "head.attention.in_proj_": MAP_QKV,
        "head.attention.out_proj": MAP_OUT,
        "head.layernorm": "MAPHead_0/LayerNorm_0",
        "head.mlp.fc1": "MAPHead_0/MlpBlock_0/Dense_0",
        "head.mlp.fc2": "MAPHead_0/MlpBlock_0/Dense_1",
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
    keys=lambda _: [
        *_sizes(),
        field("intermediate_size", "mlp_dim", default=3072),
        field("hidden_act", "mlp", hf.activation, "gelu_pytorch_tanh"),
    ],
)


def _dinov2_keys(kind: str) -> list[Key]:
    """Return the table of config.json for a `model_type`. SwiGLU changes what `mlp_ratio` and `hidden_act` mean."""

    def is_gated(config: Json) -> bool:
        return hf.flag(config, "use_swiglu_ffn", False)

    def mlp_dim(config: Json, found: Json) -> Json:
        hidden = found["width"] * hf.size(config, "mlp_ratio", 4)
        return {"mlp_dim": (int(hidden * 2 / 3) + 7) // 8 * 8 if is_gated(config) else hidden}

    def activation(config: Json, _: Json) -> Json:
        return {"mlp": "swiglu" if is_gated(config) else hf.activation(config, "hidden_act", "gelu")}

    return [
        *_sizes(16 if "register" in kind else 14),
        Key("mlp_ratio", mlp_dim),
        Key("hidden_act", activation),
        field("layerscale_value", "layer_scale", hf.number, 1.0),
        QKV_BIAS,
    ]


def _dinov2_layer(attention: Sequence[str], mlp: Sequence[str]) -> Table:
    scales = ("layer_scale1.lambda1", "layer_scale2.lambda1")
    return layer("encoder.layer.{}", NORMS, attention, mlp, scales, gated="mlp.weights_in" in mlp)


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
        _dinov2_layer(ATTENTION_4, ("mlp.fc1", "mlp.fc2")),
        _dinov2_layer(ATTENTION_5, ("mlp.fc1", "mlp.fc2")),
        _dinov2_layer(ATTENTION_4, ("mlp.weights_in", "mlp.weights_out")),
        _dinov2_layer(ATTENTION_5, ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
    ],
    pools={"classifier": "tok+gap", None: "tok"},
    unused=re.compile(r".*mask_token"),  # of masked patches, which pretraining uses
    keys=_dinov2_keys,
)


def _original_dinov2(tensors: Tensors) -> Json:
    """Return the config of a model of facebookresearch: D = 64 in all sizes, and a crop of 224 of 256 pixels."""
    width, channels, *patch = shape_of(tensors, "patch_embed.proj.weight", 4)
    is_gated = "blocks.0.mlp.w12.weight" in tensors
    mlp_dim = shape_of(tensors, f"blocks.0.mlp.{'w3' if is_gated else 'fc2'}.weight")[1]
    side = round((shape_of(tensors, "pos_embed", 3)[1] - 1) ** 0.5)
    size = [side * length for length in patch]
    return {
        "model_type": "dinov2", "hidden_size": width, "num_hidden_layers": depth_of(tensors, "blocks."),
        "num_attention_heads": max(1, width // 64), "mlp_ratio": 4 if is_gated else mlp_dim // width,
        "use_swiglu_ffn": is_gated, "layerscale_value": 1e-5, "num_channels": channels, "patch_size": patch,
        "image_size": size,
        PROCESSOR: {
            "size": {"shortest_edge": resized(min(size), 224 / 256)},
            "crop_size": dict(zip(("height", "width"), size, strict=True)),
            "image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD,
        },
    }  # fmt: skip


DINOV2_ORIGINAL = VisionModels(  # https://github.com/facebookresearch/dinov2
    processors=DINOV2.processors,
    patches="patch_embed.proj",
    marks=["blocks.0.ls1.gamma"],
    tokens=("cls_token", "register_tokens"),
    positions="pos_embed",
    embedded=1,
    modules={"norm": NORM},
    layers=[
        layer("blocks.{}", NORMS, ("attn.qkv", "attn.proj"), mlp, ("ls1.gamma", "ls2.gamma"), gated="mlp.w12" in mlp)
        for mlp in (("mlp.fc1", "mlp.fc2"), ("mlp.w12", "mlp.w3"))
    ],
    pools={None: "tok"},
    unused=DINOV2.unused,
    keys=_dinov2_keys,
    assumed=_original_dinov2,
)


def _dinov3_keys(_: str) -> list[Key]:
    """Return the table of config.json, without the keys of training: dropout, and the augmentation of positions."""
    biases = {"q": "query_bias", "k": "key_bias", "v": "value_bias"}

    def activation(config: Json, _: Json) -> Json:
        if not hf.flag(config, "use_gated_mlp", False):
            return {"mlp": hf.activation(config, "hidden_act", "gelu")}
        if (found := hf.text(config, "hidden_act", "gelu")) != "silu":
            raise CheckpointError(f"config.json: hidden_act={found!r} with use_gated_mlp is not supported, only 'silu'")
        return {"mlp": "swiglu"}

    def qkv_bias(config: Json, _: Json) -> Json:
        found = "".join(initial for initial, key in biases.items() if hf.flag(config, key, initial != "k"))
        if found not in QKV_BIASES:
            raise CheckpointError(
                f"config.json: biases of {', '.join(biases[x] for x in found)} alone are not supported"
            )
        return {"qkv_bias": found}

    return [
        *_sizes(norm_epsilon=1e-5, width=384, heads=6),
        field("intermediate_size", "mlp_dim", default=1536),
        Key("hidden_act", activation),
        field("layerscale_value", "layer_scale", hf.number, 1.0),
        Key("query_bias", qkv_bias),
        only("proj_bias", True),
        only("mlp_bias", True),
        only("rope_theta", 100.0),  # as in `dcvit.models.vit`
    ]


DINOV3 = VisionModels(
    processors={"dinov3_vit": "DINOv3ViT"},
    patches="embeddings.patch_embeddings",
    marks=["layer.0.layer_scale1.lambda1", "model.layer.0.layer_scale1.lambda1"],
    tokens=("embeddings.cls_token", "embeddings.register_tokens"),
    modules={"embeddings.cls_token": "cls", "embeddings.register_tokens": "registers", "norm": NORM},
    layers=[
        layer(at, NORMS, ATTENTION_5, mlp, ("layer_scale1.lambda1", "layer_scale2.lambda1"))
        for at in ("layer.{}", "model.layer.{}")  # in a file of `save_pretrained`, and of `state_dict`
        for mlp in (("mlp.up_proj", "mlp.down_proj"), ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
    ],
    pools={None: "tok"},
    constants={"posemb": "rotary2d"},
    # The token of masked patches, which pretraining uses, and the registers of a model that has none.
    unused=re.compile(r"embeddings\.(mask_token|register_tokens)"),
    keys=_dinov3_keys,
)

ROWS = {"hf_vit": VIT, "siglip": SIGLIP, "dinov2": DINOV2, "dinov2_original": DINOV2_ORIGINAL, "dinov3": DINOV3}
