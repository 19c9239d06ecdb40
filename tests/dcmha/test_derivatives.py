"""Forward mode, second derivatives and batches of derivatives: every implementation agrees with the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import random_case, relative_errors, worst

from dcvit import dcmha
from dcvit.dcmha import blockwise, reference
from dcvit.dcmha.pallas_gpu import api as gpu
from dcvit.dcmha.pallas_tpu import api as tpu
from dcvit.dcmha.pallas_tpu import decode as tpu_decode

CASES = {
    "causal": {"causal": True},
    "window, mask": {"window": 7, "mask": (2, 1, 24, 24)},
    "groups, shared keys": {"key_heads": 2, "groups": 2, "branches": "qkpgs"},
    "plain": {"branches": None},
}


def tangents(args):
    draw = np.random.default_rng(3)
    return jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), args)


def check_forward_mode(attention, args, options):
    """`jax.jvp` and `jax.linearize` give the output and the tangent of the reference."""

    @functools.partial(jax.jit, static_argnums=0)
    def both(attention, args, along):
        out, linear = jax.linearize(lambda *a: attention(*a, **options), *args)
        return jax.jvp(lambda *a: attention(*a, **options), args, along), (out, linear(*along))

    (out, tangent), linearized = both(attention, args, tangents(args))
    expected = both(reference.attention, args, tangents(args))[0]
    assert worst(relative_errors((out, tangent), expected)) < 1e-5
    assert worst(relative_errors(linearized, expected)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["window, mask", *(pytest.param(c, marks=pytest.mark.exhaustive) for c in CASES if c != "window, mask")]
)
def test_blockwise_attention_has_a_forward_mode(case):
    check_forward_mode(blockwise.attention, *random_case(24, heads=4, batch=2, **CASES[case]))


@pytest.mark.exhaustive
def test_one_query_has_a_forward_mode():
    args, options = random_case(1, 24, heads=4, batch=2)
    check_forward_mode(functools.partial(tpu_decode.attention, interpret=True), args, options)
    check_forward_mode(functools.partial(dcmha.attention, implementation="decode"), args, options)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "backend", [functools.partial(tpu.attention, interpret=True), gpu.attention], ids=["tpu", "gpu"]
)
def test_kernels_have_a_forward_mode(backend):
    args, options = random_case(16, heads=2, head_dim=32, mask=(1, 1, 16, 16))
    check_forward_mode(backend, args, options)


@pytest.mark.exhaustive
def test_second_derivatives_and_batches_of_derivatives_equal_those_of_the_reference():
    args, options = random_case(12, batch=2, causal=True, mask=(2, 1, 12, 12), rank=1)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(attention, args, along):
        def attend(*args):
            return attention(*args, **options)

        def loss(args):
            return jnp.sum(jnp.sin(attend(*args)))

        two = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), (args, along))
        return {
            "forward over reverse": jax.jvp(jax.grad(loss), (args,), (along,))[1],
            "reverse over forward": jax.grad(lambda a: jax.jvp(loss, (a,), (along,))[1])(args),
            "gradients of each": jax.vmap(jax.grad(loss))(two[0]),
            "tangents of each": jax.vmap(lambda t: jax.jvp(attend, args, t)[1])(two[1]),
        }

    found = derivatives(blockwise.attention, args, tangents(args))
    expected = derivatives(reference.attention, args, tangents(args))
    for name in found:
        assert worst(relative_errors(found[name], expected[name])) < 2e-5, name


@pytest.mark.slow
def test_the_gradient_of_one_argument_is_that_of_all():
    """Tangents that are zero, as those of frozen parameters, do not change the others."""
    args, options = random_case(24, heads=2)
    loss = lambda *args: jnp.sum(jnp.sin(blockwise.attention(*args, **options)))  # noqa: E731
    every = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*args)
    for i in (1, 4):
        one = jax.jit(jax.grad(loss, argnums=i))(*args)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), one, every[i])
