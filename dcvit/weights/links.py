"""Links between tensors of another library and parameters of this project, for both directions.

A family of models is described by a list of links. `parameters` reads tensors as parameters and `write` streams
parameters into tensors; both handle one link at a time, so that no more than its arrays are in memory.

Most links follow from a table of names (`from_table`), which maps modules and tensors of another library to modules and
parameters here; "{}" in both names stands for the number of a layer. The described model determines which parameters a
module has, such as a bias, and their shapes; entries for modules that it lacks have no effect. PyTorch's linear layers
store "out in", and convolutions "out in height width".
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.models.trees import matrix_axes
from dcvit.parallel.trees import Tensor, Tensors, check_tree
from dcvit.weights.family import Description, Shape, build, shapes_of

Arrays: TypeAlias = Sequence[np.ndarray]
Table = Mapping[str, str | Sequence[str]]  # several modules here: one linear layer there computes their outputs
ENDS = {"kernel": "weight", "scale": "weight", "embedding": "weight"}  # names of parameters that PyTorch has others for
COMPOSITIONS = [(stage, side) for stage in ("pre", "post") for side in "qk"]


class Link(NamedTuple):
    """Tensors of another library, and the parameters of this project that hold the same values.

    Fields:
      theirs: names of the tensors.
      ours: paths of the parameters, such as "head/kernel", in the tree of unrolled layers.
      to_ours: function from the arrays of `theirs` to those of `ours`, both in order.
      to_theirs: its inverse.
      shapes: the shapes of the tensors, in order; None in a shape stands for any size.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: Callable[..., Arrays]
    to_theirs: Callable[..., Arrays]
    shapes: tuple[Shape, ...]


def tensor(theirs: str, ours: str, shape: Shape) -> Link:
    """Link a tensor to the parameter with the same values and shape; sizes of None are not checked."""
    return Link((theirs,), (ours,), lambda x: (x,), lambda x: (x,), (shape,))


def stacked(theirs: str, ours: Sequence[str], shape: Sequence[int], axis: int, there: Sequence[int] = ()) -> Link:
    """Link a tensor that holds several parameters along one axis.

    Args:
      theirs, ours: the names of the tensor and of the parameters.
      shape: the tensor's shape in which each index of `axis` is one parameter.
      axis: the axis.
      there: the tensor's shape in a file; () means `shape`.
    """
    there = tuple(there or shape)
    return Link(
        (theirs,), tuple(ours),
        lambda x: list(np.moveaxis(x.reshape(shape), axis, 0)),
        lambda *parts: (np.stack(parts, axis=axis).reshape(there),), (there,),
    )  # fmt: skip


def parameters(links: Sequence[Link], tensors: Tensors) -> dict[str, Tensor]:
    """Return the parameters by path; each is read on demand.

    Reading one parameter of a link reads all of them; they are kept until a parameter of another link is read, or all
    are returned. The parameters' shapes are computed from the tensors' shapes, which `check` compared, without reading.
    """
    held: dict[tuple[int, str], np.ndarray] = {}

    def read(number: int, path: str) -> np.ndarray:
        if (number, path) not in held:
            held.clear()
            link = links[number]
            values = link.to_ours(*(tensors[name].read() for name in link.theirs))
            held.update(((number, path), x) for path, x in zip(link.ours, values, strict=True))
        return held.pop((number, path))

    zero = np.zeros((), np.float32)
    found = {}
    for number, link in enumerate(links):
        announced = [np.broadcast_to(zero, tensors[name].shape) for name in link.theirs]  # occupies no memory
        for path, array in zip(link.ours, link.to_ours(*announced), strict=True):
            found[path] = Tensor(array.shape, functools.partial(read, number, path))
    return found


def write(links: Sequence[Link], params: Mapping[str, Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the value of each tensor of the other library, from parameters by their paths."""
    for link in links:
        values = link.to_theirs(*(params[path].read() for path in link.ours))
        yield from zip(link.theirs, (np.asarray(value, order="C") for value in values), strict=True)


def check(links: Sequence[Link], tensors: Tensors, what: str, unused: re.Pattern[str] | None = None) -> None:
    """Check that the links name all tensors of a file, and no others, with their shapes.

    Args:
      links: the links of the family.
      tensors: the tensors of the file.
      what: the file, for the message.
      unused: matches the names of tensors that are not parameters, such as buffers.

    Raises:
      CheckpointError: names or shapes differ; both sides are listed.
    """
    shapes = {name: shape for link in links for name, shape in zip(link.theirs, link.shapes, strict=True)}
    found = {name: x.shape for name, x in tensors.items() if name in shapes or not (unused and unused.fullmatch(name))}
    check_tree(found, {name: _sizes(shape, found.get(name, ())) for name, shape in shapes.items()}, what)


def _sizes(shape: Shape, found: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shape` with each None replaced by the size in `found`, or by -1 if the number of axes differs."""
    known = found if len(found) == len(shape) else (-1,) * len(shape)
    return tuple(other if size is None else size for size, other in zip(shape, known, strict=True))


def from_table(table: Table, description: Description, *, in_out: bool = False, by_head: bool = False) -> list[Link]:
    """Return the links of a table of names, for all layers of a model.

    Args:
      table: names of modules or tensors in the other library -> names here.
      description: the model.
      in_out: linear layers store "in out", as GPT-2's.
      by_head: the outputs of a layer for several modules here are ordered by head, then module, as GPT-NeoX's.
    """
    shapes, found = shapes_of(description), []
    for theirs, ours in table.items():
        group = (ours,) if isinstance(ours, str) else tuple(ours)
        paths = [path for path in shapes if path == group[0] or path.startswith(f"{group[0]}/")]
        for path in paths if len(group) == 1 else paths[::-1]:  # of several modules, the kernel is first
            end = path.removeprefix(group[0])
            parts = end.split("/")[1:]
            name = ".".join([theirs, *parts[:-1], *(ENDS.get(part, part) for part in parts[-1:])])
            name = name.replace("_.", "_") if theirs.endswith("_") else name  # such as in_proj_weight
            members = tuple(f"{module}{end}" for module in group)
            found.append(_link(name, members, shapes[path], in_out, by_head and len(group) > 1))
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


def _link(theirs: str, ours: tuple[str, ...], shape: Shape, in_out: bool, by_head: bool) -> Link:
    """Link a tensor of PyTorch to parameters of one kind: of a convolution, of a linear layer, or of another module."""
    end = ours[0].rpartition("/")[2]
    if end == "kernel" and len(shape) == 4:
        there = (shape[3], shape[2], *shape[:2])
        return Link(
            (theirs,), ours, lambda x: (x.transpose(2, 3, 1, 0),), lambda x: (x.transpose(3, 2, 0, 1),), (there,)
        )
    if end in ("kernel", "bias"):
        return _linear(theirs, ours, shape, in_out, by_head)
    return tensor(theirs, ours[0], shape)


def _linear(theirs: str, ours: tuple[str, ...], shape: Shape, in_out: bool, by_head: bool) -> Link:
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
    (first,) = from_table({embedding: "embedding"}, description)
    weight, copy = first.theirs[0], f"{head}.weight"
    if "head/kernel" in shapes_of(description) or copy not in (tensors or ()):
        return [first, *from_table({head: "head"}, description)]

    def to_ours(x: np.ndarray, y: np.ndarray) -> Arrays:
        if not np.array_equal(x, y):
            raise CheckpointError(f"{copy} differs from {weight}, but tie_word_embeddings is true")
        return (x,)

    return [Link((weight, copy), first.ours, to_ours, lambda x: (x, x), first.shapes * 2)]


def compositions(theirs: Sequence[str], ours: str, shapes: Mapping[str, Shape]) -> list[Link]:
    """Link the weights of the C = 4 compositions of a layer of the authors' models, in G = 1 group.

    Args:
      theirs: names of both layers of the dynamic projections (M G C I and G C I 2R H), and of the gates (M G C·H).
      ours: path of the attention.
      shapes: the parameters of the model.
    """
    width, _, inner = (size or 0 for size in shapes[f"{ours}/pre/w_q1"])
    heads = shapes[f"{ours}/pre/w_qg"][1] or 0
    first, second, gates = theirs

    def paths(end: str) -> list[str]:
        return [f"{ours}/{stage}/w_{side}{end}" for stage, side in COMPOSITIONS]

    return [
        stacked(first, paths("1"), (width, 1, 4, inner), 2),
        stacked(second, paths("2"), (1, 4, inner, inner), 1, (1, 4, inner, inner // max(heads, 1), heads)),
        stacked(gates, paths("g"), (width, 4, heads), 1, (width, 1, 4 * heads)),
    ]


def averaged(theirs: Sequence[str], ours: str, inputs: int, outputs: int) -> list[Link]:
    """Link two linear layers, whose outputs are averaged, to one linear layer here of their concatenated inputs."""
    weights, biases = (tuple(f"{name}.{end}" for name in theirs) for end in ("weight", "bias"))
    return [
        Link(
            weights, (f"{ours}/kernel",),
            lambda *arrays: (np.concatenate([x.T / np.array(2, x.dtype) for x in arrays]),),
            lambda x: [part.T * np.array(2, x.dtype) for part in np.split(x, 2)], ((outputs, inputs),) * 2,
        ),
        Link(
            biases, (f"{ours}/bias",), lambda *arrays: (np.asarray(np.mean(arrays, axis=0, dtype=np.float32)),),
            lambda x: (x, x), ((outputs,),) * 2,
        ),
    ]  # fmt: skip


def tokens_in_front(positions: str, before: Mapping[str, int], embedded: int, description: Description) -> Link:
    """Link the tokens before the patches, and the position embeddings, which this project has for patches only.

    A token's position embedding is added to the token, which gives the same model; when writing, it is zero.

    Args:
      positions: the tensor of position embeddings; without a first axis of length 1 if it is the weight of a module.
      before: the number of tokens in each tensor, in order; the first is the class token if the model has one.
      embedded: number of these tokens with a position embedding; their rows precede those of the patches.
      description: the model.
    """
    module = build(description)
    width, has_cls, batched = module.width, module.pool_type.startswith("tok"), not positions.endswith(".weight")
    count = sum(before.values())
    ours = ["cls"] * has_cls + ["registers"] * (count > has_cls)

    def to_ours(*arrays: np.ndarray) -> Arrays:
        table = arrays[-1].reshape(1, -1, width)
        if not count:
            return [table]
        tokens = np.concatenate([array.reshape(1, -1, width) for array in arrays[:-1]], axis=1, dtype=np.float32)
        tokens[:, :embedded] += table[:, :embedded]
        return [*[tokens[:, :1]] * has_cls, *[tokens[:, has_cls:]] * (count > has_cls), table[:, embedded:]]

    def to_theirs(*arrays: np.ndarray) -> Arrays:
        table = np.concatenate([np.zeros((1, embedded, width), arrays[-1].dtype), arrays[-1]], axis=1)
        tokens = np.concatenate(arrays[:-1], axis=1) if count else table[:, :0]
        parts = np.split(tokens, np.cumsum([*before.values()]), axis=1)[:-1]
        return [*parts, table if batched else table[0]]

    table_shape: Shape = (1, None, width) if batched else (None, width)
    return Link(
        (*before, positions), (*ours, "pos_embedding"), to_ours, to_theirs,
        (*((1, size, width) for size in before.values()), table_shape),
    )  # fmt: skip


def shape_of(tensors: Tensors, name: str, axes: int = 2) -> tuple[int, ...]:
    """Return the shape of a tensor. Raises CheckpointError if it is absent, or has not `axes` axes."""
    if name not in tensors:
        raise CheckpointError(f"the file has no {name}")
    shape = tensors[name].shape
    if len(shape) != axes or 0 in shape:
        raise CheckpointError(f"{name} has shape {shape}, expected {axes} axes")
    return shape


def depth_of(tensors: Tensors, before: str) -> int:
    """Return the number of layers, whose tensors are named `before` and a number."""
    found = (re.match(rf"{re.escape(before)}(\d+)[./]", name) for name in tensors)
    return len({match[1] for match in found if match})
