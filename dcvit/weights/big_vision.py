"""Families with the names of parameters of this project: its own files, those of big_vision, and the authors' ViT.

A layer's attention in the authors' ViT, a fork of big_vision, has the dynamic weights of all four sides c (pre-compose
by query and by key, then post-compose) in one module: `dyn_w_proj/dw1` (M, 1, c, I), `qkw` (1, c, I, 2R, H), whose
first R rows are the down projection, and `dd` (M, 1, c·H), with I = 2·R·H. The static projections are `pre_proj/w` and
`post_proj/w`. R is 2, and G is 1. https://arxiv.org/abs/2405.08553, Section 4.5.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

from dcvit.errors import CheckpointError
from dcvit.models.upcycling import has_compositions
from dcvit.parallel.trees import Tensors
from dcvit.weights.family import Description, Shape, from_json, shapes_of, to_json
from dcvit.weights.links import Link, compositions, depth_of, in_all_layers, shape_of, stacked, tensor
from dcvit.weights.tensors import OWN_KEY, ROOTS, Json
from dcvit.weights.vit_families import ATTENTION, DEFAULTS

BLOCK = "Transformer/encoderblock"
DENSE = {"query": "query_dense", "key": "key_dense", "value": "value_dense", "out": "o_dense"}  # ours -> theirs
QK_NORMS = {"query_norm": "query_ln", "key_norm": "key_ln"}
log = logging.getLogger(__name__)


class Functions(NamedTuple):
    """A family that is not a row of a table; see `dcvit.weights.families.Family`."""

    matches: Callable[[Tensors, Json], bool]
    describe: Callable[[Tensors, Json], Description]
    links: Callable[..., list[Link]]
    config: Callable[[Description], Json] = lambda description: {}  # big_vision has no such file
    unused: None = None


def own_links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    """Return a link for each parameter, whose path is the name of the tensor, optionally below `params/`."""
    names = {name.removeprefix(ROOTS[0]): name for name in tensors or ()}
    same = in_all_layers([tensor(path, path, shape) for path, shape in shapes_of(description).items()], description)
    return [link._replace(theirs=(names.get(link.ours[0], link.ours[0]),)) for link in same]


OWN = Functions(
    lambda tensors, config: OWN_KEY in config,
    lambda tensors, config: from_json(config[OWN_KEY]),
    own_links,
    lambda description: {OWN_KEY: to_json(description)},
)


def _describe(tensors: Tensors, config: Json) -> Description:
    if has_compositions(tensors) or any(name.endswith(f"{ATTENTION}/query_norm/scale") for name in tensors):
        raise CheckpointError(
            "the tensors do not tell how attention is composed, or whether qk_norm is 'layernorm' or 'rmsnorm'; put "
            "the config.json of the export beside the file, or give the model in a config"
        )
    fields = _inferred(tensors)
    known = DEFAULTS | fields
    log.info("no description of the model; assumed: mlp=%r, norm_epsilon=%g", known["mlp"], known["norm_epsilon"])
    return Description("vit", _classes(tensors), fields)


def _links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    shapes = shapes_of(description)
    if tensors is None or f"{BLOCK}_0/LayerNorm_0/scale" in tensors:
        return own_links(description)
    depth, found = description.fields["depth"], []
    for name, shape in shapes.items():
        layers = [name.format(layer) for layer in range(depth)]
        stack = (depth, *(size or 0 for size in shape))
        is_stacked = "{}" in name
        found.append(stacked(name.replace("_{}", ""), layers, stack, 0) if is_stacked else tensor(name, name, shape))
    return found


def _first_block(tensors: Tensors) -> str | None:
    """Return the path of the first layer, or of the stack of scanned layers; None if there is no layer."""
    return next((at for at in (f"{BLOCK}_0", BLOCK) if f"{at}/LayerNorm_0/scale" in tensors), None)


def _classes(tensors: Tensors) -> int | None:
    return shape_of(tensors, "head/kernel")[1] if "head/kernel" in tensors else None


def _inferred(tensors: Tensors, heads: int | None = None) -> Json:
    """Return the fields of a model, inferred from its tensors; `heads` is their number unless a kernel shows it.

    The activation of MLPs, the epsilon of norms and a pooling without parameters are big_vision's defaults.
    """
    at = _first_block(tensors)
    scan = at == BLOCK
    p_h, p_w, _, width = shape_of(tensors, "embedding/kernel", 4)
    dense = shape_of(tensors, f"{at}/MlpBlock_0/Dense_0/kernel", 2 + scan)
    fields: Json = {
        "width": width, "mlp_dim": dense[-1], "patch_size": (p_h, p_w),
        "num_heads": heads or shape_of(tensors, f"{at}/{ATTENTION}/query/kernel", 3 + scan)[-2],
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
    return fields


BIG_VISION = Functions(
    lambda tensors, config: "embedding/kernel" in tensors and _first_block(tensors) is not None, _describe, _links
)


def _describe_authors(tensors: Tensors, config: Json) -> Description:
    at = f"{BLOCK}_0/{_module(tensors)}"
    if _first_block(tensors) != f"{BLOCK}_0":
        raise CheckpointError("the authors' ViT with scanned layers is not supported, only with unrolled ones")
    sides, inner = shape_of(tensors, f"{at}/{_dynamic(tensors, 'dw1')}", 4)[2:]
    if sides != 4 or inner % 4:
        raise CheckpointError(f"the authors' ViT: dw1 is of {sides} sides and width {inner}; expected 4 and 4·heads")
    fields = _inferred(tensors, inner // 4)
    fields |= {
        "compose": "both", "rank": 2, "groups": 1, "projection": True, "gate": True, "branches": "qk",
        "static": f"{at}/pre_proj/w" in tensors,
        "qk_norm": "layernorm" if f"{at}/{QK_NORMS['query_norm']}/scale" in tensors else None,
    }  # fmt: skip
    return Description("vit", _classes(tensors), fields)


def _authors_links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    shapes = shapes_of(description)
    ours, theirs = (f"{BLOCK}_{{}}/{module}" for module in (ATTENTION, _module(tensors or {}) or ATTENTION))
    found = []
    for path, shape in shapes.items():
        part, end = path.removeprefix(f"{ours}/").rpartition("/")[::2]
        if not path.startswith(ours):
            found.append(tensor(path, path, shape))
        elif part in DENSE:
            found.append(_projection(f"{theirs}/{DENSE[part]}/{end}", path, shape, tensors or {}))
        elif part in QK_NORMS:
            found.append(tensor(f"{theirs}/{QK_NORMS[part]}/{end}", path, shape))
        elif end == "w_b":
            found.append(tensor(f"{theirs}/{part}_proj/w", path, shape))
    dynamic = [f"{theirs}/{_dynamic(tensors or {}, end)}" for end in ("dw1", "qkw", "dd")]
    return in_all_layers([*found, *compositions(dynamic, ours, shapes)], description)


def _projection(theirs: str, ours: str, shape: Shape, tensors: Tensors) -> Link:
    """Link a projection of attention, whose kernel the authors' file may hold as a matrix."""
    sizes = [size or 0 for size in shape]
    first = tensors.get(theirs.format(0))
    matrix = first is not None and math.prod(first.shape) == math.prod(sizes)
    there = first.shape if first is not None and matrix else shape  # another size is an error
    return Link((theirs,), (ours,), lambda x: (x.reshape(sizes),), lambda x: (x,), (there,))


def _module(tensors: Tensors) -> str | None:
    """Return the name of the attention module in the authors' file, the parent of `dyn_w_proj`; None in other files."""
    found = (name.split("/") for name in tensors if "/dyn_w_proj/" in name)
    return next((parts[parts.index("dyn_w_proj") - 1] for parts in found), None)


def _dynamic(tensors: Tensors, name: str) -> str:
    """Return the path of the parameter `name` of the dynamic weights: NAME, or NAME/kernel in some files."""
    path = f"dyn_w_proj/{name}"
    return f"{path}/kernel" if any(found.endswith(f"{path}/kernel") for found in tensors) else path


AUTHORS = Functions(
    lambda tensors, config: "embedding/kernel" in tensors and _module(tensors) is not None,
    _describe_authors,
    _authors_links,
)
