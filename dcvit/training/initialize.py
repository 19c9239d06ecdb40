"""Random initial parameters, by small programs that parameters with equal initializers share.

One program for all parameters would contain a random generator for each of them, and compile for longer than a
training step does. The values are those that one program computes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import Sharding
from jaxtyping import PyTree

LEVEL = "xla_backend_optimization_level"  # of the compiler for CPUs; 1 takes half the time and gives the same values


def initialize(init: Callable[[jax.Array], PyTree], words: np.ndarray, places: PyTree) -> PyTree:
    """Return `init(words)`, where `words` are the data of a random key; None where `places` has no sharding.

    Args:
      init: function that traces to random keys, and to operations on each of them.
      words: its argument.
      places: the sharding of each result; None for a result that is not needed.
    """
    traced, shapes = jax.make_jaxpr(init, return_shape=True)(words)
    results = traced.jaxpr.outvars
    shardings = dict(enumerate(jax.tree.leaves(places, is_leaf=lambda x: x is None)))
    groups = _independent(traced, [i for i, sharding in shardings.items() if sharding is not None])
    needed = list(dict.fromkeys(key for _, keys, _ in groups for key in keys))
    makers = [eqn for eqn in traced.jaxpr.eqns if needed and _makes_keys(eqn)]
    keys = dict(zip(needed, jaxpr_as_fun(_part(traced, traced.jaxpr.invars, makers, needed))(words), strict=True))
    data = {key: np.asarray(jax.random.key_data(value)) for key, value in keys.items()}  # on the host, for any mesh
    programs: dict[Hashable, Callable[..., list[jax.Array]]] = {}
    found: dict[int, jax.Array] = {}
    for eqns, inputs, outputs in groups:
        placed = [shardings[i] for i in outputs]
        name = _signature(inputs, eqns, [results[i] for i in outputs], placed)
        if name not in programs:
            part = _part(traced, inputs, eqns, [results[i] for i in outputs])
            is_cpu = all(device.platform == "cpu" for device in placed[0].device_set)
            options = {LEVEL: 1} if is_cpu and LEVEL not in os.environ.get("XLA_FLAGS", "") else None
            function = functools.partial(_from_data, part)
            programs[name] = jax.jit(function, out_shardings=placed, compiler_options=options)
        found |= zip(outputs, programs[name](*(data[key] for key in inputs)), strict=True)
    return jax.tree.unflatten(jax.tree.structure(shapes), [found.get(i) for i in range(len(results))])


def _from_data(part: ClosedJaxpr, *data: jax.Array) -> list[jax.Array]:
    return jaxpr_as_fun(part)(*map(jax.random.wrap_key_data, data))


def _makes_keys(eqn: JaxprEqn) -> bool:
    dtypes = [getattr(var.aval, "dtype", np.float32) for var in eqn.outvars]
    return all(jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in dtypes)


def _independent(traced: ClosedJaxpr, outputs: Iterable[int]) -> list[tuple[list[JaxprEqn], list[Var], list[int]]]:
    """Return groups of outputs, by number, that share no operation except on keys: (operations, keys, outputs)."""
    eqns = traced.jaxpr.eqns
    makers = {var: i for i, eqn in enumerate(eqns) for var in eqn.outvars}
    groups: list[tuple[set[int], dict[Var, None], list[int]]] = []
    for output in outputs:
        inside, keys, members = set[int](), dict[Var, None](), [output]
        waiting = [traced.jaxpr.outvars[output]]
        while waiting:
            var = waiting.pop()
            if isinstance(var, Literal) or (i := makers.get(var)) is None or i in inside:
                continue
            if _makes_keys(eqns[i]):
                keys[var] = None
            else:
                inside.add(i)
                waiting += eqns[i].invars
        for group in [group for group in groups if group[0] & inside or not (group[1] or keys)]:
            groups.remove(group)
            inside, keys, members = inside | group[0], group[1] | keys, group[2] + members
        groups.append((inside, keys, members))
    return [([eqns[i] for i in sorted(inside)], [*keys], members) for inside, keys, members in groups]


def _part(traced: ClosedJaxpr, inputs: Sequence[Var], eqns: Sequence[JaxprEqn], outputs: Sequence[Var]) -> ClosedJaxpr:
    jaxpr = traced.jaxpr.replace(invars=[*inputs], eqns=[*eqns], outvars=[*outputs])
    return ClosedJaxpr(jaxpr, traced.consts)


def _signature(
    inputs: Sequence[Var], eqns: Sequence[JaxprEqn], outputs: Sequence[Var], places: Sequence[Sharding]
) -> Hashable:
    """Return a key that is equal for equal functions with equally placed results."""
    numbers: dict[Var, int] = {var: i for i, var in enumerate(inputs)}

    def operand(var: Var | Literal) -> Hashable:
        return (repr(var.val), var.aval) if isinstance(var, Literal) else numbers.get(var, var)

    operations: list[Hashable] = [tuple(var.aval for var in inputs)]
    for eqn in eqns:
        operands = tuple(map(operand, eqn.invars))
        numbers |= {var: len(numbers) + i for i, var in enumerate(eqn.outvars)}
        params = tuple((name, x if isinstance(x, Hashable) else id(x)) for name, x in eqn.params.items())
        operations.append((eqn.primitive, operands, params))
    return (*operations, tuple(map(operand, outputs)), tuple(places))
