"""Vision Transformers of big_vision, and files of this project without a description, which have the same names.

Files are read by `dcvit.weights.big_vision_files`, which also renames the parameters of earlier releases. Sizes and
modules are inferred from the tensors. The activation of MLPs, the epsilon of norms and a pooling without parameters
cannot be; they are big_vision's defaults.
"""

from __future__ import annotations

import logging

from dcvit.errors import CheckpointError
from dcvit.weights import vit_links
from dcvit.weights.family import Description, shapes_of
from dcvit.weights.links import Link, depth_of, in_all_layers, shape_of, stacked, tensor
from dcvit.weights.tensors import Json, Tensors

BLOCK = "Transformer/encoderblock"
ATTENTION = vit_links.ATTENTION
log = logging.getLogger(__name__)


def matches(tensors: Tensors, config: Json) -> bool:
    """Return True if the tensors include the kernel of the patch embedding and a first layer, scanned or unrolled."""
    return "embedding/kernel" in tensors and first_block(tensors) is not None


def describe(tensors: Tensors, config: Json) -> Description:
    inferred = infer(tensors)
    classes = shape_of(tensors, "head/kernel")[1] if "head/kernel" in tensors else None
    if "qk_norm" in inferred:
        raise CheckpointError(
            "the tensors do not tell whether qk_norm is 'layernorm' or 'rmsnorm'; put the config.json of the export "
            "beside the file, or give the model in a config"
        )
    known = vit_links.DEFAULTS | inferred
    log.info("no description of the model; assumed: mlp=%r, norm_epsilon=%g", known["mlp"], known["norm_epsilon"])
    return Description("vit", classes, inferred)


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    shapes = shapes_of(description)
    if tensors is None or f"{BLOCK}_0/LayerNorm_0/scale" in tensors:
        return in_all_layers([tensor(name, name, shape) for name, shape in shapes.items()], description)
    depth, found = description.fields["depth"], []
    for name, shape in shapes.items():
        layers = [name.format(layer) for layer in range(depth)]
        stack = (depth, *(size or 0 for size in shape))
        is_stacked = "{}" in name
        found.append(stacked(name.replace("_{}", ""), layers, stack, 0) if is_stacked else tensor(name, name, shape))
    return found


def config(description: Description) -> Json:
    """Return {}: files of big_vision have no config.json."""
    return {}


def first_block(tensors: Tensors) -> str | None:
    """Return the path of the first layer, or of the stack of scanned layers; None if there is no layer."""
    return next((at for at in (f"{BLOCK}_0", BLOCK) if f"{at}/LayerNorm_0/scale" in tensors), None)


def infer(tensors: Tensors, num_heads: int | None = None) -> Json:
    """Return the fields of a model, inferred from its tensors; those of a composition only in this project's layout.

    `num_heads` is by default that of the query kernel.
    """
    at = first_block(tensors)
    attention = f"{at}/{ATTENTION}"
    scan = at == BLOCK
    p_h, p_w, _, width = shape_of(tensors, "embedding/kernel", 4)
    heads = num_heads or shape_of(tensors, f"{attention}/query/kernel", 3 + scan)[-2]
    dense = shape_of(tensors, f"{at}/MlpBlock_0/Dense_0/kernel", 2 + scan)
    fields: Json = {
        "width": width, "num_heads": heads, "mlp_dim": dense[-1], "patch_size": (p_h, p_w),
        "depth": dense[0] if scan else depth_of(tensors, f"{BLOCK}_"),
        "pool_type": "tok" if "cls" in tensors else "gap",
        "posemb": "learn" if "pos_embedding" in tensors else "sincos2d",
    }  # fmt: skip
    if "MAPHead_0/probe" in tensors:
        fields["pool_type"] = "map"
    rep = tensors.get("pre_logits/kernel")
    pooled = tensors.get("head/kernel") if rep is None else rep
    if pooled is not None and pooled.shape[0] == 2 * width:
        fields["pool_type"] = "tok+gap"
    if rep is not None:
        fields["rep_size"] = True if rep.shape[-1] == width else rep.shape[-1]
    if "registers" in tensors:
        fields["registers"] = shape_of(tensors, "registers", 3)[1]
    if f"{at}/layer_scale_0" in tensors:
        fields["layer_scale"] = 1e-5
    if f"{at}/MlpBlock_0/gate/kernel" in tensors:
        fields["mlp"] = "swiglu"
    if f"{attention}/query_norm/scale" in tensors:
        fields["qk_norm"] = None
    inside = {name: x.shape[scan:] for name, x in tensors.items() if name.startswith(f"{attention}/")}
    stages = [stage for stage in ("pre", "post") if any(name.startswith(f"{attention}/{stage}/w_") for name in inside)]
    if not stages:
        return fields
    first = f"{attention}/{stages[0]}/"
    weights = {name.removeprefix(first): shape for name, shape in inside.items() if name.startswith(first)}
    compose = "both" if len(stages) == 2 else stages[0]
    return {**fields, "compose": compose, **_composition(weights, fields["num_heads"])}


def _composition(shapes: dict[str, tuple[int, ...]], heads: int) -> Json:
    """Return the fields of a composition, inferred from the shapes of one compose's parameters by name."""
    sides = "".join(side for side in "qk" if f"w_{side}1" in shapes or f"w_{side}g" in shapes)
    down = next((shapes[f"w_{side}1"] for side in sides if f"w_{side}1" in shapes), None)
    static = shapes.get("w_b")
    groups = down[1] if down and len(down) == 3 else static[0] if static and len(static) == 3 else 1
    if groups < 1 or heads % groups:
        raise CheckpointError(f"compositions in {groups} groups, which do not divide {heads} heads")
    fields: Json = {
        "branches": sides or "qk", "projection": down is not None, "static": static is not None,
        "gate": any(f"w_{side}g" in shapes for side in sides), "groups": groups,
    }  # fmt: skip
    if down:
        fields["rank"] = max(1, down[-1] * groups // (2 * heads))
    return fields
