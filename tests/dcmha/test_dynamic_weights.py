"""Dynamic weights of all composes of a layer: equal to Eqn 5 and 6 for one token, compose, side and group at a time."""

import re

import jax
import jax.numpy as jnp
import lm_oracle
import numpy as np
import pytest
from jax.sharding import AxisType

from dcvit.dcmha import device, dynamic_weights
from dcvit.dcmha.inputs import Composition
from dcvit.models.composition import compose_inputs, compose_weights

HEADS, WIDTH = 4, 5
BRANCHES = {
    "all": {"compose": "both"},
    "projections": {"compose": "both", "gate": False},
    "gates": {"compose": "both", "projection": False},
    "query-wise": {"compose": "both", "branches": "q"},
    "key-wise post": {"compose": "post", "branches": "k"},
}
SIZES = [(1, 2, "tanh"), (2, 3, "exact"), (4, 1, "tanh")]  # groups, rank and the form of GELU
GELUS = {"tanh": lm_oracle.ACTIVATIONS["gelu_tanh"], "exact": lm_oracle.ACTIVATIONS["gelu"]}


def parameters(composition, dtype=np.float64):
    """Random parameters of each compose, by the names of their weights."""
    rng = np.random.default_rng(0)
    shapes = {field: shape for field, (shape, _) in composition.parameters(HEADS, WIDTH).items()}
    return {
        name: {field: jnp.asarray(rng.normal(size=shape), dtype) for field, shape in shapes.items()}
        for name in composition.names
    }


def expected(x, params, gelu):
    """The weights of all tokens, each computed alone."""
    found = {name: {} for name in params}
    for name, some in params.items():
        for field, w in some.items():
            if field.endswith("g"):
                found[name][field] = np.tanh(x @ w)
            elif field.endswith("1"):
                both = [by_group(token, w, some[f"{field[0]}2"], gelu) for row in x for token in row]
                down, up = np.reshape(both, (*x.shape[:2], 2, -1, HEADS)).transpose(2, 0, 1, 3, 4)
                found[name] |= {field: down, f"{field[0]}2": up}
    return found


def by_group(token, w_1, w_2, gelu):
    """The down and up projections of one token, 2 R H."""
    groups = w_1.shape[1]
    found = []
    for g in range(groups):
        down, up = (GELUS[gelu](token @ w_1[:, g]) @ w_2[g]).reshape(2, -1, HEADS // groups)
        found.append([down / np.sqrt((down**2).mean(axis=1, keepdims=True) + 1e-6), up])
    return np.concatenate(found, axis=2)


@pytest.fixture(params=["cpu", "gpu", "tpu"])
def platform(request, monkeypatch):
    """The platform whose arrangement is computed."""
    monkeypatch.setattr(device, "platform", lambda: request.param)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branches", "groups", "rank", "gelu"),
    [
        pytest.param(branches, *sizes, marks=[] if i % len(SIZES) == j else pytest.mark.exhaustive)
        for i, branches in enumerate(BRANCHES)
        for j, sizes in enumerate(SIZES)
    ],
)
def test_dynamic_weights_equal_eqn_5_and_6(x64, platform, branches, groups, rank, gelu):
    params = parameters(Composition(**BRANCHES[branches], groups=groups, rank=rank))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, WIDTH)))
    all_sides = ("qk", "q", "k")
    found = jax.jit(lambda x, params: [dynamic_weights(x, params, sides=s, heads=HEADS, gelu=gelu) for s in all_sides])
    right = expected(*jax.tree.map(np.asarray, (x, params)), gelu)
    for sides, weights in zip(all_sides, found(x, params), strict=True):
        of_sides = {name: {f: w for f, w in some.items() if f[0] in sides} for name, some in right.items()}
        assert {name: {*some} for name, some in weights.items()} == {name: {*some} for name, some in of_sides.items()}
        jax.tree.map(lambda w, y: np.testing.assert_allclose(w, y, rtol=0, atol=1e-11), weights, of_sides)


def test_weights_of_one_token_depend_on_no_other(x64, platform):
    params = parameters(Composition("both", groups=2))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 3, WIDTH)))
    direction = jnp.asarray(np.eye(6)[5].reshape(2, 3, 1) * np.ones(WIDTH))
    moved = jax.jit(lambda x, along: jax.jvp(lambda x: dynamic_weights(x, params, heads=HEADS), (x,), (along,))[1])
    for w in map(np.array, jax.tree.leaves(moved(x, direction))):
        assert np.abs(w[1, 2]).max() > 0
        w[1, 2] = 0
        assert not w.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branches", "groups"), [("all", 1), ("all", 2), ("projections", 2), ("gates", 1), ("query-wise", 1)]
)
def test_weights_on_a_mesh_that_splits_heads_equal_those_of_one_device(branches, groups):
    composition = Composition(**BRANCHES[branches], groups=groups, rank=3)
    params = parameters(composition, np.float32)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 7, WIDTH)), jnp.float32)

    def weights(x, params):
        inputs = compose_inputs(x, x, groups=groups)
        return compose_weights(composition, params, inputs, num_heads=HEADS, dtype=None)

    def with_gradients(x, params):
        out, pull = jax.vjp(weights, x, params)
        return out, pull(jax.tree.map(jnp.cos, out))

    with jax.set_mesh(jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])):
        compiled = jax.jit(with_gradients).lower(x, params).compile()
        found = compiled(x, params)
        text = jax.jit(weights).lower(x, params).compile().as_text()
    for w, right in zip(*map(jax.tree.leaves, (found, jax.jit(with_gradients)(x, params))), strict=True):
        np.testing.assert_allclose(w, right, rtol=0, atol=2e-5 * float(jnp.abs(right).max()))
    assert not re.search(r"all-(reduce|gather|to-all)|collective-permute", text)


@pytest.mark.parametrize(("branches", "groups"), [("all", 1), ("projections", 2)])
def test_gradients_have_no_arrays_of_seven_axes(platform, branches, groups):
    """jaxlib 0.10.2 and 0.11 crash on CPUs in fused products and sums of arrays with seven axes or more."""
    x, params = jnp.ones((2, 16, WIDTH)), parameters(Composition(**BRANCHES[branches], groups=groups), np.float32)

    def total(x, params):
        return sum(jnp.sum(w**2) for w in jax.tree.leaves(dynamic_weights(x, params, heads=HEADS)))

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
    assert not re.findall(r"tensor<(?:\d+x){7,}", gradient.lower(x, params).as_text())


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_all_products_have_the_precision_of_jax(platform, precision):
    x, params = jnp.ones((1, 3, WIDTH), jnp.float32), parameters(Composition("both"), np.float32)
    with jax.default_matmul_precision(precision):
        text = jax.jit(lambda x: dynamic_weights(x, params, heads=HEADS)).lower(x).as_text()
    assert {*re.findall(r"stablehlo.dot_general.*precision = \[(\w+), \w+\]", text)} == {precision.upper()}


def test_gates_do_not_pass_the_product_of_the_second_layers(platform):
    """A TPU would round them to bfloat16 again."""
    x, params = jnp.ones((1, 3, WIDTH), jnp.float32), parameters(Composition("pre"), np.float32)
    params["pre"]["q1"] = jnp.full_like(params["pre"]["q1"], jnp.inf)
    gates = jax.jit(lambda x: dynamic_weights(x, params, heads=HEADS)["pre"]["qg"])(x)
    np.testing.assert_allclose(gates, np.tanh(np.asarray(x) @ np.asarray(params["pre"]["qg"])), rtol=0, atol=1e-6)
