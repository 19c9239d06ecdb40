"""Functions with a hand-written gradient that also have a forward mode, which `jax.jvp` and `jax.linearize` need.

A function with `jax.custom_vjp` has no forward mode. Here, the tangent of the output is a primitive that is linear in
the tangents of the inputs. Forward mode evaluates it as `jax.jvp` of a plain JAX function. Reverse mode transposes it,
and its transpose is the hand-written backward pass. Derivatives of higher order are those of the plain JAX function, so
that no kernel is ever differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dcvit.dcmha.numerics import is_float
from dcvit.dcmha.shapes import Array

Static = TypeVar("Static", bound=Hashable)
Inputs = TypeVar("Inputs")
Residuals = TypeVar("Residuals")
Results = TypeVar("Results")  # the output and the residuals
RESULTS = "dcmha_results"  # the name under which a policy of `jax.checkpoint` keeps the output and the residuals
Value: TypeAlias = object  # what JAX passes to the rules of a primitive: arrays, their types, symbolic zeros
Linear: TypeAlias = Callable[[Sequence[Array], Sequence[Array]], list[Array]]  # (known arrays, linear ones) -> results


def differentiable(
    forward: Callable[[Static, Inputs], tuple[Array, Residuals]],
    backward: Callable[[Static, Inputs, tuple[Array, Residuals], Array], Inputs],
    forward_mode: Callable[[Static, Inputs], Array],
    name: str | None = RESULTS,
) -> Callable[[Static, Inputs], Array]:
    """Return the function that `forward` computes, with a reverse mode and a forward mode.

    Args:
      forward: maps static options and a tree of arrays to the output and the residuals. The output has the shape and
        dtype of the tree's first array, as the output of attention has those of the queries.
      backward: maps options, inputs, the results of `forward`, and the gradient of the output to the gradients of the
        inputs. Gradients of integers and booleans are ignored and may be None.
      forward_mode: the same function in differentiable JAX operations.
      name: the name of the results of `forward` for policies of `jax.checkpoint`; None for no name.
    """
    gradients_of = _gradients(backward, forward_mode)

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def with_residuals(static: Static, inputs: Inputs) -> tuple[Array, Residuals]:
        out, residuals = forward(static, inputs)
        _check_type("the output", out, jax.tree.leaves(inputs)[0])
        return out, residuals

    def with_tangent(
        static: Static, primals: tuple[Inputs], tangents: tuple[Inputs]
    ) -> tuple[tuple[Array, Residuals], tuple[Array, Residuals]]:
        results = with_residuals(static, *primals)
        out, residuals = results if name is None else jax.tree.map(lambda x: checkpoint_name(x, name), results)
        known, tree = jax.tree.flatten((*primals, (out, residuals)))
        given = [t for t in jax.tree.leaves(tangents) if t.dtype != jax.dtypes.float0]

        def tangent(known: Sequence[Array], given: Sequence[Array]) -> list[Array]:
            inputs = jax.tree.unflatten(tree, known)[0]
            floats = iter(given)
            leaves, structure = jax.tree.flatten(inputs)
            each = [next(floats) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in leaves]
            along = jax.tree.unflatten(structure, each)
            return [jax.jvp(functools.partial(forward_mode, static), (inputs,), (along,))[1]]

        def gradients(known: Sequence[Array], d_out: Sequence[Array]) -> list[Array]:
            return gradients_of(static, *jax.tree.unflatten(tree, known), *d_out)

        (d_out,) = tangent_p.bind(*known, *given, count=len(known), tangent=tangent, gradients=gradients)
        return (out, residuals), (d_out, jax.tree.map(_zero_tangent, residuals))

    with_residuals.defjvp(with_tangent)
    return lambda static, inputs: with_residuals(static, inputs)[0]


def _gradients(
    backward: Callable[[Static, Inputs, Results, Array], Inputs], forward_mode: Callable[[Static, Inputs], Array]
) -> Callable[[Static, Inputs, Results, Array], list[Array]]:
    """Return a function like `backward` that returns the gradients of floating-point inputs alone, as a flat list.

    Its derivatives are those of `forward_mode`. Results of the forward pass, functions of the inputs, need no tangents.
    """

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def gradients(static: Static, inputs: Inputs, results: Results, d_out: Array) -> list[Array]:
        found = _of_floats(inputs, backward(static, inputs, results, d_out))
        for x, g in zip(_of_floats(inputs, inputs), found, strict=True):
            _check_type("a gradient", g, x)
        return found

    def with_tangent(
        static: Static, primals: tuple[Inputs, Results, Array], tangents: tuple[Inputs, Results, Array]
    ) -> tuple[list[Array], list[Array]]:
        def plain(inputs: Inputs, d_out: Array) -> list[Array]:
            return _of_floats(inputs, jax.vjp(functools.partial(forward_mode, static), inputs)[1](d_out)[0])

        moved = jax.jvp(plain, (primals[0], primals[2]), (tangents[0], tangents[2]))[1]
        return gradients(static, *primals), moved

    gradients.defjvp(with_tangent)
    return gradients


def _of_floats(inputs: Inputs, found: Inputs) -> list[Array]:
    """Return the leaves of `found` that belong to floating-point leaves of `inputs`."""
    return jax.tree.leaves(jax.tree.map(lambda x, g: g if is_float(x) else None, inputs, found))


def _check_type(name: str, found: Array, expected: Array) -> None:
    """Raise TypeError unless the array `found` has the shape and dtype of `expected`."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise TypeError(
            f"{name} is {found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}, as its input"
        )


def _zero_tangent(x: Array) -> Array | np.ndarray:
    return jnp.zeros_like(x) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0)


# The first `count` arguments are known arrays, in which the primitive is not linear. `tangent` maps both kinds of
# arguments to the result, `gradients` maps known arrays and the gradient of the result to gradients of the others.
tangent_p = Primitive("dcmha_tangent")
tangent_p.multiple_results = True


def _evaluate(*args: Array, count: int, tangent: Linear, gradients: Linear) -> list[Array]:
    return tangent(list(args[:count]), list(args[count:]))


def _result_type(*avals: Value, count: int, tangent: Linear, gradients: Linear) -> list[Value]:
    return [avals[count]]


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Value], *, count: int, tangent: Linear, gradients: Linear
) -> tuple[list[Array], list[Array]]:
    known, given = list(primals[:count]), list(primals[count:])
    d_known, d_given = ([ad.instantiate_zeros(t) for t in part] for part in (tangents[:count], tangents[count:]))
    evaluate = functools.partial(tangent_p.bind, count=count, tangent=tangent, gradients=gradients)
    out, total = evaluate(*known, *given), evaluate(*known, *d_given)
    if not all(isinstance(t, ad.Zero) for t in tangents[:count]):
        _, moved = jax.jvp(lambda known: tangent(known, given), (known,), (d_known,))
        total = [a + b for a, b in zip(total, moved, strict=True)]
    return out, total


def _transpose(
    cotangents: Sequence[Value], *args: Value, count: int, tangent: Linear, gradients: Linear
) -> list[Array | None]:
    d_out = [ad.instantiate_zeros(ct) for ct in cotangents]
    found = gradients(cast("list[Array]", list(args[:count])), d_out)
    wanted = [g if ad.is_undefined_primal(x) else None for x, g in zip(args[count:], found, strict=True)]
    return [None] * count + wanted


def _batch(
    args: Sequence[Array], axes: Sequence[int | None], *, count: int, tangent: Linear, gradients: Linear
) -> tuple[list[Array], list[int]]:
    known_axes = (list(axes[:count]), 0)  # the linear arguments are all batched, so that their gradients are too
    (size,) = {x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None}
    given = [batching.bdim_at_front(x, axis, size) for x, axis in zip(args[count:], axes[count:], strict=True)]
    each, each_gradients = (jax.vmap(f, in_axes=known_axes) for f in (tangent, gradients))
    out: list[Array] = tangent_p.bind(*args[:count], *given, count=count, tangent=each, gradients=each_gradients)
    return out, [0] * len(out)


tangent_p.def_impl(_evaluate)
tangent_p.def_abstract_eval(_result_type)
ad.primitive_jvps[tangent_p] = _jvp
ad.primitive_transposes[tangent_p] = _transpose
batching.primitive_batchers[tangent_p] = _batch
mlir.register_lowering(tangent_p, mlir.lower_fun(_evaluate, multiple_results=True))
