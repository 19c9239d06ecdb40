"""The attention matrices are those by which a model computes its outputs."""

import jax.numpy as jnp
import numpy as np
import pytest
from small_models import LENGTH, jit, make_lm, make_tokens, param_shapes, random_params

from dcvit.interpret.attention_maps import attention_maps
from dcvit.models import lm, vit

DOCUMENTS = dict(end_of_text=0)
MODELS = {
    "plain": {},
    "composed": dict(compose="both"),
    "windows, scanned": dict(compose="both", window_pattern="1:1", scan=True),
    "documents, grouped queries": dict(compose="both", groups=2, num_key_heads=2, **DOCUMENTS),
    "static, rematerialized": dict(compose="post", static=True, remat="full"),
}


def block(params, layer):
    return params["Transformer"][f"decoderblock_{layer}"]["MultiHeadDotProductAttention_0"]


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_composed_weights_sum_the_values_to_the_output_of_the_layer(fields):
    net, params = make_lm(**fields)
    tokens = make_tokens().at[:, 5].set(0)
    maps = attention_maps(net, params, tokens)
    _, out = jit(lambda p, x: net.apply({"params": p}, x))(params, tokens)
    unrolled = lm.unstack_blocks(params)
    assert sorted(maps) == list(range(net.depth))
    for layer, found in maps.items():
        attention = block(unrolled, layer)
        before = np.asarray(out["stem"] if layer == 0 else out["decoder"][f"block{layer - 1:02d}"]["+mlp"])
        scale = np.asarray(unrolled["Transformer"][f"decoderblock_{layer}"]["attention_norm"]["scale"])
        normed = before / np.sqrt(np.mean(np.square(before), axis=-1, keepdims=True) + net.norm_epsilon) * scale
        values = np.einsum("btm,mhd->bthd", normed, attention["value"]["kernel"])
        values = np.repeat(values, net.num_heads // values.shape[2], axis=2)
        heads = np.einsum("bhts,bshd->bthd", found.composed_weights, values)
        expected = np.einsum("bthd,hdm->btm", heads, attention["out"]["kernel"])
        np.testing.assert_allclose(out["decoder"][f"block{layer:02d}"]["sa"], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("compose", ["both", "pre", "post", None])
def test_compositions_change_their_own_matrix_only(compose):
    net, params = make_lm(compose=compose)
    found = attention_maps(net, params, make_tokens(), layers=[-1])[net.depth - 1]
    same = lambda a, b: bool(jnp.array_equal(a, b))  # noqa: E731
    assert same(found.scores, found.composed_scores) == (compose in ("post", None))
    assert same(found.weights, found.composed_weights) == (compose in ("pre", None))
    np.testing.assert_allclose(found.weights.sum(axis=-1), 1, rtol=1e-5)
    future = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
    for matrix in found:
        assert not np.asarray(matrix)[..., future].any()


def test_maps_of_a_vision_transformer_have_all_patches():
    net = vit.Model(5, width=16, depth=2, num_heads=2, mlp_dim=16, patch_size=(4, 4), compose="both", scan=True)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 8, 3)), jnp.float32)
    params = random_params(param_shapes(net, images))
    maps = attention_maps(net, params, images)
    assert sorted(maps) == [0, 1]
    assert {matrix.shape for found in maps.values() for matrix in found} == {(2, 2, 6, 6)}
    assert not jnp.array_equal(maps[0].weights, maps[1].weights)


def test_unknown_layer_is_refused():
    net, params = make_lm()
    with pytest.raises(ValueError, match="no layer 2: the model has 2 layers"):
        attention_maps(net, params, make_tokens(), layers=[0, 2])
