"""Vision Transformers of timm: plain and augreg ViT, DeiT, DeiT-3, FlexiViT, DINOv2 and SigLIP.

https://github.com/huggingface/pytorch-image-models. The shapes of the tensors give the sizes. Properties that they do
not show (heads, activation, pooling) come from config.json; without one, from the sizes that timm has, which a warning
says. The original DINOv2 of facebookresearch has almost the same names.
"""

from __future__ import annotations

import logging
import math
import re

from dcvit.errors import CheckpointError
from dcvit.parallel.trees import Tensors
from dcvit.weights import preprocessing
from dcvit.weights.family import Description, check_only
from dcvit.weights.links import Link, depth_of, from_table, shape_of, tokens_in_front
from dcvit.weights.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from dcvit.weights.tensors import Json
from dcvit.weights.vit_families import NORM, POOL, POOL_OUT, POOL_QKV, check_expressible, head_links, layer, settings

SIZES = "tiny|wee|little|small|medium|mediumd|betwixt|base|large|huge|giant|giantopt|gigantic|so150m|so400m"
# timm has many more ViTs, some with the same names and shapes of tensors and another computation.
KNOWN = re.compile(
    rf"(flexivit_({SIZES})|(vit|deit|deit3)_({SIZES})(_distilled)?_patch\d+(_plus)?(_reg\d+)?"
    r"(_clip|_dinov2|_tipsv2|_gap|_map|_siglip(_gap)?)?(_36x1)?(_\d+)?)(\..*)?"
)
TANH = re.compile(r"vit_(giantopt_patch|so400m_patch16_siglip|base_patch32_siglip|large_patch16_siglip(_gap)?_512).*")
# Size, patch sizes, and patch sizes of models with CLIP's norms, by width, depth and heads, for names of exports.
NAMED = {
    (192, 12, 3): ("tiny", (16,), ()),
    (384, 12, 6): ("small", (8, 16, 32), ()),
    (512, 12, 8): ("medium", (), (16, 32)),
    (768, 12, 12): ("base", (8, 16, 32), (16, 32)),
    (1024, 24, 16): ("large", (14, 16, 32), (14,)),
    (1280, 32, 16): ("huge", (14,), (14,)),
    (1408, 40, 16): ("giant", (14,), (14,)),
    (1664, 48, 16): ("gigantic", (14,), (14,)),
}
HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}  # by width, where a head is not 64 wide
HEADS_OF = {"vit_base_patch16_gap_224": 16, "vit_giantopt_patch16_siglip": 16}  # by the beginning of the name
# Arguments of timm's VisionTransformer that the tensors or this module cover, or that have no effect on a prediction.
ARGUMENTS = {
    "img_size", "patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "depth", "num_heads", "mlp_ratio",
    "qkv_bias", "qk_norm", "proj_bias", "init_values", "class_token", "pos_embed", "no_embed_class", "reg_tokens",
    "pre_norm", "fc_norm", "act_layer", "dynamic_img_size", "dynamic_img_pad", "drop_rate", "pos_drop_rate",
    "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate", "weight_init", "fix_init",
    "strict_img_size",
}  # fmt: skip
ACTIVATIONS = ("gelu", "gelu_tanh")  # with the same names here
SUPPORTED: dict[str, tuple[object, ...]] = {
    "qk_norm": (False, None), "proj_bias": (True,), "pos_embed": ("learn",), "act_layer": (None, *ACTIVATIONS),
}  # fmt: skip
NORMS = {"pre_norm": "norm_pre", "pool_norm": "fc_norm"}
POOLS = {"token": "tok", "avg": "gap", "map": "map"}
NAMES = {ours: theirs for theirs, ours in POOLS.items()}
MODULES = {
    "patch_embed.proj": "embedding", "norm": NORM, **{theirs: ours for ours, theirs in NORMS.items()},
    "attn_pool.latent": f"{POOL}/probe", "attn_pool.q": POOL_QKV[0], "attn_pool.kv": POOL_QKV[1:],
    "attn_pool.proj": POOL_OUT, "attn_pool.norm": f"{POOL}/LayerNorm_0",
    "attn_pool.mlp.fc1": f"{POOL}/MlpBlock_0/Dense_0", "attn_pool.mlp.fc2": f"{POOL}/MlpBlock_0/Dense_1",
}  # fmt: skip
MASK = "mask_token"  # of the original DINOv2, for masked patches in pretraining
unused = re.compile(MASK)
log = logging.getLogger(__name__)


def matches(tensors: Tensors, config: Json) -> bool:
    """Return True if the tensors have the names of timm's VisionTransformer."""
    return {"pos_embed", "patch_embed.proj.weight", "blocks.0.norm1.weight"} <= tensors.keys()


def describe(tensors: Tensors, config: Json) -> Description:
    """Return the model's description. Raises CheckpointError for a property that this project's models lack."""
    is_original = MASK in tensors and not config.get("architecture")
    config = _original_dinov2(tensors) if is_original else config
    architecture, arguments = config.get("architecture", ""), config.get("model_args", {})
    if architecture and not KNOWN.fullmatch(architecture):
        raise CheckpointError(f"config.json: architecture {architecture!r} is not a ViT that dcvit can express")
    for name, value in arguments.items():
        if name not in ARGUMENTS or value not in SUPPORTED.get(name, (value,)):
            raise CheckpointError(f"config.json: model_args.{name}={value!r} is not supported")
    width, _, *patch = shape_of(tensors, "patch_embed.proj.weight", 4)
    first, last = _mlp(tensors)
    mlp_dim = shape_of(tensors, f"blocks.0.{last}.weight")[1]
    is_gated = shape_of(tensors, f"blocks.0.{first}.weight")[0] == 2 * mlp_dim
    pool = _pool(tensors, config.get("global_pool") or arguments.get("global_pool"))
    named_heads = next((heads for start, heads in HEADS_OF.items() if architecture.startswith(start)), None)
    heads = arguments.get("num_heads") or named_heads or HEADS.get(width, max(1, width // 64))
    activation = arguments.get("act_layer") or ("gelu_tanh" if TANH.fullmatch(architecture) else "gelu")
    fields: Json = {
        "width": width, "depth": depth_of(tensors, "blocks."), "num_heads": heads, "mlp_dim": mlp_dim,
        "patch_size": tuple(patch), "pool_type": pool, "mlp": "swiglu" if is_gated else activation,
    }  # fmt: skip
    if "_clip_" in architecture or (not architecture and "norm_pre.weight" in tensors):
        fields["norm_epsilon"] = 1e-5
    fields |= {ours: True for ours, theirs in NORMS.items() if f"{theirs}.weight" in tensors}
    if "blocks.0.attn.qkv.bias" not in tensors:
        fields["qkv_bias"] = ""
    if "blocks.0.ls1.gamma" in tensors:
        fields["layer_scale"] = float(arguments.get("init_values") or 1e-5)
    registers = sum(_tokens(tensors).values()) - pool.startswith("tok")
    if registers:
        fields["registers"] = registers
    if not architecture and not is_original:
        quick = "; CLIP's models with QuickGELU have other outputs" if "pre_norm" in fields else ""
        shown = ", ".join(f"{name}={fields.get(name, 1e-6)!r}" for name in ("num_heads", "mlp", "norm_epsilon"))
        log.warning("a ViT of timm without config.json; assumed: %s%s", shown, quick)
    classes = shape_of(tensors, "head.weight")[0] if "head.weight" in tensors else None
    return Description("vit", classes, fields, _pp(config.get("pretrained_cfg") or {}))


def _original_dinov2(tensors: Tensors) -> Json:
    """Return what config.json would hold for a model of facebookresearch: a crop of 224 of 256 pixels."""
    _, channels, *patch = shape_of(tensors, "patch_embed.proj.weight", 4)
    side = round((shape_of(tensors, "pos_embed", 3)[1] - 1) ** 0.5)
    size = [channels, *(side * length for length in patch)]
    return {"pretrained_cfg": {"input_size": size, "crop_pct": 224 / 256, "mean": IMAGENET_MEAN, "std": IMAGENET_STD}}


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    """Return the links of a model; `tensors` are those of a file, or None for writing."""
    fields = settings(description)
    if tensors is None:
        has_cls, distilled = fields["pool_type"].startswith("tok"), fields["pool_type"] == "tok+reg"
        counts = {"cls_token": has_cls, "dist_token" if distilled else "reg_token": fields["registers"]}
        tokens = {name: count for name, count in counts.items() if count}
        embedded = 2 * distilled  # timm's class for it needs their position embeddings
    else:
        tokens = _tokens(tensors)
        embedded = _embedded(tensors, sum(tokens.values()), description)
    first, last = _mlp(tensors or {})
    block = layer(
        "blocks.{}", ("norm1", "norm2"), ("attn.qkv", "attn.proj"), (first + "+" * (fields["mlp"] == "swiglu"), last),
        ("ls1.gamma", "ls2.gamma"),
    )  # fmt: skip
    in_front = tokens_in_front("pos_embed", tokens, embedded, description)
    modules = from_table({**MODULES, **block}, description)
    return [in_front, *modules, *head_links(description, ("head", "head_dist"))]


def config(description: Description) -> Json:
    """Return config.json in the layout of timm's models on the Hugging Face hub."""
    given = description.fields
    one_register = given.get("registers") == 1 and bool(description.num_outputs)
    clip, distilled = given.get("norm_epsilon") == 1e-5, given.get("pool_type") == "tok+reg"
    check_expressible(
        description, "timm", pool_type=(*POOLS.values(), *["tok+reg"] * one_register),
        norm_epsilon=(1e-6, *[1e-5] * (not distilled)), qkv_bias=("qkv", ""), pre_norm=(False, True),
        mlp=(*ACTIVATIONS, *["swiglu"] * (not distilled and not clip)), pool_norm=(False, True),
    )  # fmt: skip
    fields, pp = settings(description), preprocessing.from_pp(description.pp)
    width, mlp_dim, pool = fields["width"], fields["mlp_dim"], fields["pool_type"]
    gated = fields["mlp"] == "swiglu"
    hidden = 2 * mlp_dim if gated else mlp_dim  # timm gives the width of gate and hidden layer together
    ratio = hidden / width
    arguments = {
        "img_size": list(pp.size), "in_chans": pp.channels, "patch_size": list(fields["patch_size"]),
        "embed_dim": width, "depth": fields["depth"], "num_heads": fields["num_heads"],
        "mlp_ratio": ratio if int(width * ratio) == hidden else (hidden + 0.5) / width,  # timm rounds down
        "init_values": fields["layer_scale"], "class_token": pool.startswith("tok"), "no_embed_class": not distilled,
        "reg_tokens": 0 if distilled else fields["registers"], "global_pool": "token" if distilled else NAMES[pool],
        "fc_norm": fields["pool_norm"], "pre_norm": fields["pre_norm"], "qkv_bias": fields["qkv_bias"] == "qkv",
    }  # fmt: skip
    if not gated:
        arguments["act_layer"] = fields["mlp"]
    classes = description.num_outputs or 0
    return {
        "architecture": _architecture(fields, pp.size),
        "num_classes": classes,
        "num_features": width,
        "global_pool": arguments["global_pool"],
        "model_args": arguments,
        "pretrained_cfg": {
            "num_classes": classes, "input_size": [pp.channels, *pp.size], "pool_size": None, "fixed_input_size": True,
            "crop_pct": _crop_pct(pp),
            "crop_mode": "squash" if pp.squash or not pp.resize else "center",
            "interpolation": pp.method, "mean": list(pp.mean), "std": list(pp.std),
            "first_conv": "patch_embed.proj", "classifier": ["head", "head_dist"] if distilled else "head",
        },
    }  # fmt: skip


def _architecture(fields: Json, size: tuple[int, int]) -> str:
    """Return the architecture of timm whose width, depth, heads and patches fit best; arguments give all sizes.

    The classes of model, MLP and norms cannot be arguments, so that the architecture must have them.
    """
    patch, is_clip = fields["patch_size"][0], fields["norm_epsilon"] == 1e-5
    name, plain, clip = NAMED.get((fields["width"], fields["depth"], fields["num_heads"]), ("base", (16,), (16,)))
    if fields["mlp"] == "swiglu":
        return "vit_giant_patch14_dinov2"
    if fields["pool_type"] == "tok+reg":
        return f"deit_{name if name in ('tiny', 'small') else 'base'}_distilled_patch16_224"
    if set(fields["patch_size"]) != {patch} or patch not in (clip if is_clip else plain):
        name, patch = "base", 16
    end = 384 if size == (384, 384) and patch in (16, 32) and not is_clip else 224
    return f"vit_{name}_patch{patch}{'_clip' * is_clip}_{end}"


def _crop_pct(pp: Preprocessing) -> float:
    """Return timm's `crop_pct`: the fraction of an image's sides that the crop keeps.

    Raises:
      CheckpointError: an image is resized to another ratio of height and width than that of the crop.
    """
    if not (resized := pp.squash or (pp.resize and (pp.resize,))):
        return 1.0
    size = pp.size if pp.squash else (min(pp.size),)
    fraction = size[0] / resized[0]
    if preprocessing.resized(size[0], fraction) != resized[0]:
        fraction = math.nextafter(fraction, 0)
    if tuple(preprocessing.resized(side, fraction) for side in size) != resized:
        raise CheckpointError(f"timm cannot express a crop of {pp.size} pixels from images of {pp.squash} pixels")
    return fraction


def _pool(tensors: Tensors, named: str | None) -> str:
    """Return `pool_type` from its name in config.json or, without one, from the tensors that exist."""
    named = named or ("map" if "attn_pool.latent" in tensors else "token" if "cls_token" in tensors else "avg")
    if named not in POOLS:
        raise CheckpointError(f"config.json: global_pool={named!r} is not supported; supported: {', '.join(POOLS)}")
    if "dist_token" not in tensors:
        return POOLS[named]
    if named != "token" or "head_dist.weight" not in tensors:
        raise CheckpointError("timm's distilled DeiT is supported with its two classifiers only")
    return "tok+reg"


def _mlp(tensors: Tensors) -> tuple[str, str]:
    """Return the names of the layers of an MLP, of which the first also computes the gate of SwiGLU."""
    return ("mlp.w12", "mlp.w3") if "blocks.0.mlp.w12.weight" in tensors else ("mlp.fc1", "mlp.fc2")


def _tokens(tensors: Tensors) -> dict[str, int]:
    """Return the number of tokens before the patches in each of their tensors."""
    names = [name for name in ("cls_token", "dist_token", "reg_token", "register_tokens") if name in tensors]
    return {name: shape_of(tensors, name, 3)[1] for name in names}


def _embedded(tensors: Tensors, before: int, description: Description) -> int:
    """Return how many of the `before` tokens ahead of the patches have a position embedding."""
    rows = shape_of(tensors, "pos_embed", 3)[1]
    if description.pp:
        height, width = preprocessing.size_of(description.pp)
        p_h, p_w = description.fields["patch_size"]
        embedded = rows - (height // p_h) * (width // p_w)
        return embedded if 0 <= embedded <= before else 0  # a wrong number of rows is refused with the model's
    if math.isqrt(rows) ** 2 == rows:
        return 0
    if math.isqrt(rows - before) ** 2 != rows - before:
        raise CheckpointError(f"pos_embed has {rows} rows, which is no square grid and {before} tokens")
    return before


def _pp(found: Json) -> str:
    """Return the preprocessing string for timm's `pretrained_cfg`; "" without one or for 2 or 4 channels."""
    channels, *size = found.get("input_size", (3, 224, 224)) if found else (0,)
    if channels not in (1, 3):
        return ""
    if not (is_squashed := found.get("crop_mode") == "squash"):
        check_only(found, crop_mode=found.get("crop_mode") and "center")
    crop = found.get("crop_pct") or 0.875
    if not 1e-3 <= crop <= 1:
        raise CheckpointError(f"config.json: crop_pct={crop!r} is not in [0.001, 1]")
    height, width = (preprocessing.resized(side, crop) for side in size)
    return preprocessing.to_pp(
        Preprocessing(
            (size[0], size[1]), None if is_squashed else min(height, width), found.get("interpolation", "bicubic"),
            found.get("mean", preprocessing.HALF), found.get("std", preprocessing.HALF), channels,
            (height, width) if is_squashed and crop < 1 else None,
        )
    )  # fmt: skip
