"""The attention matrices are those by which a model computes its outputs, and all captured arrays are the model's."""

import functools

import jax
import jax.numpy as jnp
import lm_oracle
import numpy as np
import oracle
import pytest
from head_oracle import softmax
from small_models import jit, make_lm, make_tokens, param_shapes, random_params

from dcvit.dcmha.backends.xla.reference import AttentionMatrices
from dcvit.interpret.activations import run_with_cache
from dcvit.models import vit
from dcvit.models.trees import unstack_blocks

MODELS = {
    "plain": {},
    "windows, scanned": dict(compose="both", window_pattern="1:1", scan=True),
    "documents, static, groups, shared keys, windows of rows": dict(
        compose="both", static=True, groups=2, num_key_heads=2, window_pattern="1:1", prefill_window=5, end_of_text=0
    ),
    "composed window": dict(compose="both", compose_window=4),
    "static, rematerialized": dict(compose="post", static=True, remat="full"),
}


def block(params, layer):
    return params["Transformer"][f"decoderblock_{layer}"]["MultiHeadDotProductAttention_0"]


def capture(net, params, inputs):
    """Everything that is captured, and everything that the model itself returns."""
    _, out = jit(lambda p, x: net.apply({"params": p}, x))(params, inputs)
    found = run_with_cache(net, params, inputs)
    np.testing.assert_allclose(found.output, out["logits"], rtol=2e-4, atol=2e-5)
    assert {name.split("/")[0] for name in found.arrays} == {"block00", "block01"}
    return found, out


@functools.cache
def captured(name):
    """`capture` of a model of `MODELS`, after the model and its parameters."""
    net, params = make_lm(**MODELS[name])
    return net, params, *capture(net, params, make_tokens().at[:, 5].set(0))


def matrices(found, layer):
    return AttentionMatrices(*(found.arrays[f"block{layer:02d}/{name}"] for name in AttentionMatrices._fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.exhaustive] if n in ("plain", "static, rematerialized") else [])
        for n in MODELS
    ],
)
def test_captured_arrays_are_those_of_the_model_and_composed_weights_sum_the_values_to_its_outputs(name):
    net, params, captured_run, out = captured(name)
    unrolled = unstack_blocks(params)
    for layer in range(net.depth):
        found, of_layer = matrices(captured_run, layer), out["decoder"][f"block{layer:02d}"]
        for array, of in (("resid_post", "+mlp"), ("attention_out", "sa"), ("mlp_out", "mlp")):
            array = captured_run.arrays[f"block{layer:02d}/{array}"]
            np.testing.assert_allclose(array, of_layer[of], rtol=2e-4, atol=2e-5)
        attention = block(unrolled, layer)
        before = np.asarray(out["stem"] if layer == 0 else out["decoder"][f"block{layer - 1:02d}"]["+mlp"])
        scale = np.asarray(unrolled["Transformer"][f"decoderblock_{layer}"]["attention_norm"]["scale"])
        normed = before / np.sqrt(np.mean(np.square(before), axis=-1, keepdims=True) + net.norm_epsilon) * scale
        values = np.einsum("btm,mhd->bthd", normed, attention["value"]["kernel"])
        values = np.repeat(values, net.num_heads // values.shape[2], axis=2)
        heads = np.einsum("bhts,bshd->bthd", found.composed_weights, values)
        expected = np.einsum("bthd,hdm->btm", heads, attention["out"]["kernel"])
        np.testing.assert_allclose(of_layer["sa"], expected, rtol=2e-4, atol=2e-5)


VITS = {
    "plain": {},
    "composed, scanned, MAP head": dict(compose="both", scan=True, pool_type="map"),
    "ablation, registers": dict(compose="pre", branches="q", static=True, pool_type="tok", registers=2),
    "QK-norm, LayerScale": dict(compose="post", gate=False, rank=1, qk_norm="layernorm", layer_scale=0.3),
}


def expected_matrices(p, x, heads, rank):
    """The four matrices of a layer for its normalized input B T M, in float64 numpy."""
    q, k = (lm_oracle.dense(p[name], x) for name in ("query", "key"))
    if "query_norm" in p:
        q, k = (
            lm_oracle.normalize(y, {"bias": 0, **p[f"{name}_norm"]}, 1e-6) for y, name in ((q, "query"), (k, "key"))
        )
    matrices = [np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])]
    for where in ("pre", "post"):
        composed = matrices[-1]
        if where in p:
            rows = [lm_oracle.compose_weights(p[where], each, heads, rank) for each in x]
            composed = np.concatenate([oracle.compose(m[None], w) for m, w in zip(composed, rows, strict=True)])
        matrices += [composed, softmax(composed, True)] if where == "pre" else [composed]
    return matrices


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if "registers" in n else pytest.mark.exhaustive) for n in VITS],
)
def test_maps_of_a_vision_transformer_are_those_of_numpy_and_yield_the_output_of_the_layer(name):
    """Of patches, and of class token and registers before them."""
    net = vit.Model(5, width=16, depth=2, num_heads=2, mlp_dim=16, patch_size=(4, 4), **VITS[name])
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 8, 3)), jnp.float32)
    params = random_params(param_shapes(net, images))
    captured_run, out = capture(net, params, images)
    unrolled = jax.tree.map(np.asarray, unstack_blocks(params))
    tokens = [np.tile(params[name], (2, 1, 1)) for name in ("cls", "registers") if name in params]
    before = np.concatenate([*tokens, out["with_posemb"]], axis=1, dtype=np.float64)
    for layer in range(net.depth):
        found = matrices(captured_run, layer)
        block_params = unrolled["Transformer"][f"encoderblock_{layer}"]
        p = block_params["MultiHeadDotProductAttention_0"]
        x = lm_oracle.normalize(before, block_params["LayerNorm_0"], net.norm_epsilon)
        for name, matrix, expected in zip(found._fields, found, expected_matrices(p, x, 2, net.rank), strict=True):
            np.testing.assert_allclose(matrix, expected, rtol=2e-4, atol=2e-5, err_msg=f"layer {layer}: {name}")
        heads = np.einsum("bhts,bshd->bthd", found.composed_weights, lm_oracle.dense(p["value"], x))
        attended = np.einsum("bthd,hdm->btm", heads, p["out"]["kernel"]) + p["out"]["bias"]
        expected = attended * block_params.get("layer_scale_0", 1)
        np.testing.assert_allclose(out["encoder"][f"block{layer:02d}"]["sa"], expected, rtol=2e-4, atol=2e-5)
        before = np.asarray(out["encoder"][f"block{layer:02d}"]["+mlp"], np.float64)
