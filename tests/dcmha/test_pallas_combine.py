"""The TPU kernels that combine the vectors of heads: equality with XLA's sum, gradients, sizes, and their use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import random_case

from dcvit import dcmha
from dcvit.dcmha import dispatch, folded
from dcvit.dcmha.errors import UnsupportedError
from dcvit.dcmha.pallas_tpu import combine


def vectors_and_weights(length, groups, per_group, head_dim, dtype=jnp.float32, shared=False):
    keys = jax.random.split(jax.random.key(0), 3)
    x, d_out = (jax.random.normal(key, (2, length, groups * per_group, head_dim), dtype) for key in keys[:2])
    w = jax.random.normal(keys[2], (*((1, 1) if shared else (2, length)), groups, per_group, per_group))
    return x, w, d_out


@pytest.mark.parametrize(
    ("length", "groups", "per_group", "head_dim", "shared"),
    [(300, 2, 4, 16, False), (512, 1, 2, 80, False), (257, 4, 1, 32, False), (384, 2, 3, 16, True)],
)
def test_vectors_and_gradients_are_those_of_the_sum(length, groups, per_group, head_dim, shared):
    x, w, d_out = vectors_and_weights(length, groups, per_group, head_dim, shared=shared)
    right, right_gradients = jax.vjp(folded.combine_heads, x, w)
    found, gradients = jax.vjp(lambda x, w: combine.combine_heads(x, w, interpret=True), x, w)
    scale = length if shared else head_dim  # terms of the sums in the gradient of the weights
    for a, b in zip([found, *gradients(d_out)], [right, *right_gradients(d_out)], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * scale)


def test_bfloat16_is_rounded_once():
    x, w, d_out = vectors_and_weights(300, 2, 4, 16, jnp.bfloat16)
    found, gradients = jax.vjp(lambda x, w: combine.combine_heads(x, w, interpret=True), x, w)
    wide = folded.combine_heads(x.astype(jnp.float32), w)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))
    d_x, d_w = gradients(d_out)
    assert (d_x.dtype, d_w.dtype) == (jnp.bfloat16, jnp.float32)


def test_forward_mode_and_second_derivatives_are_those_of_the_sum():
    x, w, d_out = vectors_and_weights(257, 1, 2, 16)

    def tangents(f):
        return jax.jvp(lambda x, w: jax.vjp(f, x, w)[1](d_out), (x, w), (d_out, w))

    found = tangents(lambda x, w: combine.combine_heads(x, w, interpret=True))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tangents(folded.combine_heads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((256, 1, 2, 16), jnp.float32), ((300, 1, 9, 16), jnp.float32), ((300, 1, 2, 24), jnp.float32),
     ((300, 1, 2, 16), jnp.float16)],
)  # fmt: skip
def test_cases_without_a_kernel_say_so(sizes, dtype):
    x, w, _ = vectors_and_weights(*sizes, dtype)
    with pytest.raises(UnsupportedError, match="the TPU kernels"):
        combine.combine_heads(x, w, interpret=True)


@pytest.mark.parametrize(("length", "is_used"), [(300, True), (200, False)])
def test_folded_attention_on_a_tpu_uses_the_kernel_for_long_rows(monkeypatch, length, is_used):
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    args, options = random_case(length, heads=4, head_dim=16, key_heads=2, groups=2, branches="qpg", causal=True)
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        jaxpr = jax.make_jaxpr(lambda *a: dcmha.attention(*a, **options))(*args)
    assert ("dcmha_combine" in str(jaxpr)) == is_used
