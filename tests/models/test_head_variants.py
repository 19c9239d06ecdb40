"""Cross-head attention of other papers: equal to their formulas, finite gradients, decoding, losses, errors."""

import functools
import re
from pathlib import Path

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

from dcvit.models import head_settings, head_variants, lm, vit
from dcvit.models.attention import Attention
from dcvit.models.fields import AttentionFields, values_of
from dcvit.models.trees import unstack_blocks
from dcvit.training.augment import Augmentation
from dcvit.training.tasks import ImageTask, TokenTask

ORACLES = ("mha", "talking", "mta", "gated", "lightweight", *head_settings.VARIANTS)
ROOT = Path(__file__).parents[2]
LENGTH, WIDTH, LAYER = 6, 24, 2
TINY = {"context": 12, "width": 16, "depth": 1, "mlp_dim": 16, "num_heads": 4, "num_key_heads": 2}


def make_layer(name, heads, key_heads, **fields):
    """Return the attention layer of a language model with a name, with random parameters and inputs."""
    net = lm.Model(7, heads=name, num_heads=heads, num_key_heads=key_heads, width=WIDTH)
    fields = {**values_of(net, AttentionFields), **fields}
    layer = Attention(heads, num_key_heads=key_heads, use_bias=False, heads=net.heads, layer=LAYER, **fields)
    x = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH))
    return layer, random_params(param_shapes(layer, jnp.asarray(x, jnp.float32)), std=0.4), x


def expected(name, params, x, mask, heads, key_heads, **more):
    """Return the output of the oracle for each example."""
    more = {"layer": LAYER + 1} if name == "diff" else more
    oracle = functools.partial(getattr(head_oracle, name), heads=heads, key_heads=key_heads, **more)
    params = jax.tree.map(np.asarray, params)
    return np.stack([oracle(params, row, seen) for row, seen in zip(x, mask, strict=True)])


def output(layer, params, x, mask=None):
    return jit(layer.apply)({"params": params}, np.asarray(x, np.float32), mask=mask)


DEFAULT = ("moh", "diff2", "folded")  # the others are exhaustive


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ORACLES)
def test_outputs_equal_the_formula_of_the_paper_which_is_not_that_of_plain_attention(name):
    layer, params, x = make_layer(name, 4, 4)
    every = np.ones((2, LENGTH, LENGTH), bool)
    wanted = expected(name, params, x, every, 4, 4)
    np.testing.assert_allclose(output(layer, params, x), wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    if name not in ("mha", "diff2"):  # the queries of "diff2" have another shape
        plain = {key: value for key, value in params.items() if key not in ("pre", "post")}
        assert np.abs(expected("mha", plain, x, every, 4, 4) - wanted).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_outputs_with_grouped_queries_causality_a_window_and_a_mask_equal_the_formula(name):
    query, key = np.mgrid[:LENGTH, :LENGTH]
    mask = (np.random.default_rng(1).random((2, LENGTH, LENGTH)) < 0.7) | np.eye(LENGTH, dtype=bool)
    layer, params, x = make_layer(name, 8, 2, causal=True, window=3)
    more = {"window": 3} if name == "paired" else {}  # of rows, fewer than those of 3 tokens
    wanted = expected(name, params, x, mask & (key <= query) & (key > query - 3), 8, 2, **more)
    found = output(layer, params, x, mask[:, None])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["xsa", "paired", *map(exhaustive, sorted({*ORACLES} - {"xsa", "paired"}))],
)
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
@pytest.mark.parametrize(
    ("name", "layers", "depth"),
    [("knocking", None, 2), ("paired", None, 2), ("dcmha", (1, 3), 5), exhaustive("xsa", None, 2),
     exhaustive("gated_elementwise", None, 2), exhaustive("lightweight", (-1,), 2), exhaustive("dcmha", (-1,), 5)],
)  # fmt: skip
def test_decoding_token_by_token_equals_the_whole_row(name, layers, depth):
    """The caches of layers that do not compose have no weights of keys. A window's cache has a slot for each token.

    With five layers, four of them are scanned.
    """
    more = {"window_pattern": "1:1", "window": 3} if name == "paired" or depth > 2 else {}
    net, params = make_net(name, num_key_heads=2, depth=depth, compose_layers=layers, scan=depth > 2, **more)
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
        exhaustive("lm", "lightweight", (-1,), 3, (1, 2)),
        ("windows", "lightweight", (1, 3), 5, (2, 2)),
        exhaustive("windows", "folded", (4, 5), 6, (2, 2)),
        exhaustive("lm", "dcmha", (0, 3), 7, (3, 2)),
        exhaustive("vit", "lightweight", (-1,), 3, (1, 2)),
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


def test_knocking_heads_start_as_plain_attention():
    layer, _, x = make_layer("knocking", 4, 2)
    start = jit(layer.init)(jax.random.key(0), jnp.asarray(x, jnp.float32))["params"]
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(start[f"knocking_{name}"]["map"], np.eye(WIDTH // 4))
    every = np.ones((2, LENGTH, LENGTH), bool)
    np.testing.assert_allclose(output(layer, start, x), expected("mha", start, x, every, 4, 2), atol=1e-5)


@pytest.mark.parametrize("rotary", [0, 4])
def test_paired_heads_follow_their_order_in_masks_and_rotary_embeddings(rotary):
    """The first head of a pair sees no key of the second at its own token, and nothing sees later tokens."""
    layer, params, x = make_layer("paired", 4, 2, causal=True, rotary=rotary)
    seen = np.tril(np.ones((2, LENGTH, LENGTH), bool))
    wanted = expected("paired", params, x, seen, 4, 2, rotary=rotary)
    np.testing.assert_allclose(output(layer, params, x), wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    jacobian = jit(jax.jacobian(lambda x: layer.apply({"params": params}, x)[0].sum(-1)))(jnp.asarray(x, jnp.float32))
    reached = np.abs(jacobian[:, 0]).max(-1) > 0  # T T
    np.testing.assert_array_equal(reached, seen[0])
    first = {**params, "out": {"kernel": params["out"]["kernel"].at[2:].set(0)}}  # without the second heads
    moved = {**first, "value": {"kernel": params["value"]["kernel"].at[:, 1].add(1.0)}}  # values of the second heads
    change = np.abs(output(layer, moved, x) - output(layer, first, x)).max(-1)
    assert not change[:, 0].any()
    assert change[:, 1:].all()
    ids = jnp.asarray([[0, 0, 1, 1, 1, 2]] * 2)
    packed = jit(layer.apply)({"params": params}, jnp.asarray(x, jnp.float32), segments=ids)
    masked = output(layer, params, x, ids[:, None, :, None] == ids[:, None, None, :])
    np.testing.assert_allclose(packed, masked, atol=1e-5)


def test_exclusive_attention_with_values_of_zeros_has_finite_gradients():
    """A value of zeros has no direction: the output stays, and gradients are finite."""
    layer, params, x = make_layer("xsa", 4, 4)
    params["value"]["kernel"] = params["value"]["kernel"] * 0
    loss = lambda p: jnp.sum(layer.apply({"params": p}, jnp.asarray(x, jnp.float32)))  # noqa: E731
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jit(jax.grad(loss))(params)))


def test_exclusive_attention_to_other_tokens_is_refused():
    layer, params, x = make_layer("xsa", 4, 4)
    x = jnp.asarray(x, jnp.float32)
    with pytest.raises(ValueError, match="heads='xsa' needs queries and values of the same tokens"):
        layer.apply({"params": params}, x, x + 1)


def test_head_convolution_inside_groups():
    layer, params, x = make_layer("mta", 4, 4, groups=2)
    assert params["post"]["w_b"].shape == (2, 2, 2)
    wanted = expected("mta", params, x, np.ones((2, LENGTH, LENGTH), bool), 4, 4)
    np.testing.assert_allclose(output(layer, params, x), wanted, atol=1e-4)


def make_net(name, **fields):
    return make_lm(heads=name, **{**TINY, **fields})


def text_loss(net):
    task = TokenTask(jax.ShapeDtypeStruct((1, 12), jnp.int32), {}, "", ("tok/s", 12), None, 0.0)
    tokens = make_tokens(2, 12)
    batch = {"tokens": tokens, "weights": jnp.ones((2, 11))}
    return lambda params: task.loss(net)(params, batch, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*DEFAULT, *map(exhaustive, sorted({*head_settings.VARIANTS, *head_settings.SETTINGS} - {*DEFAULT}))],
)
def test_gradients_are_finite_and_reach_every_parameter(name):
    net, params = make_net(name)
    loss, gradients = jit(jax.value_and_grad(text_loss(net)))(params)
    assert np.isfinite(loss)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["paired", *map(exhaustive, ("diff", "diff2", "moh", "xsa", "knocking", "gated_elementwise"))]
)  # rounding changes the choice of "moh_topk"
def test_bfloat16_is_near_float32(name):
    net, params = make_net(name)
    tokens = make_tokens(2, 12)
    exact, near = (jit(n.apply)({"params": params}, tokens)[0] for n in (net, net.clone(dtype_mm="bfloat16")))
    assert near.dtype == jnp.float32
    np.testing.assert_allclose(near, exact, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["paired", *map(exhaustive, ("moh_topk", "xsa", "diff", "diff2", "knocking", "gated_elementwise"))]
)
def test_outputs_on_a_mesh_equal_those_of_one_device(name):
    net, params = make_net(name)
    tokens = make_tokens(4, 12)
    alone = jit(net.apply)({"params": params}, tokens)[0]
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])):
        found = jax.jit(lambda params, tokens: net.apply({"params": params}, tokens)[0])(params, tokens)
    np.testing.assert_allclose(found, alone, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "example"), [("lm", (2, 12)), ("vit", (2, 8, 8, 3))])
def test_the_balance_loss_is_that_of_the_router_and_is_added_to_the_loss(model, example, monkeypatch):
    """The loss of a model with one layer, whose input follows from the parameters."""
    if model == "lm":
        net, params = make_net("moh_topk")
        inputs, name = make_tokens(*example)[:, :-1], "decoderblock_0"
    else:
        net = vit.Model(3, heads="moh_topk", patch_size=(4, 4), width=16, depth=1, mlp_dim=16, num_heads=4)
        inputs = jnp.asarray(np.random.default_rng(0).normal(size=example), jnp.float32)
        name = "encoderblock_0"
        params = random_params(param_shapes(net, inputs))
    seen, project = [], Attention.project
    monkeypatch.setattr(Attention, "project", lambda self, x, *rest: seen.append(x) or project(self, x, *rest))
    of_layer = lambda p: (net.apply({"params": p}, inputs, mutable=[head_variants.LOSSES])[1], seen[-1])  # noqa: E731
    sown, attended = jit(of_layer)(params)
    router = jax.tree.map(np.asarray, params["Transformer"][name]["MultiHeadDotProductAttention_0"]["moh_topk"])
    wanted = head_oracle.balance(router, np.asarray(attended, np.float64).reshape(-1, 16), chosen=2)
    (found,) = jax.tree.leaves(sown)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert found > 0.5
    zero = jnp.zeros(())
    assert head_variants.with_balance(zero, sown) == pytest.approx(0.01 * wanted, rel=1e-5)
    if model == "lm":
        loss_of = text_loss(net)
    else:
        shape = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
        task = ImageTask(shape, {}, "", lambda x: x, "softmax_xent", 0.0, Augmentation())
        batch = {"image": inputs, "labels": jnp.eye(3)[:2], "scale": jnp.ones(2)}
        loss_of = lambda params: task.loss(net)(params, batch, jax.random.key(0))  # noqa: E731
    with_loss = float(jit(loss_of)(params))
    monkeypatch.setattr(head_variants, "BALANCE", 0.0)
    assert with_loss - float(jit(lambda params: loss_of(params))(params)) == pytest.approx(0.01 * wanted, rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", [4, 8])
def test_the_documented_formulas_give_the_numbers_of_parameters(heads):
    def count(name):
        net = lm.Model(7, heads=name, **{**TINY, "num_heads": heads, "width": 64})
        return sum(x.size for x in jax.tree.leaves(param_shapes(net, jnp.zeros((1, 2), jnp.int32))))

    rows = [line.split(" | ") for line in (ROOT / "docs/heads.md").read_text().splitlines() if line.startswith("| `")]
    formulas = {row[0].strip("|` "): row[3].replace("²", "**2").replace("·", "*") for row in rows if len(row) > 5}
    del formulas["heads"]
    for name, text in formulas.items():
        formula = re.sub(r"(?<=[A-Z0-9)])(?=[A-Z(])", "*", text.split("; ")[-1 if heads == 4 else 0].split(" for ")[0])
        sizes = {"M": 64, "H": heads, "D": 64 // heads, "R": 2, "G": 2 if name in head_settings.FOLDED else 1}
        assert count(name) - count("mha") == eval(formula, sizes), name


@pytest.mark.parametrize("name", ["moh_topk", exhaustive("diff2")])
def test_scanned_layers_equal_unrolled_ones_also_in_the_loss(name):
    net, params = make_net(name, depth=2)
    scanned = net.clone(scan=True)
    stacked = stack_blocks(params, 1)
    np.testing.assert_allclose(jit(text_loss(scanned))(stacked), jit(text_loss(net))(params), rtol=1e-5)


@pytest.mark.parametrize("name", head_settings.SETTINGS)
def test_names_of_settings_build_ordinary_models(name):
    fields = {"num_heads": 8, "num_key_heads": 2, "width": 16}
    for net in (lm.Model(7, heads=name, **fields), vit.Model(7, heads=name, **fields)):
        assert net.heads is None
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


def test_a_name_replaces_the_composition_of_a_preset_and_of_the_field_compose():
    net = lm.Model(7, preset="DCFlash-405M", heads="talking")
    assert (net.compose, net.projection, net.gate, net.static) == ("both", False, False, True)
    assert lm.Model(7, compose="both", heads="diff2").compose is None
    assert vit.Model(7, variant="DCViT-S/16", heads="moh_topk", num_heads=8).compose is None
    assert lm.Model(7, heads="dcmha", rank=4, static=True).rank == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": "talkng"}, r"heads='talkng'; did you mean 'talking'\?"),
        ({"heads": "lightweight", "rank": 2}, "heads='lightweight' means rank=1, found 2"),
        ({"heads": "folded", "num_heads": 4, "num_key_heads": 4}, "set num_key_heads below num_heads"),
        ({"heads": "folded_post", "num_heads": 4, "num_key_heads": 4}, "heads='folded_post' .* below num_heads"),
        ({"heads": "folded", "num_heads": 3}, "num_heads=3: set num_key_heads to a divisor below num_heads"),
        ({"heads": "folded", "num_key_heads": 2, "groups": 4}, "heads='folded' means groups=2, found 4"),
        ({"heads": "moh_topk", "num_heads": 6, "width": 48}, "a multiple of 4 heads, found num_heads=6"),
        ({"heads": "diff", "num_key_heads": 1}, "an even number of key heads, found 1"),
        ({"heads": "paired", "num_key_heads": 3}, "an even number of key heads, found 3"),
        ({"heads": "diff", "scan": True}, "set scan=False"),
        (
            {"heads": "lightweight", "compose_layers": (2,)},
            r"=\(2,\): expected different numbers of the 1 layers",
        ),
        ({"heads": "lightweight", "compose_layers": ()}, r"compose_layers=\(\): expected different numbers"),
        ({"heads": "lightweight", "compose_layers": (0, -1)}, "expected different numbers of the 1 layers"),
        ({"heads": "xsa", "compose_layers": (0,)}, "has no effect without a composition"),
    ],
    ids=str,
)
def test_errors_name_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        lm.Model(7, **{"width": 48, "depth": 1, **fields}).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))


def test_a_variant_with_a_composition_is_refused():
    with pytest.raises(ValueError, match="heads='diff2' and compose='both' exclude each other"):
        lm.LM(7, width=16, num_heads=4, heads="diff2", compose="both").init(
            jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
        )
