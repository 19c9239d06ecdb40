"""Decoding with the cache of DCMHA, linen and NNX: step by step, it is the attention of the whole sequence."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from marks import exhaustive

from dcvit.models import dcmha, dcmha_nnx

FIELDS = {
    "composed": {},
    "groups, static, shared keys": {"groups": 2, "static": True, "num_key_heads": 2},
    "window": {"window": 3},
    "composed window": {"compose_window": 2, "causal": True},
    "norms, plain": {"compose": None, "normalize_qk": True},
}


def inputs(*lead, tokens=5, width=16):
    return jax.random.normal(jax.random.key(0), (*lead, tokens, width))


def decode(layer, variables, x, **options):
    """Outputs of the tokens one by one, and the cache at the end."""

    @jax.jit
    def step(cache, token):
        out, changed = layer.apply({**variables, "cache": cache}, token, mutable=["cache"], **options)
        return changed["cache"], out

    cache, outs = variables["cache"], []
    for i in range(x.shape[-2]):
        cache, out = step(cache, x[..., i : i + 1, :])
        outs.append(out)
    return jnp.concatenate(outs, axis=-2), cache


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lead"),
    [
        ("composed", (2,)),
        exhaustive("groups, static, shared keys", (2, 3)),
        exhaustive("window", (2,)),
        ("composed window", (2,)),
        exhaustive("norms, plain", (2, 3)),
    ],
)
def test_tokens_one_by_one_get_the_outputs_of_the_causal_sequence(name, lead):
    x, layer = inputs(*lead), dcmha.DCMHA(4, decode=True, **FIELDS[name])
    variables = jax.jit(layer.init)(jax.random.key(1), x)
    found, cache = decode(layer, variables, x)
    whole = layer.clone(decode=False, causal=True).apply({"params": variables["params"]}, x)
    np.testing.assert_allclose(found, whole, atol=2e-6)
    assert cache["cache_index"] == 5


def test_a_token_that_attends_to_a_cache_has_no_segments():
    x, layer = inputs(2), dcmha.DCMHA(4, decode=True)
    variables = jax.eval_shape(layer.init, jax.random.key(1), x)
    with pytest.raises(ValueError, match="one token that attends to a cache has no segments: give a mask"):
        jax.eval_shape(lambda v: decode(layer, v, x, segments=jnp.zeros((2, 1), jnp.int32)), variables)


@pytest.mark.slow
def test_plain_cache_is_that_of_flax():
    """Names, shapes and values of its variables, the outputs, and masks, also of each head."""
    x = inputs(2, 3)
    library, layer = nn.MultiHeadDotProductAttention(4, decode=True), dcmha.DCMHA(4, compose=None, decode=True)
    variables = jax.jit(library.init)(jax.random.key(1), x)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(layer.init)(jax.random.key(1), x), variables)
    for shape in (None, (2, 3, 1, 1, 5), (1, 1, 4, 1, 5)):
        mask = None if shape is None else jax.random.bernoulli(jax.random.key(2), 0.5, shape).at[..., 0].set(True)
        (found, cache), (expected, right) = (decode(net, variables, x, mask=mask) for net in (layer, library))
        np.testing.assert_allclose(found, expected, atol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), cache, right)


@pytest.mark.exhaustive
def test_nnx_cache_is_that_of_flax_and_composes():
    x = inputs(2)
    library, layer, composed = (
        net(4, 16, rngs=nnx.Rngs(0), decode=True, **more)
        for net, more in ((nnx.MultiHeadAttention, {}), (dcmha_nnx.DCMHA, {"compose": None}), (dcmha_nnx.DCMHA, {}))
    )
    with pytest.raises(ValueError, match="decode=True needs a cache: call init_cache first"):
        layer(x[:, :1])
    step, outs = nnx.jit(lambda net, token: net(token)), []
    for net in (library, layer, composed):
        net.init_cache(x.shape)
        outs.append(jnp.concatenate([step(net, x[:, i : i + 1]) for i in range(5)], axis=1))
    np.testing.assert_allclose(outs[1], outs[0], atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), nnx.state(layer), nnx.state(library))
    np.testing.assert_allclose(outs[2], composed(x, decode=False, is_causal=True), atol=2e-6)
    assert composed.cached_pre_k1.shape == (2, 5, 2, 4)


@pytest.mark.exhaustive
def test_a_full_cache_replaces_the_oldest_token():
    layer, x = dcmha.DCMHA(2, decode=True), inputs(1, tokens=6)
    variables = jax.jit(layer.init)(jax.random.key(1), x[:, :4])
    found, _ = decode(layer, variables, x)
    local = layer.clone(decode=False, window=4).apply({"params": variables["params"]}, x)
    np.testing.assert_allclose(found, local, atol=2e-6)


@pytest.mark.exhaustive
def test_a_cache_is_split_as_the_inputs_on_an_explicit_mesh():
    layer, x = dcmha.DCMHA(2, decode=True), inputs(4)
    variables = jax.jit(layer.init)(jax.random.key(1), x)
    expected, _ = decode(layer, variables, x)
    with jax.set_mesh(jax.make_mesh((4,), ("a",), devices=jax.devices()[:4])):
        placed = jax.device_put(x, jax.P("a"))
        variables = jax.jit(layer.init)(jax.random.key(1), placed)
        found, cache = decode(layer, variables, placed)
        assert {jax.typeof(a).sharding.spec[0] for a in jax.tree.leaves(cache) if a.ndim} == {"a"}
    np.testing.assert_allclose(jax.device_get(found), expected, atol=2e-6)


def test_a_call_with_other_inputs_than_one_token_of_each_example_is_refused():
    layer, x = dcmha.DCMHA(2, decode=True, compose=None), inputs(2)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"decode=True takes inputs of shape \(2, 1\) before the width, found"):
        jax.eval_shape(lambda v: layer.apply(v, jnp.ones((2, 2, 16)), mutable=["cache"]), variables)
