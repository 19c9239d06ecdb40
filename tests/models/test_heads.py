"""Cross-head attention of other papers: equal to their formulas, decoding, subsets of layers, errors."""

import functools

import head_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import exhaustive
from small_models import (
    assert_trees_close,
    assert_trees_equal,
    jit,
    make_lm,
    make_tokens,
    param_shapes,
    random_params,
    save_npz,
    stack_blocks,
)

from dcvit.models import head_settings, lm, vit
from dcvit.models.attention import Attention
from dcvit.models.fields import AttentionFields, values_of
from dcvit.models.trees import unstack_blocks

ORACLES = ("mha", "talking", "mta", "gated", "lightweight")
LENGTH, WIDTH = 6, 24
TINY = {"context": 12, "width": 16, "depth": 1, "mlp_dim": 16, "num_heads": 4, "num_key_heads": 2}


def make_layer(name, heads, key_heads, **fields):
    """Return the attention layer of a language model with a name, with random parameters and inputs."""
    net = lm.Model(7, heads=name, num_heads=heads, num_key_heads=key_heads, width=WIDTH)
    fields = {**values_of(net, AttentionFields), **fields}
    layer = Attention(heads, num_key_heads=key_heads, use_bias=False, **fields)
    x = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH))
    return layer, random_params(param_shapes(layer, jnp.asarray(x, jnp.float32)), std=0.4), x


def expected(name, params, x, mask, heads, key_heads):
    """Return the output of the oracle for each example."""
    oracle = functools.partial(getattr(head_oracle, name), heads=heads, key_heads=key_heads)
    params = jax.tree.map(np.asarray, params)
    return np.stack([oracle(params, row, seen) for row, seen in zip(x, mask, strict=True)])


def output(layer, params, x, mask=None):
    return jit(layer.apply)({"params": params}, np.asarray(x, np.float32), mask=mask)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ORACLES)
def test_outputs_equal_the_formula_of_the_paper_which_is_not_that_of_plain_attention(name):
    layer, params, x = make_layer(name, 4, 4)
    every = np.ones((2, LENGTH, LENGTH), bool)
    wanted = expected(name, params, x, every, 4, 4)
    np.testing.assert_allclose(output(layer, params, x), wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    if name != "mha":
        plain = {key: value for key, value in params.items() if key not in ("pre", "post")}
        assert np.abs(expected("mha", plain, x, every, 4, 4) - wanted).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_outputs_with_grouped_queries_causality_a_window_and_a_mask_equal_the_formula(name):
    query, key = np.mgrid[:LENGTH, :LENGTH]
    mask = (np.random.default_rng(1).random((2, LENGTH, LENGTH)) < 0.7) | np.eye(LENGTH, dtype=bool)
    layer, params, x = make_layer(name, 8, 2, causal=True, window=3)
    wanted = expected(name, params, x, mask & (key <= query) & (key > query - 3), 8, 2)
    found = output(layer, params, x, mask[:, None])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["talking", "gated", *map(exhaustive, ("mha", "mta", "lightweight"))])
def test_gradients_equal_differences_of_the_formula_in_float64(name):
    """Of a weighted sum of the outputs, in random directions of every parameter."""
    layer, params, x = make_layer(name, 4, 2, causal=True)
    every, rng = np.tril(np.ones((2, LENGTH, LENGTH), bool)), np.random.default_rng(3)
    weights = rng.normal(size=x.shape)

    def loss(params):
        outputs = layer.apply({"params": params}, jnp.asarray(x, jnp.float32))
        return jnp.sum(outputs * jnp.asarray(weights, jnp.float32))

    gradients = jit(jax.grad(loss))(params)
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    leaves, structure = jax.tree.flatten(params)
    for i, (leaf, gradient) in enumerate(zip(leaves, jax.tree.leaves(gradients), strict=True)):
        direction = rng.normal(size=leaf.shape)
        sums = []
        for step in (1e-5, -1e-5):
            moved = jax.tree.unflatten(structure, [*leaves[:i], leaf + step * direction, *leaves[i + 1 :]])
            sums.append((expected(name, moved, x, every, 4, 2) * weights).sum())
        wanted = (sums[0] - sums[1]) / 2e-5
        assert float((gradient * direction).sum()) == pytest.approx(wanted, rel=1e-3, abs=1e-2)


@pytest.mark.slow
def test_decoding_token_by_token_equals_the_whole_row():
    """The caches of layers that do not compose have no weights of keys. Of five layers, four are scanned."""
    more = {"window_pattern": "1:1", "window": 3, "compose_layers": (1, 3), "depth": 5, "scan": True}
    net, params = make_lm(heads="dcmha", **{**TINY, **more})
    tokens = make_tokens(2, 6)
    whole = jit(net.apply)({"params": params}, tokens)[0]
    cache = lm.init_cache(net, 2, 8)
    step = jit(lambda cache, token: net.apply({"params": params}, token, cache=cache))
    for t in range(tokens.shape[1]):
        logits, out = step(cache, tokens[:, t : t + 1])
        cache = out["cache"]
        np.testing.assert_allclose(logits[:, 0], whole[:, t], atol=1e-5)


SUBSETS = {
    "lm": (lm.Model, {**TINY, "depth": 3}, (2, 6)),
    "vit": (vit.Model, {"patch_size": (4, 4), "width": 16, "depth": 3, "mlp_dim": 16, "num_heads": 4}, (2, 8, 8, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layers"), [("lm", (-1,)), ("vit", (0, 2))])
def test_layers_outside_the_subset_have_plain_attention(model, layers):
    """They equal those of a model that composes in all layers, with a composition of zeros."""
    build, fields, shape = SUBSETS[model]
    some = build(17, heads="lightweight", compose_layers=layers, **fields)
    inputs = make_tokens(*shape) if model == "lm" else jnp.asarray(np.random.default_rng(0).normal(size=shape), "f4")
    params = random_params(param_shapes(some, inputs))
    blocks = {i: params["Transformer"][f"{'de' if model == 'lm' else 'en'}coderblock_{i}"] for i in range(3)}
    composed = [i for i, block in blocks.items() if "post" in block["MultiHeadDotProductAttention_0"]]
    assert composed == sorted(i % 3 for i in layers)
    found = jit(some.apply)({"params": params}, inputs)[0]
    for block in blocks.values():
        post = blocks[composed[0]]["MultiHeadDotProductAttention_0"]["post"]
        attention = block["MultiHeadDotProductAttention_0"]
        attention.setdefault("post", {**post, "w_q2": post["w_q2"] * 0})
    every = some.clone(compose_layers=None)
    np.testing.assert_allclose(found, jit(every.apply)({"params": params}, inputs)[0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "heads", "layers", "depth", "layout"),
    [
        ("windows", "lightweight", (1, 3), 5, (2, 2)),
        exhaustive("windows", "folded", (4, 5), 6, (2, 2)),
        exhaustive("vit", "folded", (1, 3), 5, (2, 2)),
        exhaustive("vit", "dcmha", (2, 3), 4, (1, 2)),
    ],
)
def test_a_scan_over_some_layers_that_compose_equals_unrolled_ones(model, heads, layers, depth, layout, tmp_path):
    """In outputs, losses and gradients, with rematerialized layers; and checkpoints of both open in both."""
    module = vit if model == "vit" else lm
    build, fields, shape = SUBSETS["vit" if model == "vit" else "lm"]
    windows = {"window_pattern": "1:1", "window": 3} if model == "windows" else {}
    net = build(17, heads=heads, compose_layers=layers, **{**fields, **windows, "depth": depth})
    scanned = net.clone(scan=True, remat="full")
    inputs = make_tokens(*shape) if module is lm else jnp.asarray(np.random.default_rng(0).normal(size=shape), "f4")
    params, wanted = (random_params(param_shapes(n, inputs)) for n in (net, scanned))
    assert scanned.scan_layout(1 + len(windows) // 2) == layout
    stacked = stack_blocks(params, layout[0])
    assert jax.tree.map(np.shape, stacked) == jax.tree.map(np.shape, wanted)
    assert_trees_equal(unstack_blocks(stacked), params)

    def run(net, params):
        def loss(params):
            logits, out = net.apply({"params": params}, inputs)
            return jnp.mean(jnp.sin(logits)), (logits, out["encoder" if module is vit else "decoder"])

        (value, kept), gradients = jit(jax.value_and_grad(loss, has_aux=True))(params)
        return value, kept, unstack_blocks(gradients)

    assert_trees_close(run(scanned, stacked), run(net, params), rtol=1e-5, atol=1e-5)
    for saved, like in ((params, stacked), (stacked, params)):
        file = save_npz(tmp_path / "model.npz", saved)
        assert_trees_equal(module.load(jax.tree.map(np.zeros_like, like), file, {}), like)


def test_head_convolution_inside_groups():
    layer, params, x = make_layer("mta", 4, 4, groups=2)
    assert params["post"]["w_b"].shape == (2, 2, 2)
    wanted = expected("mta", params, x, np.ones((2, LENGTH, LENGTH), bool), 4, 4)
    np.testing.assert_allclose(output(layer, params, x), wanted, atol=1e-4)


@pytest.mark.parametrize("name", head_settings.SETTINGS)
def test_names_of_settings_build_ordinary_models(name):
    fields = {"num_heads": 8, "num_key_heads": 2, "width": 16}
    for net in (lm.Model(7, heads=name, **fields), vit.Model(7, heads=name, **fields)):
        meant = head_settings.SETTINGS[name]
        assert {key: getattr(net, key) for key in meant} == meant
        assert net.groups == (2 if name in head_settings.FOLDED else 1)


def test_folded_composition_has_two_heads_to_a_key_head_by_default(caplog):
    head_settings._half.cache_clear()
    with caplog.at_level("INFO", logger="dcvit.models"):
        nets = [model.Model(7, heads="folded", num_heads=6, width=24, depth=1) for model in (lm, vit)]
    assert [(net.num_key_heads, net.groups) for net in nets] == [(3, 3)] * 2
    assert caplog.messages == ["heads='folded': num_key_heads is 3, half of the 6 heads"]
    assert lm.Model(7, heads="folded", num_heads=6, num_key_heads=2).groups == 2
    assert lm.Model(7, preset="DCFlash-405M", heads="folded").num_key_heads == 4


def test_layers_without_composition_of_a_model_that_folds_are_plain_attention():
    fields = {"variant": "mu/4", "depth": 2, "heads": "folded", "compose_layers": (0,), "pool_type": "map"}
    image = jax.random.uniform(jax.random.key(1), (1, 8, 8, 3))
    nets = [vit.Model(5, implementation=name, **fields) for name in ("folded", None)]
    params = random_params(param_shapes(nets[0], image))
    np.testing.assert_array_equal(*(jit(net.apply)({"params": params}, image)[0] for net in nets))


def test_a_name_replaces_the_composition_of_a_preset_and_of_the_field_compose():
    net = lm.Model(7, preset="DCFlash-405M", heads="talking")
    assert (net.compose, net.projection, net.gate, net.static, net.groups) == ("both", False, False, True, 1)
    assert lm.Model(7, preset="DCFlash-405M", heads="talking", groups=2).groups == 2
    assert lm.Model(7, compose="both", heads="mha").compose is None
    assert vit.Model(7, variant="DCViT-S/16", heads="mha").compose is None
    assert lm.Model(7, heads="dcmha", rank=4, static=True).rank == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": "talkng"}, r"heads='talkng'; did you mean 'talking'\?"),
        ({"heads": "moh"}, "heads='moh'; removed in 0.3.0: use 'dcmha'"),
        ({"heads": "lightweight", "rank": 2}, "heads='lightweight' means rank=1, found 2"),
        (
            {"heads": "lightweight", "compose_layers": (2,)},
            r"=\(2,\): expected different numbers of the 1 layers",
        ),
    ],
    ids=str,
)
def test_errors_name_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        lm.Model(7, **{"width": 48, "depth": 1, **fields}).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
