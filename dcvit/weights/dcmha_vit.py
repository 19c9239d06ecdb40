"""Vision Transformers of the authors of DCMHA: their fork of big_vision, with composed attention.

A layer's attention has the dynamic weights of all four sides c (pre-compose by query and by key, then post-compose) in
one module: `dyn_w_proj/dw1` (M, 1, c, I), `qkw` (1, c, I, 2R, H), whose first R rows are the down projection, and `dd`
(M, 1, c·H), with I = 2·R·H. The static projections are `pre_proj/w` and `post_proj/w`. R is 2, and G is 1.
https://arxiv.org/abs/2405.08553, Section 4.5.
"""

from __future__ import annotations

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights import big_vision, vit_links
from dcvit.weights.family import Description
from dcvit.weights.links import Arrays, Link, Shape
from dcvit.weights.tensors import Json, Tensors

OURS = vit_links.ATTENTION
SIDES = [(where, side) for where in ("pre", "post") for side in "qk"]
DENSE = {"query_dense": "query", "key_dense": "key", "value_dense": "value", "o_dense": "out"}
NORMS = {"query_ln": "query_norm", "key_ln": "key_norm"}


def matches(tensors: Tensors, config: Json) -> bool:
    """Recognize a big_vision tree whose attention has `dyn_w_proj`."""
    return "embedding/kernel" in tensors and _module(tensors) is not None


def describe(tensors: Tensors, config: Json) -> Description:
    """Describe the model; see `dcvit.weights.family.Family`."""
    name = _module(tensors) or OURS
    if big_vision.first_block(tensors) != f"{big_vision.BLOCK}_0":
        raise CheckpointError("the authors' ViT with scanned layers is not supported, only with unrolled ones")
    at = f"{big_vision.BLOCK}_0/{name}"
    _, _, splits, inner = vit_links.shape_of(tensors, f"{at}/{_dyn(tensors, 'dw1')}", "the authors' ViT", axes=4)
    width = vit_links.shape_of(tensors, "embedding/kernel", "the authors' ViT", axes=4)[-1]
    heads = inner // 4
    kernel = tensors.get(f"{at}/query_dense/kernel")
    if splits != 4 or inner % 4 or kernel is None or width % max(1, heads):
        raise CheckpointError(
            f"the authors' ViT: {at}/dyn_w_proj is of {splits} sides and inner width {inner} for model width {width}; "
            "expected 4 sides, 4 times the number of heads, and query_dense"
        )
    fields: Json = big_vision.infer(_renamed(tensors, width, heads), OURS)
    fields |= {"compose": "both", "rank": 2, "groups": 1, "projection": True, "gate": True, "branches": "qk"}
    fields["static"] = f"{at}/pre_proj/w" in tensors
    fields["qk_norm"] = "layernorm" if f"{at}/query_ln/scale" in tensors else None
    classes = vit_links.shape_of(tensors, "head/kernel", "the authors' ViT")[1] if "head/kernel" in tensors else None
    return Description("vit", classes, fields)


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    """Return the links; see `dcvit.weights.family.Family`."""
    fields = vit_links.settings(description)
    name = OURS if tensors is None else _module(tensors) or OURS
    composition = ("/pre/", "/post/", "_norm/scale")
    found = []
    for path, shape in big_vision.parameters(description).items():
        if path.startswith(big_vision.BLOCK) and f"/{OURS}/" in path:
            if not any(part in path for part in composition):
                found.append(_projection(path, shape, name, tensors))
        else:
            found.append(vit_links.tensor(path, path, shape))
    for layer in range(fields["depth"]):
        at = f"{big_vision.BLOCK}_{layer}"
        found += _composition(f"{at}/{name}", f"{at}/{OURS}", fields, tensors)
    return found


def unused(name: str) -> bool:
    """Return True for no array: the files hold parameters only."""
    return False


def _projection(path: str, shape: Shape, name: str, tensors: Tensors | None) -> Link:
    """Link a projection of attention, whose kernel the authors may store as a matrix."""
    theirs = path.replace(f"/{OURS}/", f"/{name}/")
    for old, new in DENSE.items():
        theirs = theirs.replace(f"/{name}/{new}/", f"/{name}/{old}/")
    sizes = [size or 0 for size in shape]
    found = tensors[theirs].shape if tensors is not None and theirs in tensors else tuple(sizes)
    if int(np.prod(found)) != int(np.prod(sizes)):
        found = tuple(sizes)  # the check of shapes reports it
    return vit_links.tensor(theirs, path, found, sizes)


def _composition(theirs: str, ours: str, fields: Json, tensors: Tensors | None) -> list[Link]:
    """Return the links of the compositions of a layer, and of its norms of queries and keys."""
    width, heads, rank = fields["width"], fields["num_heads"], 2
    inner = 2 * rank * heads

    def names(end: str) -> tuple[str, ...]:
        return tuple(f"{ours}/{where}/w_{side}{end}" for where, side in SIDES)

    def down(x: np.ndarray) -> Arrays:
        return [x[:, :, c] for c in range(4)]

    def second(x: np.ndarray) -> Arrays:
        return [x[:, c].reshape(1, inner, inner) for c in range(4)]

    def gates(x: np.ndarray) -> Arrays:
        return np.split(x[:, 0], 4, axis=-1)

    found = [
        Link((f"{theirs}/{_dyn(tensors, 'dw1')}",), names("1"), down,
             lambda *parts: (np.stack(parts, axis=2),), ((width, 1, 4, inner),)),
        Link((f"{theirs}/{_dyn(tensors, 'qkw')}",), names("2"), second,
             lambda *parts: (np.stack([part.reshape(1, inner, 2 * rank, heads) for part in parts], axis=1),),
             ((1, 4, inner, 2 * rank, heads),)),
        Link((f"{theirs}/{_dyn(tensors, 'dd')}",), names("g"), gates,
             lambda *parts: (np.concatenate(parts, axis=-1)[:, None],), ((width, 1, 4 * heads),)),
    ]  # fmt: skip
    if fields["static"]:
        for where in ("pre", "post"):
            found.append(vit_links.tensor(f"{theirs}/{where}_proj/w", f"{ours}/{where}/w_b", (1, heads, heads)))
    if fields["qk_norm"]:
        for old, new in NORMS.items():
            found.append(vit_links.tensor(f"{theirs}/{old}/scale", f"{ours}/{new}/scale", (width // heads,)))
    return found


def _module(tensors: Tensors) -> str | None:
    """Return the name of the attention module, the parent of `dyn_w_proj`."""
    found = (name.split("/") for name in tensors if "/dyn_w_proj/" in name)
    return next((parts[parts.index("dyn_w_proj") - 1] for parts in found), None)


def _dyn(tensors: Tensors | None, name: str) -> str:
    """Return the path of a parameter of the dynamic weights, which may be the kernel of a module."""
    path = f"dyn_w_proj/{name}"
    nested = tensors is not None and any(found.endswith(f"{path}/kernel") for found in tensors)
    return f"{path}/kernel" if nested else path


def _renamed(tensors: Tensors, width: int, heads: int) -> Tensors:
    """Return the tensors from which big_vision's family infers the sizes."""
    at = f"{big_vision.BLOCK}_0/{OURS}/query/kernel"
    kernel = next(x for name, x in tensors.items() if name.endswith("/query_dense/kernel"))
    return {**tensors, at: kernel._replace(shape=(width, heads, width // heads))}
