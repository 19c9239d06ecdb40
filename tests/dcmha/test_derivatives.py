"""Forward mode, second derivatives and batches of derivatives: every implementation agrees with the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import on_arrays, random_case, relative_errors, worst

from dcvit import dcmha
from dcvit.dcmha import derivatives
from dcvit.dcmha.backends.gpu import api as gpu
from dcvit.dcmha.backends.tpu import api as tpu
from dcvit.dcmha.backends.tpu import decode as tpu_decode
from dcvit.dcmha.backends.xla import blockwise, decode, reference

CASES = {
    "causal": {"causal": True},
    "window, mask": {"window": 7, "mask": (2, 1, 24, 24)},
    "groups, shared keys": {"key_heads": 2, "groups": 2, "branches": "qkpgs"},
    "plain": {"branches": None},
}


interpreted_tpu = functools.partial(tpu.run, interpret=True)
interpreted_tpu_decode = functools.partial(tpu_decode.run, interpret=True)


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
    expected = both(on_arrays(reference.run), args, tangents(args))[0]
    assert worst(relative_errors((out, tangent), expected)) < 1e-5
    assert worst(relative_errors(linearized, expected)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["window, mask", *(pytest.param(c, marks=pytest.mark.weekly) for c in CASES if c != "window, mask")]
)
def test_blockwise_attention_has_a_forward_mode(case):
    check_forward_mode(on_arrays(blockwise.run), *random_case(24, heads=4, batch=2, **CASES[case]))


@pytest.mark.weekly
def test_one_query_has_a_forward_mode():
    args, options = random_case(1, 24, heads=4, batch=2)
    check_forward_mode(on_arrays(interpreted_tpu_decode), args, options)
    check_forward_mode(functools.partial(dcmha.attention, implementation="decode"), args, options)


@pytest.mark.weekly
@pytest.mark.parametrize("backend", [interpreted_tpu, gpu.run], ids=["tpu", "gpu"])
def test_kernels_have_a_forward_mode(backend):
    args, options = random_case(16, heads=2, head_dim=32, mask=(1, 1, 16, 16))
    check_forward_mode(on_arrays(backend), args, options)


ALL = (
    "reverse over reverse", "forward over reverse", "reverse over forward", "forward over forward",
    "gradients of each", "tangents of each",
)  # fmt: skip


def second_derivatives(attention, args, along, options, names):
    """Derivatives of gradients along a direction, in every order of the two modes, and derivatives of two examples."""

    def attend(*args):
        return attention(*args, **options)

    def loss(args):
        return jnp.sum(jnp.sin(attend(*args)))

    def slope(args):  # of the loss, along the direction
        return sum(jnp.vdot(g, t) for g, t in zip(*map(jax.tree.leaves, (jax.grad(loss)(args), along)), strict=True))

    two = jax.tree.map(lambda x: jnp.stack([x, x / 2]), (args, along))
    of_name = {
        "reverse over reverse": lambda: jax.grad(slope)(args),
        "forward over reverse": lambda: jax.jvp(jax.grad(loss), (args,), (along,))[1],
        "reverse over forward": lambda: jax.grad(lambda a: jax.jvp(loss, (a,), (along,))[1])(args),
        "forward over forward": lambda: jax.jvp(lambda a: jax.jvp(loss, (a,), (along,))[1], (args,), (along,))[1],
        "gradients of each": lambda: jax.vmap(jax.grad(loss))(two[0]),
        "tangents of each": lambda: jax.vmap(lambda t: jax.jvp(attend, args, t)[1])(two[1]),
    }
    return {name: of_name[name]() for name in of_name if name in names}


def check_second_derivatives(attention, args, options, tolerance, names=ALL):
    """They equal those of the reference in float64, which are two orders of differentiation of plain operations."""
    compute = jax.jit(
        lambda attention, args, along: second_derivatives(attention, args, along, options, names), static_argnums=0
    )
    found = compute(attention, args, tangents(args))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), (args, tangents(args)))
        expected = compute(on_arrays(reference.run), *wide)
    for name in found:
        assert worst(relative_errors(found[name], expected[name])) < tolerance, name


SECOND = {
    "masked": {"queries": 12, "batch": 2, "causal": True, "mask": (2, 1, 12, 12), "rank": 1},
    "groups, static": {"queries": 8, "heads": 4, "key_heads": 2, "groups": 2, "branches": "qkpgs", "window": 3},
    "plain": {"queries": 8, "branches": None},
}


@pytest.mark.weekly
@pytest.mark.parametrize("case", SECOND)
def test_second_derivatives_of_blockwise_attention_in_float64(x64, case):
    args, options = random_case(dtype=jnp.float64, **SECOND[case])
    check_second_derivatives(on_arrays(blockwise.run), args, options, 1e-10)


@pytest.mark.weekly
def test_second_derivatives_of_one_query_in_float64(x64):
    args, options = random_case(1, 9, batch=2, dtype=jnp.float64)
    check_second_derivatives(on_arrays(decode.run), args, options, 1e-10)


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("backend", "case", "names"),
    [
        (blockwise.run, SECOND["masked"], ALL),
        (interpreted_tpu, {"queries": 8, "rank": 1, "mask": (1, 1, 8, 8)}, ALL),
        (interpreted_tpu_decode, {"queries": 1, "keys": 9}, ALL),
        (gpu.run, {"queries": 16, "head_dim": 32, "rank": 1}, ALL[:1]),
    ],
    ids=["blockwise", "tpu", "tpu_decode", "gpu"],
)
def test_second_derivatives_in_float32(backend, case, names):
    """The kernels for GPUs split operands into pairs of bfloat16, with errors of about 1e-5."""
    tolerance = 5e-5 if backend is gpu.run else 2e-5
    check_second_derivatives(on_arrays(backend), *random_case(**case), tolerance, names)


@pytest.mark.weekly
def test_the_hessian_of_blockwise_attention_is_symmetric_and_that_of_the_reference(x64):
    args, options = random_case(3, heads=2, head_dim=2, dtype=jnp.float64, branches="qpg", rank=1)

    @functools.partial(jax.jit, static_argnums=0)
    def hessian(attention, q):
        return jax.hessian(lambda q: jnp.sum(jnp.sin(attention(q, *args[1:], **options))))(q).reshape(q.size, q.size)

    found, expected = hessian(on_arrays(blockwise.run), args[0]), hessian(on_arrays(reference.run), args[0])
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(found, found.T, atol=1e-12)


@pytest.mark.parametrize("wrong", ["output", "gradient"])
@pytest.mark.parametrize("change", [lambda x: x[:1], lambda x: x.astype(jnp.bfloat16)], ids=["shape", "dtype"])
def test_a_wrong_type_of_an_output_or_gradient_is_an_error(wrong, change):
    as_given = lambda x: x  # noqa: E731
    of_output, of_gradient = (change if wrong == name else as_given for name in ("output", "gradient"))
    double = derivatives.differentiable(
        lambda static, x: (of_output(2 * x), ()),
        lambda static, x, residuals, d_out: of_gradient(2 * d_out),
        lambda static, x: 2 * x,
    )
    with pytest.raises(TypeError, match=rf"{wrong} is .*, expected float32\[3\], as its input"):
        jax.vjp(functools.partial(double, None), jnp.ones(3))[1](jnp.ones(3))


@pytest.mark.weekly
def test_the_gradient_of_one_argument_is_that_of_all():
    """Tangents that are zero, as those of frozen parameters, do not change the others."""
    args, options = random_case(24, heads=2)
    loss = lambda *args: jnp.sum(jnp.sin(on_arrays(blockwise.run)(*args, **options)))  # noqa: E731
    every = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*args)
    for i in (1, 4):
        one = jax.jit(jax.grad(loss, argnums=i))(*args)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), one, every[i])
