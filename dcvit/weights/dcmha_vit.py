"""Vision Transformers of the authors of DCMHA: their fork of big_vision, with composed attention.

A layer's attention has the dynamic weights of all four sides c (pre-compose by query and by key, then post-compose) in
one module: `dyn_w_proj/dw1` (M, 1, c, I), `qkw` (1, c, I, 2R, H), whose first R rows are the down projection, and `dd`
(M, 1, c·H), with I = 2·R·H. The static projections are `pre_proj/w` and `post_proj/w`. R is 2, and G is 1.
https://arxiv.org/abs/2405.08553, Section 4.5.
"""

from __future__ import annotations

import math

from dcvit.errors import CheckpointError
from dcvit.weights import big_vision, vit_links
from dcvit.weights.family import Description, Shape, shapes_of
from dcvit.weights.links import Link, compositions, in_all_layers, shape_of, tensor
from dcvit.weights.tensors import Json, Tensors

OURS = vit_links.ATTENTION
DENSE = {"query": "query_dense", "key": "key_dense", "value": "value_dense", "out": "o_dense"}  # ours -> theirs
NORMS = {"query_norm": "query_ln", "key_norm": "key_ln"}


def matches(tensors: Tensors, config: Json) -> bool:
    """Return True for a big_vision tree whose attention has `dyn_w_proj`."""
    return "embedding/kernel" in tensors and _module(tensors) is not None


def describe(tensors: Tensors, config: Json) -> Description:
    name = _module(tensors) or OURS
    if big_vision.first_block(tensors) != f"{big_vision.BLOCK}_0":
        raise CheckpointError("the authors' ViT with scanned layers is not supported, only with unrolled ones")
    at = f"{big_vision.BLOCK}_0/{name}"
    _, _, splits, inner = shape_of(tensors, f"{at}/{_dyn(tensors, 'dw1')}", 4)
    width = shape_of(tensors, "embedding/kernel", 4)[-1]
    heads = inner // 4
    kernel = tensors.get(f"{at}/query_dense/kernel")
    if splits != 4 or inner % 4 or kernel is None or width % max(1, heads):
        raise CheckpointError(
            f"the authors' ViT: {at}/dyn_w_proj is of {splits} sides and inner width {inner} for model width {width}; "
            "expected 4 sides, 4 times the number of heads, and query_dense"
        )
    fields: Json = big_vision.infer(tensors, heads)
    fields |= {"compose": "both", "rank": 2, "groups": 1, "projection": True, "gate": True, "branches": "qk"}
    fields["static"] = f"{at}/pre_proj/w" in tensors
    fields["qk_norm"] = "layernorm" if f"{at}/query_ln/scale" in tensors else None
    classes = shape_of(tensors, "head/kernel")[1] if "head/kernel" in tensors else None
    return Description("vit", classes, fields)


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    name, shapes = OURS if tensors is None else _module(tensors) or OURS, shapes_of(description)
    ours, theirs = (f"{vit_links.BLOCK}/{module}" for module in (OURS, name))
    found = []
    for path, shape in shapes.items():
        part, end = path.removeprefix(f"{ours}/").rpartition("/")[::2]
        if not path.startswith(ours):
            found.append(tensor(path, path, shape))
        elif part in DENSE:
            found.append(_projection(f"{theirs}/{DENSE[part]}/{end}", path, shape, tensors))
        elif part in NORMS:
            found.append(tensor(f"{theirs}/{NORMS[part]}/{end}", path, shape))
        elif end == "w_b":
            found.append(tensor(f"{theirs}/{part}_proj/w", path, shape))
    dynamic = [f"{theirs}/{_dyn(tensors, end)}" for end in ("dw1", "qkw", "dd")]
    return in_all_layers([*found, *compositions(dynamic, ours, shapes)], description)


def config(description: Description) -> Json:
    """Return {}: the authors' files have no config.json."""
    return {}


def _projection(theirs: str, ours: str, shape: Shape, tensors: Tensors | None) -> Link:
    """Link a projection of attention, whose kernel the authors may store as a matrix."""
    first = (tensors or {}).get(theirs.format(0))
    same_size = first is not None and math.prod(first.shape) == math.prod(size or 0 for size in shape)
    return tensor(theirs, ours, first.shape if first and same_size else shape, shape)  # another size is an error


def _module(tensors: Tensors) -> str | None:
    """Return the name of the attention module in the file, the parent of `dyn_w_proj`; None without this parameter."""
    found = (name.split("/") for name in tensors if "/dyn_w_proj/" in name)
    return next((parts[parts.index("dyn_w_proj") - 1] for parts in found), None)


def _dyn(tensors: Tensors | None, name: str) -> str:
    """Return the path of the parameter `name` of the dynamic weights: NAME, or NAME/kernel in some files."""
    path = f"dyn_w_proj/{name}"
    nested = tensors is not None and any(found.endswith(f"{path}/kernel") for found in tensors)
    return f"{path}/kernel" if nested else path
