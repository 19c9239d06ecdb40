"""Links between tensors of another library and parameters of this project, for both directions.

A family of models is described by a list of links. `parameters` reads tensors as parameters and `write` streams
parameters into tensors; both handle one link at a time, so that no more than its arrays are in memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.parallel.trees import check_tree
from dcvit.weights.tensors import Tensor, Tensors

Arrays: TypeAlias = Sequence[np.ndarray]
Shape: TypeAlias = tuple[int | None, ...]  # None stands for any size


class Link(NamedTuple):
    """Tensors of another library, and the parameters of this project that hold the same values.

    Fields:
      theirs: names of the tensors.
      ours: paths of the parameters, such as "head/kernel", in the tree of unrolled layers.
      to_ours: function from the arrays of `theirs` to those of `ours`, both in order.
      to_theirs: its inverse.
      shapes: the shapes of the tensors, in order; None in a shape stands for any size.
      check: function of the tensors' arrays that raises CheckpointError if their values contradict each other.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: Callable[..., Arrays]
    to_theirs: Callable[..., Arrays]
    shapes: tuple[Shape, ...]
    check: Callable[..., None] | None = None


def tensor(theirs: str, ours: str, shape: Shape, our_shape: Shape | None = None) -> Link:
    """Link a tensor to a parameter with the same values in the same order.

    Args:
      theirs, ours: the names of tensor and parameter.
      shape: expected shape of the tensor; sizes of None are not checked.
      our_shape: shape of the parameter; None means that of the tensor.
    """
    if our_shape in (None, shape):
        return Link((theirs,), (ours,), lambda x: (x,), lambda x: (x,), (shape,))
    return Link((theirs,), (ours,), lambda x: (x.reshape(our_shape),), lambda x: (x.reshape(shape),), (shape,))


def parameters(links: Sequence[Link], tensors: Tensors) -> dict[str, Tensor]:
    """Return the parameters by path; each is read on demand.

    Reading one parameter of a link reads all of them; they are kept until a parameter of another link is read, or all
    are returned. The parameters' shapes are computed from the tensors' shapes, without reading.

    Raises:
      CheckpointError: a tensor has a shape that its link cannot convert.
    """
    held: dict[tuple[int, str], np.ndarray] = {}

    def read(number: int, path: str) -> np.ndarray:
        if (number, path) not in held:
            held.clear()
            link = links[number]
            arrays = [tensors[name].read() for name in link.theirs]
            if link.check:
                link.check(*arrays)
            held.update(((number, path), x) for path, x in zip(link.ours, _to_ours(link, arrays), strict=True))
        return held.pop((number, path))

    zero = np.zeros((), np.float32)
    found = {}
    for number, link in enumerate(links):
        announced = [np.broadcast_to(zero, tensors[name].shape) for name in link.theirs]  # occupies no memory
        for path, array in zip(link.ours, _to_ours(link, announced), strict=True):
            found[path] = Tensor(array.shape, functools.partial(read, number, path))
    return found


def _to_ours(link: Link, arrays: Arrays) -> Arrays:
    try:
        return link.to_ours(*arrays)
    except (ValueError, IndexError):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(link.theirs, arrays, strict=True))
        raise CheckpointError(f"unexpected shape: {shapes}, for {', '.join(link.ours)}") from None


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
