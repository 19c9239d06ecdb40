"""The TPU kernels that combine the vectors of heads: equality with XLA's sum, gradients, sizes, and their use."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import random_case
from marks import exhaustive
from pallas_checks import DETECT_RACES, compile_in_subprocess, one_chip, watch_races

from dcvit import dcmha
from dcvit.dcmha import device, folded
from dcvit.dcmha.backends.tpu import combine
from dcvit.dcmha.inputs import UnsupportedError


def vectors_and_weights(length, groups, per_group, head_dim, dtype=jnp.float32, shared=False):
    rng = np.random.default_rng(0)
    x, d_out = (jnp.asarray(y, dtype) for y in rng.normal(size=(2, 2, length, groups * per_group, head_dim)))
    w = rng.normal(size=(*((1, 1) if shared else (2, length)), groups, per_group, per_group))
    w = jnp.asarray(w, jnp.float32)
    return x, w, d_out


def output_and_gradients(interpret, *args):
    """Of the kernels, or of the sum if `interpret` is None."""

    @jax.jit
    def both(x, w, d_out):
        combined = folded.combine_heads if interpret is None else kernels
        out, pull = jax.vjp(combined, x, w)
        return out, *pull(d_out)

    kernels = functools.partial(combine.combine_heads, interpret=interpret)
    return both(*args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "groups", "per_group", "head_dim", "shared"),
    [(300, 2, 4, 16, False), exhaustive(384, 2, 3, 16, True), exhaustive(257, 4, 1, 32, False)],
)
def test_vectors_and_gradients_are_those_of_the_sum_without_races_on_two_cores(
    monkeypatch, length, groups, per_group, head_dim, shared
):
    watched = watch_races(monkeypatch)
    args = vectors_and_weights(length, groups, per_group, head_dim, shared=shared)
    scale = length if shared else head_dim  # terms of the sums in the gradient of the weights
    for a, b in zip(output_and_gradients(DETECT_RACES, *args), output_and_gradients(None, *args), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * scale)
    assert len(watched) == 2
    assert not any(state.races_found for state in watched)


@pytest.mark.slow
def test_bfloat16_is_rounded_once():
    x, w, d_out = vectors_and_weights(300, 2, 4, 16, jnp.bfloat16)
    found, d_x, d_w = output_and_gradients(True, x, w, d_out)
    wide = jax.jit(folded.combine_heads)(x.astype(jnp.float32), w)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))
    assert (d_x.dtype, d_w.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(("sizes", "dtype"), [((256, 1, 2, 16), jnp.float32), ((300, 1, 2, 16), jnp.float16)])
def test_cases_without_a_kernel_say_so(sizes, dtype):
    x, w, _ = vectors_and_weights(*sizes, dtype)
    with pytest.raises(UnsupportedError, match="the TPU kernels"):
        combine.combine_heads(x, w, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "branches", "is_used"), [(300, "qpg", True), exhaustive(300, "qg", False)])
def test_folded_attention_on_a_tpu_uses_the_kernel_for_long_rows_and_no_gates(monkeypatch, length, branches, is_used):
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    args, options = random_case(length, heads=4, head_dim=16, key_heads=2, groups=2, branches=branches, causal=True)
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        jaxpr = jax.make_jaxpr(lambda *a: dcmha.attention(*a, **options))(*args)
    assert ("dcmha_combine" in str(jaxpr)) == is_used


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_kernels_of_the_presets_compile():
    """The heads of DCFlash-405M, -2.8B, -6.9B and -33B, in groups of four, and a gate for each head."""
    cases = {"v5e:2x2": [(4, 4, 64), (6, 1, 64)], "v6e:2x2": [(8, 4, 80), (13, 4, 128)], "v5p:2x2x1": [(8, 4, 128)]}
    compile_in_subprocess("test_pallas_combine", cases)


def compile_for(topology, groups, per_group, head_dim):
    mesh, array = one_chip(topology)
    x = array(1, 2048, groups * per_group, head_dim)
    w = array(1, 2048, groups, per_group, per_group, dtype=jnp.float32)
    with jax.set_mesh(mesh):
        jax.jit(lambda x, w, d_out: jax.vjp(combine.combine_heads, x, w)[1](d_out)).lower(x, w, x).compile()
    print("compiled")
