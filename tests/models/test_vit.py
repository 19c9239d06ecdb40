"""ViT and its attention module: big_vision's tree, parameter counts, and options that must not change the result."""

import functools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import exhaustive
from small_models import assert_trees_close, jit, param_shapes, random_params, stack_blocks

from dcvit.models import encoder, layers, trees, vit
from dcvit.models.attention import Attention
from dcvit.models.trees import unstack_blocks
from dcvit.parallel.trees import by_name, shapes_of

SMALL = dict(patch_size=(4, 4), width=16, depth=2, mlp_dim=24, num_heads=4, rank=1)
IMAGES = jnp.asarray(np.random.default_rng(9).normal(size=(2, 8, 8, 3)), jnp.float32)


def shapes(images=(1, 224, 224, 3), num_classes=1000, **fields):
    """Return the names and shapes of the parameters, without computing any."""
    return shapes_of(param_shapes(vit.Model(num_classes, **fields), jax.ShapeDtypeStruct(images, jnp.float32)))


def count(variant=None, **fields):
    """Return the number of parameters and that of their names. All layers are equal, therefore one is traced."""
    times = lambda name: vit.Model(1, variant=variant, **fields).depth if "encoderblock_0" in name else 1  # noqa: E731
    found = shapes(variant=variant, **{**fields, "depth": 1})
    return sum(times(n) * math.prod(shape) for n, shape in found.items()), sum(map(times, found))


def evaluate(net, params, *inputs, **options):
    """Return the output of a module, compiled."""
    return jit(functools.partial(net.apply, **options))({"params": params}, *inputs)


@pytest.mark.slow
def test_parameter_counts_of_the_paper_and_big_vision():
    recipe = dict(rep_size=True, posemb="sincos2d", pool_type="gap")
    assert count("S/16", **recipe) == (22_122_472, 200)
    composed, _ = count("DCViT-S/16", **recipe)
    assert composed == 22_122_472 + 580_608
    assert round(composed / 22_122_472, 2) == 1.03  # Table 8
    assert count("DCViT-S/16", qk_norm="layernorm", static=True, **recipe)[0] == 22_705_480
    assert round(count("M/16", **recipe)[0] / 1e6) == 39  # Table 7


@pytest.mark.slow
def test_plain_tree_is_big_visions():
    """The expected names and shapes are written down from the public interface of big_vision's vit.py."""
    block = {f"LayerNorm_{i}/{p}": (16,) for i in (0, 1) for p in ("scale", "bias")}
    for name in ("query", "key", "value"):
        block[f"MultiHeadDotProductAttention_0/{name}/kernel"] = (16, 4, 4)
        block[f"MultiHeadDotProductAttention_0/{name}/bias"] = (4, 4)
    block |= {"MultiHeadDotProductAttention_0/out/kernel": (4, 4, 16), "MultiHeadDotProductAttention_0/out/bias": (16,)}
    mlp = {"MlpBlock_0/Dense_0/kernel": (16, 24), "MlpBlock_0/Dense_0/bias": (24,)}
    mlp |= {"MlpBlock_0/Dense_1/kernel": (24, 16), "MlpBlock_0/Dense_1/bias": (16,)}
    block |= mlp
    expected = {"embedding/kernel": (4, 4, 3, 16), "embedding/bias": (16,), "pos_embedding": (1, 4, 16)}
    expected |= {f"Transformer/encoderblock_{i}/{n}": s for i in range(2) for n, s in block.items()}
    expected |= {"Transformer/encoder_norm/scale": (16,), "Transformer/encoder_norm/bias": (16,)}
    expected |= {"pre_logits/kernel": (16, 16), "pre_logits/bias": (16,), "head/kernel": (16, 7), "head/bias": (7,)}
    plain = dict(images=IMAGES.shape, num_classes=7, rep_size=True, **SMALL)
    assert shapes(**plain) == expected
    assert shapes(**plain, pool_type="tok") == expected | {"cls": (1, 1, 16)}
    head = {f"MAPHead_0/{n}": s for n, s in block.items() if not n.startswith("LayerNorm_1")} | {
        "MAPHead_0/probe": (1, 1, 16)
    }
    assert shapes(**plain, pool_type="map") == expected | head


def attention_params(module, *inputs):
    return random_params(jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"], std=0.3)


@pytest.mark.slow
def test_key_wise_weights_come_from_the_keys_in_cross_attention():
    x_q, x_kv = (jax.random.normal(jax.random.key(i), (1, 4 - i, 16)) for i in (0, 1))
    module = Attention(4, compose="both")
    params = attention_params(module, x_q, x_kv)
    out = evaluate(module, params, x_q, x_kv)
    assert out.shape == x_q.shape
    without = {where: {**params[where], "w_k1": 0 * params[where]["w_k1"]} for where in ("pre", "post")}
    assert not np.allclose(evaluate(module, {**params, **without}, x_q, x_kv), out)


def gradients(params, train=False, **fields):
    """Return the logits and gradients of a small DCViT."""
    net = vit.Model(7, **{**SMALL, "compose": "both", **fields})

    @jit
    def run(params):
        def loss(p):
            logits = net.apply({"params": p}, IMAGES, train=train, rngs={"dropout": jax.random.key(3)})[0]
            return jnp.sum(jnp.sin(logits)), logits

        (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return logits, grads

    return run(params)


@pytest.fixture(scope="module")
def params():
    return random_params(param_shapes(vit.Model(7, **SMALL, compose="both"), IMAGES), std=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "scan", "compose"),
    [
        ("full", False, "pre"),
        exhaustive("full_but_attention", True, None),
    ],
)
def test_rematerialization_changes_no_result_even_with_dropout(remat, scan, compose):
    depth = 2 if scan else 1
    fields = dict(scan=scan, depth=depth, compose=compose, train=True, dropout=0.2, stochastic_depth=0.3)
    start = random_params(param_shapes(vit.Model(7, **{**SMALL, "depth": depth}, scan=scan, compose=compose), IMAGES))
    assert_trees_close(gradients(start, remat=remat, **fields), gradients(start, **fields))


@pytest.mark.slow
def test_bfloat16_is_in_every_block_and_near_float32_with_parameters_and_logits_in_float32(params):
    small = {n: p for n, p in params["Transformer"].items() if n != "encoderblock_1"}
    small = jax.tree.map(lambda p: p / 2, {**params, "Transformer": small})
    net = vit.Model(7, **{**SMALL, "depth": 1}, compose="both")
    logits, _ = evaluate(net, small, IMAGES)
    _, out = jax.eval_shape(net.clone(dtype_mm="bfloat16").apply, {"params": small}, IMAGES)
    inside = [out["stem"], out["with_posemb"], out["encoded"], *jax.tree.leaves(out["encoder"])]
    assert {x.dtype for x in inside} == {jnp.dtype("bfloat16")}
    assert out["pre_logits"].dtype == jnp.float32
    narrow, grads = gradients(small, dtype_mm="bfloat16", depth=1)
    assert narrow.dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(narrow, logits, rtol=0, atol=0.03 * float(jnp.abs(logits).max()))
    init = param_shapes(vit.Model(7, **SMALL, compose="both", dtype_mm="bfloat16"), IMAGES)
    assert {p.dtype for p in jax.tree.leaves(init)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_stochastic_depth_drops_whole_examples_and_keeps_the_mean():
    block = encoder.Encoder1DBlock(
        lambda layer, name: Attention(4, name=name), lambda: layers.MlpBlock(8), nn.LayerNorm, deterministic=False
    )
    x = jnp.tile(jax.random.normal(jax.random.key(0), (1, 3, 16)), (2000, 1, 1))
    rngs = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    (_, out), _ = jit(block.init_with_output)(rngs, x, None, jnp.float32(0.25))
    added = np.asarray(out["+sa"] - x)
    dropped = ~added.reshape(2000, -1).any(axis=1)
    assert dropped.mean() == pytest.approx(0.25, abs=0.04)
    np.testing.assert_allclose(added[~dropped], np.asarray(out["sa"])[~dropped] / 0.75, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["gap", "tok", "tok+reg", "0", "none"])
def test_pooled_features_are_the_mean_the_first_or_all_tokens(pool):
    """Without layers, the encoded tokens are the normalized embeddings."""
    net = vit.Model(7, **{**SMALL, "depth": 0}, pool_type=pool, registers=pool == "tok+reg")
    params = random_params(param_shapes(net, IMAGES), std=0.3)
    _, out = evaluate(net, params, IMAGES)
    encoded = out["encoded"]
    pooled = {"gap": encoded.mean(axis=1), "none": encoded, "tok+reg": encoded[:, :2].reshape(2, -1)}
    np.testing.assert_allclose(out["head_input"], pooled.get(pool, encoded[:, 0]), atol=1e-6)
    assert encoded.shape[1] == {"tok": 5, "tok+reg": 6}.get(pool, 4)


def test_class_token_and_registers_precede_the_patches_and_registers_are_not_pooled():
    net = vit.Model(7, **{**SMALL, "depth": 0}, pool_type="tok+gap", registers=3)
    params = random_params(param_shapes(net, IMAGES), std=0.3)
    assert params["cls"].shape == (1, 1, 16)
    assert params["registers"].shape == (1, 3, 16)
    _, out = evaluate(net, params, IMAGES)
    before = out["encoder"]["pre_ln"]
    np.testing.assert_array_equal(
        before[:, :4], jnp.tile(jnp.concatenate([params["cls"], params["registers"]], 1), (2, 1, 1))
    )
    cls, patches = out["encoded"][:, 0], out["encoded"][:, 4:]
    np.testing.assert_allclose(out["head_input"], jnp.concatenate([cls, patches.mean(axis=1)], 1), atol=1e-6)
    np.testing.assert_allclose(out["logits_2d"].mean(axis=(1, 2)), out["logits"], atol=1e-5)


@pytest.mark.slow
def test_scanned_and_unrolled_layers_are_equal_and_the_gradient_reaches_every_new_parameter():
    """LayerScale, gate and registers change the logits."""
    fields = dict(pool_type="map", compose="pre", registers=2, layer_scale=0.5, mlp="swiglu", norm_epsilon=1e-3)
    start = random_params(param_shapes(vit.Model(7, **SMALL, **fields), IMAGES), std=0.3)
    logits, grads = gradients(start, **fields)
    scanned_logits, scanned = gradients(stack_blocks(start), scan=True, **fields)
    np.testing.assert_allclose(scanned_logits, logits, rtol=1e-5, atol=1e-5)
    assert_trees_close(unstack_blocks(scanned), grads, rtol=1e-3, atol=1e-4)
    assert jax.tree.structure(unstack_blocks(stack_blocks(start))) == jax.tree.structure(start)
    new = {name: leaf for name, leaf in by_name(grads).items() if re.search("layer_scale|gate|registers", name)}
    assert len(new) == 1 + 2 * 4 + 2
    assert all(np.abs(leaf).max() > 0 for leaf in new.values())


@pytest.mark.slow
def test_scanned_groups_of_blocks_have_the_drop_rates_of_their_numbers(monkeypatch):
    """They are those of unrolled blocks. A branch is multiplied by 1 + rate instead of dropped at random."""
    residual = lambda self, y, segments, rate: y if rate is None else y * (1 + rate)  # noqa: E731
    monkeypatch.setattr(encoder.Encoder1DBlock, "_residual", residual)
    net = vit.Model(7, **{**SMALL, "depth": 5}, compose="both", compose_layers=(1, 3), stochastic_depth=0.8)
    params, scanned = random_params(param_shapes(net, IMAGES), std=0.3), net.clone(scan=True)
    logits = evaluate(net, params, IMAGES)[0]
    stacked = stack_blocks(params, scanned.scan_layout()[0])
    np.testing.assert_allclose(evaluate(scanned, stacked, IMAGES)[0], logits, rtol=1e-5, atol=1e-5)
    other = evaluate(net.clone(stochastic_depth=0.4), params, IMAGES)[0]
    assert np.abs(other - logits).max() > 1e-2


@pytest.mark.slow
def test_initial_logits_are_zero_and_models_without_head_return_features():
    net = vit.Model(7, **{**SMALL, "depth": 0})
    (logits, _), _ = jit(net.init_with_output)(jax.random.key(0), IMAGES)
    assert not np.asarray(logits).any()
    headless = vit.Model(None, **SMALL)
    (features, out), variables = jax.eval_shape(headless.init_with_output, jax.random.key(0), IMAGES)
    assert features.shape == (2, 16)
    assert "head" not in variables["params"]
    assert "logits" not in out


def test_sincos2d_embedding_has_sine_and_cosine_of_x_then_y():
    table = vit.posemb_sincos_2d(3, 4, 16)[0].reshape(3, 4, 4, 4)
    for y in range(3):
        for x in range(4):
            for i in range(4):
                f = 1 / 10_000 ** (i / 3)
                expected = [np.sin(x * f), np.cos(x * f), np.sin(y * f), np.cos(y * f)]
                np.testing.assert_allclose(table[y, x, :, i], expected, atol=1e-6)


def test_variants_by_name():
    assert vit.decode_variant("DCViT-S/16") == {**vit.decode_variant("S/16"), "compose": "both"}
    assert vit.decode_variant("ViT-M/16") == dict(width=512, depth=12, mlp_dim=2048, num_heads=8, patch_size=(16, 16))
    assert vit.Model(10, variant="S/16", width=24).width == 24
    for bad in ("Q/16", "S/x", "S/0", "DC-S/16"):
        with pytest.raises(ValueError, match="unknown variant"):
            vit.decode_variant(bad)
    with pytest.raises(ValueError, match="nearest sizes: So400m"):
        vit.decode_variant("So40m/14")
    for name in ("vit_small_patch16_224.augreg_in21k", "google/vit-small-patch16-224", "deit3_small_patch16_384"):
        with pytest.raises(ValueError, match="did you mean 'ViT-S/16'"):
            vit.decode_variant(name)
    with pytest.raises(ValueError, match="sizes: mu, Ti, ") as error:
        vit.decode_variant("?/16")
    assert str(error.value).count("So400m") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": (3, 3)}, r"patch_size=\(3, 3\) does not divide the image, 8x8"),
        ({"layer_scale": -0.1}, "layer_scale=-0.1 should"),
    ],
)
def test_errors_name_the_invalid_field(fields, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(vit.Model(7, **{**SMALL, **fields}).init, jax.random.key(0), IMAGES)


class TestTraining:
    """Effects of randomness and dtypes."""

    def blocks(self, **fields):
        net = vit.Model(None, **{**SMALL, "depth": 3, **fields})
        images = np.tile(IMAGES[:1], (400, 1, 1, 1))
        params = random_params(param_shapes(net, images[:1]))
        return evaluate(net, params, images, train=True, rngs={"dropout": jax.random.key(1)})[1]

    @pytest.mark.slow
    def test_stochastic_depth_grows_linearly_with_the_layer(self):
        encoder = self.blocks(stochastic_depth=0.6)["encoder"]
        dropped = [
            (encoder[f"block{i:02d}"]["+mlp"] == encoder[f"block{i:02d}"]["+sa"]).all(axis=(1, 2)).mean()
            for i in range(3)
        ]
        np.testing.assert_allclose(dropped, [0, 0.3, 0.6], atol=0.1)


@pytest.mark.parametrize(
    "fields", [{"compose": "both"}, {"compose": "both", "compose_layers": (1,)}, {"scan": True}], ids=str
)
def test_shapes_of_parameters_are_those_of_all_layers(fields):
    """One layer is traced if all are equal."""
    net = vit.Model(10, width=8, depth=3, mlp_dim=16, num_heads=2, patch_size=(4, 4), **fields)
    image = jax.ShapeDtypeStruct((1, 8, 8, 3), np.float32)
    expected = jax.eval_shape(lambda x: net.init(jax.random.key(0), x), image)["params"]
    found = trees.param_shapes(net, image)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.leaves(found) == jax.tree.leaves(expected)
