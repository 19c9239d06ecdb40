"""Links (`dcvit.weights.links`) between PyTorch's layers and parameters of this project, from tables of names.

A table maps modules and tensors of another library to modules and parameters here; "{}" in both names stands for the
number of a layer. The described model determines which parameters a module has, such as a bias, and their shapes;
entries for modules that it lacks have no effect. PyTorch's linear layers store "out in", and convolutions "out in
height width".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.models.trees import matrix_axes
from dcvit.weights.family import Description, build, shapes_of
from dcvit.weights.links import Arrays, Link, Shape, tensor
from dcvit.weights.tensors import Tensors

BLOCK = "Transformer/decoderblock_{}"
ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_0"
ENDS = {"kernel": "weight", "scale": "weight", "embedding": "weight"}  # names of parameters that PyTorch has others for
Table = Mapping[str, str | Sequence[str]]  # several modules here: one linear layer there computes their outputs


def links(table: Table, description: Description, *, in_out: bool = False, by_head: bool = False) -> list[Link]:
    """Return the links of a table of names, for all layers of a model.

    Args:
      table: names of modules or tensors in the other library -> names here.
      description: the model.
      in_out: linear layers store "in out", as GPT-2's.
      by_head: the outputs of a layer for several modules here are ordered by head, then module, as GPT-NeoX's.
    """
    shapes, found = shapes_of(description), []
    for theirs, ours in table.items():
        if isinstance(ours, str):
            found += module(theirs, ours, shapes, in_out=in_out)
            continue
        for end, their_end in (("kernel", "weight"), ("bias", "bias")):
            paths = tuple(f"{name}/{end}" for name in ours)
            if paths[0] in shapes:
                name = f"{theirs}{their_end}" if theirs.endswith("_") else f"{theirs}.{their_end}"
                found.append(_linear(name, paths, shapes[paths[0]], in_out, by_head))
    return in_all_layers(found, description)


def in_all_layers(found: Sequence[Link], description: Description) -> list[Link]:
    """Return the links `found`; one whose names contain "{}" is replaced by a link for each layer."""
    result = [link for link in found if "{}" not in link.theirs[0]]
    layered = [link for link in found if "{}" in link.theirs[0]]
    for i in range(build(description).depth):
        for link in layered:
            theirs, ours = (tuple(name.format(i) for name in names) for names in (link.theirs, link.ours))
            result.append(link._replace(theirs=theirs, ours=ours))
    return result


def module(theirs: str, ours: str, shapes: Mapping[str, Shape], *, in_out: bool = False) -> list[Link]:
    """Return links for the parameter `ours`, or all parameters of the module; none if the model does not have it."""
    if ours in shapes:
        return [tensor(theirs, ours, shapes[ours])]
    found = []
    for path in (path for path in shapes if path.startswith(f"{ours}/")):
        *modules, end = path.removeprefix(f"{ours}/").split("/")
        name, shape = ".".join([theirs, *modules, ENDS.get(end, end)]), shapes[path]
        if end == "kernel" and len(shape) == 4:
            found.append(_convolution(name, path, shape))
        elif end in ("kernel", "bias"):
            found.append(_linear(name, (path,), shape, in_out))
        else:
            found.append(tensor(name, path, shape))
    return found


def _convolution(theirs: str, ours: str, shape: Shape) -> Link:
    """Link the weight of PyTorch's convolution that embeds patches to the kernel here."""
    there = (shape[3], shape[2], *shape[:2])
    return Link(
        (theirs,), (ours,), lambda x: (x.transpose(2, 3, 1, 0),), lambda x: (x.transpose(3, 2, 0, 1),), (there,)
    )


def _linear(theirs: str, ours: tuple[str, ...], shape: Shape, in_out: bool, by_head: bool = False) -> Link:
    """Link the weight or the bias of a linear layer to the kernels or biases of one or several modules."""
    sizes = [size or 0 for size in shape]
    axes = (matrix_axes(ours[0]) or (1, 1))[0] if ours[0].endswith("/kernel") else 0
    inputs, outputs = [math.prod(sizes[:axes])][:axes], sizes[axes:]  # a bias has no inputs
    count, size, groups = len(ours), math.prod(outputs), outputs[0] if by_head else 1
    there = (count * size, *inputs)

    def to_ours(x: np.ndarray) -> Arrays:
        parts = (x.T if in_out else x).reshape(groups, count, size // groups, *inputs)
        return [parts[:, i].reshape(size, *inputs).T.reshape(sizes) for i in range(count)]

    def to_theirs(*parts: np.ndarray) -> Arrays:
        rows = [part.reshape(-1, size).T if inputs else part.reshape(size) for part in parts]
        x = np.stack([row.reshape(groups, size // groups, *row.shape[1:]) for row in rows], axis=1)
        x = x.reshape(count * size, *rows[0].shape[1:])
        return (x.T if in_out else x,)

    return Link((theirs,), ours, to_ours, to_theirs, (there[::-1] if in_out else there,))


def embedding_and_head(
    embedding: str, head: str, description: Description, tensors: Tensors | None = None
) -> list[Link]:
    """Link the modules of embedding and head; a tied head is absent from the file, or equal to the embedding."""
    shapes = shapes_of(description)
    (first,) = module(embedding, "embedding", shapes)
    weight, copy = first.theirs[0], f"{head}.weight"
    if "head/kernel" in shapes or copy not in (tensors or ()):
        return [first, *module(head, "head", shapes)]

    def check_equal(x: np.ndarray, y: np.ndarray) -> None:
        if not np.array_equal(x, y):
            raise CheckpointError(f"{copy} differs from {weight}, but tie_word_embeddings is true")

    return [Link((weight, copy), first.ours, lambda x, _: (x,), lambda x: (x, x), first.shapes * 2, check_equal)]
