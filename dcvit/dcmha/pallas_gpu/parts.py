"""Loop over parts of the examples and of the heads of a layer, whose arrays fit into the workspace of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from dcvit.dcmha.inputs import Inputs
from dcvit.dcmha.pallas_gpu.tiling import Partition
from dcvit.dcmha.shapes import Array

Axes = TypeVar("Axes")  # the axes of heads, in the form of a function's result
Result = TypeVar("Result")
NO_HEADS = -1


def head_axes(x: Inputs) -> Inputs:
    """Return the axis of each array that has the heads, in the form of `x`."""
    weights = (jax.tree.map(lambda a: a.ndim - 1, w) for w in (x.pre, x.post))
    others = (jax.tree.map(lambda _: NO_HEADS, a) for a in (x.mask, x.segments))
    return Inputs(2, 2, 2, *weights, *others)  # type: ignore[arg-type]  # numbers instead of arrays


def in_parts(
    compute: Callable[..., Result], size: Partition, args: tuple[Inputs, *tuple[Array, ...]], axes: Axes
) -> Result:
    """Return compute(*args), computed for one part of the examples and heads after the other.

    Args:
      compute: function of inputs and more arrays, whose results also have the examples as their first axis.
      size: the sizes of the parts.
      args: inputs, or inputs, gradients of the output (B T H D), and log-sum-exp (B H T).
      axes: the axis of the results that has the heads.
    """
    inputs, *more = args
    batch, mask = inputs.q.shape[0], inputs.mask
    if size.examples == batch and size.heads == 1:
        return compute(*args)
    common = mask if mask is not None and mask.shape[0] == 1 else None  # for all examples
    if common is not None:
        inputs = inputs._replace(mask=None)

    def split(x: Array, axis: int) -> Array:
        if axis == NO_HEADS:
            x = jnp.repeat(x, size.heads, axis=0)
        else:
            x = jnp.moveaxis(x.reshape(*x.shape[:axis], size.heads, -1, *x.shape[axis + 1 :]), axis, 1)
            x = x.reshape(-1, *x.shape[2:])
        return x.reshape(-1, size.examples, *x.shape[1:])

    def join(x: Array, axis: int) -> Array:
        x = jnp.moveaxis(x.reshape(batch, size.heads, *x.shape[2:]), 1, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    def part(args: tuple[Inputs, *tuple[Array, ...]]) -> Result:
        return compute(args[0] if common is None else args[0]._replace(mask=common), *args[1:])

    parts = jax.tree.map(split, (inputs, *more), (head_axes(inputs), *(2, 1)[: len(more)]))
    out: Result = jax.tree.map(join, lax.map(part, parts), axes)
    return out
