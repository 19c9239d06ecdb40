"""Kernels that misbehave as those of a chip can, for `dcvit.dcmha.check`: functions of a call of attention."""

import dataclasses
import itertools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha.backends.xla import blockwise

RUNS = itertools.count()


def right(call):
    return blockwise.run(call)


def host(function):
    """Zero, after a function of the host has run in each run of the program."""

    def run():
        return np.float32(function() or 0)

    return jax.lax.stop_gradient(jax.pure_callback(run, jax.ShapeDtypeStruct((), jnp.float32)))


def with_arrays(call, **arrays):
    return dataclasses.replace(call, inputs=call.inputs._replace(**arrays))


@jax.custom_vjp
def infinite_gradient(x):
    return x


infinite_gradient.defvjp(lambda x: (x, None), lambda _, d: (d.at[0, 0, 0, 0].set(jnp.inf),))


def with_infinite_gradient(call):
    return right(with_arrays(call, v=infinite_gradient(call.inputs.v)))


def with_nan(call):
    return right(call).at[-1, -1, -1, -1].set(jnp.nan)


def with_wrong_gradient(call):
    v = call.inputs.v
    return right(call) + 0.03 * jnp.sum(v - jax.lax.stop_gradient(v))


def with_zero_last_row(call):
    """The norm of causal outputs falls with the position, so that a single row hardly counts in that of all."""
    return right(call).at[:, -1].set(0)


def ignores_causality(call):
    return right(dataclasses.replace(call, options=dataclasses.replace(call.options, causal=False)))


def ignores_segments(call):
    return right(with_arrays(call, segments=None))


def spreads(call):
    """Attend to all keys where a query attends to none."""
    mask = call.inputs.mask
    return right(with_arrays(call, mask=mask | ~jnp.any(mask, axis=-1, keepdims=True)))


def races(call):
    """Two runs differ by less than the largest error."""
    return right(call) * (1 + 1e-5 * host(lambda: next(RUNS)).astype(call.inputs.q.dtype))


def does_not_compile(call):
    raise RuntimeError("Mosaic failed to compile\nmore lines")


def skips_by_the_first_example(call):
    """Ignore, in all examples, the keys that no query of the first example attends to."""
    ids = call.inputs.segments
    return right(with_arrays(call, mask=(ids.queries[:1, :, None] == ids.keys[:1, None, :])[:, None]))


def does_not_compile_without_gradients(call):
    @jax.custom_vjp
    def attend(q):
        return does_not_compile(call)

    attend.defvjp(lambda q: jax.vjp(lambda q: right(with_arrays(call, q=q)), q), lambda pull, d: pull(d))
    return attend(call.inputs.q)


def hangs(call):
    """Hang while the program runs."""
    return right(call) + host(lambda: time.sleep(1000))


def crashes(call):
    os.abort()
