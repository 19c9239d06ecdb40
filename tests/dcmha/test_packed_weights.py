"""Dynamic weights of several composes in one array: equal to Eqn 5-6 computed for each compose and side alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from dcvit.dcmha import device
from dcvit.dcmha.compose import dynamic_gate, dynamic_gates, dynamic_projection, dynamic_projections
from dcvit.dcmha.packed_weights import dynamic_weights

HEADS, WIDTH = 4, 5
BRANCHES = {
    "all": ("qk", True, True, ("pre", "post")),
    "projections": ("qk", True, False, ("pre", "post")),
    "gates": ("qk", False, True, ("pre", "post")),
    "query-wise": ("q", True, True, ("pre", "post")),
    "key-wise post": ("k", True, True, ("post",)),
}
SIZES = [(1, 2, "tanh"), (2, 3, "exact"), (4, 1, "tanh")]  # groups, rank and the form of GELU


def parameters(branches, groups, rank, dtype=np.float64):
    """Random parameters of each compose, by the names of their weights."""
    sides, projection, gate, composes = BRANCHES[branches]
    rng, inner = np.random.default_rng(0), 2 * rank * HEADS // groups
    shapes = {"1": (WIDTH, groups, inner), "2": (groups, inner, inner), "g": (WIDTH, HEADS)}
    ends = ("12" if projection else "") + ("g" if gate else "")
    return {
        where: {side + end: jnp.asarray(rng.normal(size=shapes[end]), dtype) for side in sides for end in ends}
        for where in composes
    }


def expected(x, params, side, gelu):
    """The weights of one side of each compose, each computed alone."""
    found = {where: {} for where in params}
    for where, some in params.items():
        if f"{side}1" in some:
            pair = dynamic_projection(x, some[f"{side}1"], some[f"{side}2"], heads=HEADS, gelu=gelu)
            found[where] |= {f"{side}{i}": w for i, w in enumerate(pair, start=1)}
        if f"{side}g" in some:
            found[where][f"{side}g"] = dynamic_gate(x, some[f"{side}g"])
    return found


@pytest.fixture(params=["cpu", "tpu"])
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
def test_packed_weights_equal_those_of_each_compose_and_side(x64, platform, branches, groups, rank, gelu):
    params = parameters(branches, groups, rank)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, WIDTH)))
    all_sides = ("q", "k", "qk")

    @jax.jit
    def both(x, params):
        packed = [dynamic_weights(x, params, sides=sides, heads=HEADS, gelu=gelu) for sides in all_sides]
        return packed, {side: expected(x, params, side, gelu) for side in "qk"}

    packed, alone = both(x, params)
    for sides, found in zip(all_sides, packed, strict=True):
        each = [alone[side] for side in sides]
        assert {where: {*some} for where, some in found.items()} == {
            where: set().union(*(one[where] for one in each)) for where in params
        }
        for one in each:
            for where, some in one.items():
                for name, w in some.items():
                    np.testing.assert_allclose(found[where][name], w, rtol=0, atol=1e-11)


def test_weights_of_one_token_depend_on_no_other(x64, platform):
    params = parameters("all", 2, 2)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 3, WIDTH)))

    def weights(x):
        return dynamic_weights(x, params, sides="qk", heads=HEADS)

    direction = jnp.asarray(np.eye(6)[5].reshape(2, 3, 1) * np.ones(WIDTH))
    moved = jax.jit(lambda x, along: jax.jvp(weights, (x,), (along,))[1])(x, direction)
    for w in map(np.array, jax.tree.leaves(moved)):
        assert np.abs(w[1, 2]).max() > 0
        w[1, 2] = 0
        assert not w.any()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("branches", "groups"), [("all", 1), ("projections", 2)])
def test_packed_weights_have_no_sums_of_seven_axes(platform, branches, groups):
    """jaxlib 0.10.2 and 0.11 crash on CPUs in fused products and sums of arrays with seven axes or more."""
    x, params = jnp.ones((2, 16, WIDTH)), parameters(branches, groups, 2, np.float32)

    def total(x, params):
        return sum(jnp.sum(w**2) for w in jax.tree.leaves(dynamic_weights(x, params, sides="qk", heads=HEADS)))

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
    assert not re.findall(r"tensor<(?:\d+x){7,}", gradient.lower(x, params).as_text())
    assert all(jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradient(x, params)))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_weights_on_a_mesh_that_splits_heads_equal_those_of_one_device(groups):
    """Groups have an axis of their own on this mesh, on which they do not exchange data."""
    params = parameters("all", groups, 3, np.float32)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 7, WIDTH)), jnp.float32)
    first, second, gates = ([some[f"q{end}"] for some in params.values()] for end in "12g")

    def weights():
        return dynamic_projections(x, first, second, heads=HEADS), dynamic_gates(x, gates)

    with jax.set_mesh(jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])):
        projections, split_gates = jax.jit(weights)()
    found = jax.jit(lambda: dynamic_weights(x, params, sides="q", heads=HEADS))()
    for where, (down, up), gate in zip(params, projections, split_gates, strict=True):
        some = found[where]
        np.testing.assert_allclose(down, some["q1"], rtol=0, atol=2e-5)
        np.testing.assert_allclose(up, some["q2"], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(gate, some["qg"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("precision", "expected"), [(None, "HIGH"), ("highest", "HIGHEST")])
def test_the_precision_of_norms_is_that_of_jax_if_it_is_set(platform, precision, expected):
    x, params = jnp.ones((1, 3, WIDTH), jnp.float32), parameters("projections", 1, 2, np.float32)
    with jax.default_matmul_precision(precision):
        text = jax.jit(lambda x: dynamic_weights(x, params, sides="qk", heads=HEADS)).lower(x).as_text()
    products = re.findall(r"stablehlo.dot_general.*precision = \[(\w+), \w+\]", text)
    others = "DEFAULT" if precision is None else expected
    assert {*products} == {expected, others}
