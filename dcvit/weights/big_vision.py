"""Vision Transformers of big_vision, and those of this project without a description, which have the same names.

Files are read by `dcvit.weights.big_vision_files`, which also renames the parameters of earlier releases. The tensors
tell sizes and modules. The activation of MLPs, the epsilon of norms and a pooling without parameters they do not tell;
these are big_vision's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights import vit_links
from dcvit.weights.family import Description
from dcvit.weights.links import Arrays, Link, Shape
from dcvit.weights.tensors import Json, Tensors

BLOCK = "Transformer/encoderblock"
ATTENTION = vit_links.ATTENTION


def matches(tensors: Tensors, config: Json) -> bool:
    """Recognize the names of the stem and of the first layer, scanned or unrolled."""
    return "embedding/kernel" in tensors and first_block(tensors) is not None


def describe(tensors: Tensors, config: Json) -> Description:
    """Describe the model; see `dcvit.weights.family.Family`."""
    inferred, classes = infer(tensors, ATTENTION), None
    if "head/kernel" in tensors:
        classes = vit_links.shape_of(tensors, "head/kernel", "the file")[1]
    if "qk_norm" in inferred:
        raise CheckpointError(
            "the tensors do not tell whether qk_norm is 'layernorm' or 'rmsnorm'; put the config.json of the export "
            "beside the file, or give the model in a config"
        )
    return Description("vit", classes, inferred)


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    """Return the links; see `dcvit.weights.family.Family`."""
    shapes = parameters(description)
    if tensors is None or f"{BLOCK}_0/LayerNorm_0/scale" in tensors:
        return [vit_links.tensor(name, name, shape) for name, shape in shapes.items()]
    found, depth = [], description.fields["depth"]
    for name, shape in shapes.items():
        if not name.startswith(f"{BLOCK}_"):
            found.append(vit_links.tensor(name, name, shape))
        elif name.startswith(f"{BLOCK}_0/"):
            rest = name.removeprefix(f"{BLOCK}_0/")
            found.append(_scanned(f"{BLOCK}/{rest}", [f"{BLOCK}_{i}/{rest}" for i in range(depth)], shape))
    return found


def unused(name: str) -> bool:
    """Return True for no array: the files hold parameters only."""
    return False


def first_block(tensors: Tensors) -> str | None:
    """Return the path of the first layer, or of all if they are scanned; None if there is no layer."""
    return next((at for at in (f"{BLOCK}_0", BLOCK) if f"{at}/LayerNorm_0/scale" in tensors), None)


def infer(tensors: Tensors, attention: str, query: str = "query") -> Json:
    """Return the fields of a model that its tensors tell, except those of a composition in another layout.

    Args:
      tensors: the tensors.
      attention: the name of the attention module in a layer.
      query: the name of its projection of queries.
    """
    at = first_block(tensors)
    scan = at == BLOCK
    p_h, p_w, _, width = vit_links.shape_of(tensors, "embedding/kernel", "the file", axes=4)
    kernel = vit_links.shape_of(tensors, f"{at}/{attention}/{query}/kernel", "the file", axes=3 + scan)
    dense = vit_links.shape_of(tensors, f"{at}/MlpBlock_0/Dense_0/kernel", "the file", axes=2 + scan)
    fields: Json = {
        "width": width, "num_heads": kernel[-2], "mlp_dim": dense[-1], "patch_size": (p_h, p_w),
        "depth": kernel[0] if scan else _count(tensors), "pool_type": "tok" if "cls" in tensors else "gap",
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
        fields["registers"] = vit_links.shape_of(tensors, "registers", "the file", axes=3)[1]
    if f"{at}/layer_scale_0" in tensors:
        fields["layer_scale"] = 1e-5
    if f"{at}/MlpBlock_0/gate/kernel" in tensors:
        fields["mlp"] = "swiglu"
    if f"{at}/{attention}/query_norm/scale" in tensors:
        fields["qk_norm"] = None
    return fields | _composition({k.removeprefix(f"{at}/{attention}/"): x.shape[scan:] for k, x in tensors.items()
                                  if k.startswith(f"{at}/{attention}/")}, kernel[-2])  # fmt: skip


def parameters(description: Description) -> dict[str, Shape]:
    """Return the shape of each parameter of a model, in the tree of unrolled layers."""
    fields = vit_links.settings(description)
    width, heads, mlp_dim = fields["width"], fields["num_heads"], fields["mlp_dim"]
    shapes: dict[str, Shape] = {"embedding/kernel": (*fields["patch_size"], None, width), "embedding/bias": (width,)}
    if fields["posemb"] == "learn":
        shapes["pos_embedding"] = (1, None, width)
    if fields["pool_type"].startswith("tok"):
        shapes["cls"] = (1, 1, width)
    if fields["registers"]:
        shapes["registers"] = (1, fields["registers"], width)
    gated = fields["mlp"] == "swiglu"
    attention = _attention(width, heads)
    mlp = {"Dense_0": ((width,), (mlp_dim,)), "Dense_1": ((mlp_dim,), (width,))}
    mlp |= {"gate": ((width,), (mlp_dim,))} if gated else {}
    block = _prefixed(ATTENTION, attention | _composed(fields)) | _prefixed("MlpBlock_0", _dense(mlp))
    block |= _norm("LayerNorm_0", width) | _norm("LayerNorm_1", width)
    if fields["layer_scale"] is not None:
        block |= {"layer_scale_0": (width,), "layer_scale_1": (width,)}
    for layer in range(fields["depth"]):
        shapes |= _prefixed(f"{BLOCK}_{layer}", block)
    shapes |= _norm("Transformer/encoder_norm", width)
    if fields["pool_type"] == "map":
        head = _prefixed(ATTENTION, attention) | _prefixed("MlpBlock_0", _dense(mlp)) | _norm("LayerNorm_0", width)
        shapes |= _prefixed("MAPHead_0", {"probe": (1, 1, width), **head})
    pooled = width * (2 if "+" in fields["pool_type"] else 1)
    if fields["rep_size"]:
        size = width if fields["rep_size"] is True else fields["rep_size"]
        shapes |= _dense({"pre_logits": ((pooled,), (size,))})
        pooled = size
    if description.num_outputs:
        shapes |= _dense({"head": ((pooled,), (description.num_outputs,))})
    return shapes


def _attention(width: int, heads: int) -> dict[str, Shape]:
    """Return the shapes of the projections."""
    inner = (heads, width // heads)
    return _dense(dict.fromkeys(("query", "key", "value"), ((width,), inner)) | {"out": (inner, (width,))})


def _composed(fields: Json) -> dict[str, Shape]:
    """Return the shapes of compositions and of the norms of queries and keys."""
    width, heads, groups = fields["width"], fields["num_heads"], fields["groups"]
    per_group = heads // groups
    inner = 2 * fields["rank"] * per_group
    one: dict[str, Shape] = {}
    for side in fields["branches"]:
        if fields["projection"]:
            one |= {f"w_{side}1": (width, groups, inner), f"w_{side}2": (groups, inner, inner)}
        if fields["gate"]:
            one[f"w_{side}g"] = (width, heads)
    if fields["static"]:
        one["w_b"] = (groups, per_group, per_group)
    shapes: dict[str, Shape] = {}
    for where in ("pre", "post"):
        if fields["compose"] in (where, "both"):
            shapes |= _prefixed(where, one)
    if fields["qk_norm"]:
        shapes |= {"query_norm/scale": (width // heads,), "key_norm/scale": (width // heads,)}
    return shapes


def _composition(shapes: dict[str, tuple[int, ...]], heads: int) -> Json:
    """Return the fields of the composition of an attention module with these parameters."""
    where = [name for name in ("pre", "post") if any(path.startswith(f"{name}/w_") for path in shapes)]
    if not where:
        return {}
    sides = "".join(side for side in "qk" if any(f"{where[0]}/w_{side}{end}" in shapes for end in "1g"))
    fields: Json = {"compose": "both" if len(where) == 2 else where[0], "branches": sides or "qk"}
    down = next((shapes[f"{where[0]}/w_{side}1"] for side in sides if f"{where[0]}/w_{side}1" in shapes), None)
    static = shapes.get(f"{where[0]}/w_b")
    fields |= {"projection": down is not None, "static": static is not None}
    fields["gate"] = any(f"{where[0]}/w_{side}g" in shapes for side in sides)
    groups = down[1] if down and len(down) == 3 else static[0] if static and len(static) == 3 else 1
    if groups < 1 or heads % groups:
        raise CheckpointError(f"compositions in {groups} groups, which do not divide {heads} heads")
    fields["groups"] = groups
    if down:
        fields["rank"] = max(1, down[-1] * groups // (2 * heads))
    return fields


def _scanned(theirs: str, ours: list[str], shape: Shape) -> Link:
    """Link the parameter of a scanned layer to those of all layers."""

    def layers(x: np.ndarray) -> Arrays:
        return list(x)

    return Link((theirs,), tuple(ours), layers, lambda *parts: (np.stack(parts),), ((len(ours), *shape),))


def _count(tensors: Tensors) -> int:
    """Return the number of unrolled layers."""
    before = f"{BLOCK}_"
    return len({name.split("/")[1] for name in tensors if name.startswith(before)})


def _dense(layers: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Shape]:
    """Return the shapes of dense layers, given the shapes of their inputs and outputs."""
    kernels: dict[str, Shape] = {f"{name}/kernel": (*inputs, *outputs) for name, (inputs, outputs) in layers.items()}
    return kernels | {f"{name}/bias": outputs for name, (_, outputs) in layers.items()}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}/scale": (width,), f"{name}/bias": (width,)}


def _prefixed(before: str, shapes: dict[str, Shape]) -> dict[str, Shape]:
    return {f"{before}/{name}": shape for name, shape in shapes.items()}
