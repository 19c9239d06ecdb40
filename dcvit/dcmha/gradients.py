"""Attention with a backward pass of its own, whose results a policy of `jax.checkpoint` can keep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

from dcvit.dcmha.inputs import Inputs
from dcvit.dcmha.shapes import Array

Static = TypeVar("Static", bound=Hashable)
RESULTS = "dcmha_results"  # the name under which a policy of `jax.checkpoint` keeps the output and the residuals


def with_backward(
    forward: Callable[[Static, Inputs], tuple[Array, Any]],
    backward: Callable[[Static, Inputs, tuple[Array, Any], Array], Inputs],
) -> Callable[[Static, Inputs], Array]:
    """Return the function whose output is that of `forward`, and whose gradient is that of `backward`.

    It has a reverse mode only: `jax.jvp` and `jax.linearize` raise TypeError.

    Args:
      forward: maps static options and the inputs to the output and the residuals, a tree of arrays.
      backward: maps options, inputs, the results of `forward`, and the gradient of the output to the gradients of the
        inputs. Those of integers and booleans are None.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def attend(static: Static, inputs: Inputs) -> Array:
        return forward(static, inputs)[0]

    def save(static: Static, inputs: Inputs) -> tuple[Array, tuple[Inputs, tuple[Array, Any]]]:
        results = jax.tree.map(lambda x: checkpoint_name(x, RESULTS), forward(static, inputs))
        return results[0], (inputs, results)

    def gradients(static: Static, saved: tuple[Inputs, tuple[Array, Any]], d_out: Array) -> tuple[Inputs]:
        return (backward(static, *saved, d_out),)

    attend.defvjp(save, gradients)
    return attend
