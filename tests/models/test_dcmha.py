"""DCMHA in place of flax's attention layers, linen and NNX: parameters, outputs, gradients, dropout and training."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dcvit.models import dcmha, dcmha_nnx

FIELDS = {"qkv_features": 32, "out_features": 20, "normalize_qk": True, "use_bias": False}


@pytest.fixture
def x():
    """Inputs of 6 examples with 7 tokens."""
    return jax.random.normal(jax.random.key(0), (2, 3, 7, 24))


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * max(1, float(jnp.abs(b).max())))


def output_and_gradient(f, params):
    """The output, and the gradient of the parameters for a fixed cotangent."""
    out, pull = jax.vjp(f, params)
    return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))


@pytest.mark.slow
def test_plain_linen_layer_has_the_parameters_output_and_gradient_of_flax(x):
    library, layer = nn.MultiHeadDotProductAttention(4, **FIELDS), dcmha.DCMHA(4, compose=None, **FIELDS)
    params, mask = jax.jit(library.init)(jax.random.key(1), x), nn.make_causal_mask(x[..., 0])
    jax.tree.map(np.testing.assert_array_equal, jax.jit(layer.init)(jax.random.key(1), x), params)
    expected, found = (
        jax.jit(lambda p, net=net: output_and_gradient(lambda p: net.apply(p, x, x + 1, x - 1, mask=mask), p))(params)
        for net in (library, layer)
    )
    assert_close(found, expected)


@pytest.mark.slow
def test_plain_nnx_layer_has_the_parameters_output_and_gradient_of_flax(x):
    library = nnx.MultiHeadAttention(4, 24, decode=False, rngs=nnx.Rngs(1), **FIELDS)
    layer = dcmha_nnx.DCMHA(4, 24, decode=False, rngs=nnx.Rngs(2), compose=None, **FIELDS)
    params, mask = nnx.state(library, nnx.Param), nn.make_causal_mask(x[..., 0])
    assert [path for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))] == [
        path for path, _ in nnx.to_flat_state(params)
    ]
    nnx.update(layer, params)
    graphs = [nnx.graphdef(net) for net in (library, layer)]
    expected, found = (
        jax.jit(
            lambda p, graph=graph: output_and_gradient(lambda p: nnx.merge(graph, p)(x, x + 1, x - 1, mask=mask), p)
        )(params)
        for graph in graphs
    )
    assert_close(found, expected)
    assert_close(layer(x, is_causal=True), layer(x, mask=mask))
    ids = jnp.broadcast_to(jnp.arange(x.shape[-2], dtype=jnp.int32) // 2, x.shape[:-1])
    assert_close(layer(x, segments=ids), layer(x, mask=nn.make_attention_mask(ids, ids, jnp.equal)))


@pytest.mark.exhaustive
def test_composed_nnx_layer_computes_what_the_linen_layer_computes(x):
    layer = dcmha_nnx.DCMHA(4, 24, rngs=nnx.Rngs(1), static=True, groups=2)
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    linen = dcmha.DCMHA(4, static=True, groups=2)
    out, sown = linen.apply({"params": params}, x, sow_weights=True, mutable=["intermediates"])
    found, state = nnx.capture(layer, nnx.Intermediate)(x, sow_weights=True)
    assert_close(found, out)
    weights = state["attention_weights"][0]
    assert weights.shape == (2, 3, 4, 7, 7)
    assert_close(weights, sown["intermediates"]["attention_weights"][0])
