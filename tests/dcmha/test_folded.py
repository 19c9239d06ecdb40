"""Composition folded into queries and outputs: equality with the reference, the choice of it, and its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import output_and_gradients, random_case
from small_models import param_shapes, random_params
from test_plan import check_on_a_mesh

from dcvit import dcmha
from dcvit.dcmha import folded, plan
from dcvit.dcmha.inputs import Inputs, make_call
from dcvit.models.attention import Attention

CASES = {  # every branch that can be folded, and every option of attention
    "causal": {"branches": "qpg", "key_heads": 2, "groups": 2, "causal": True},
    "window": {"branches": "qp", "key_heads": 1, "groups": 1, "window": 3},
    "mask": {"branches": "qg", "key_heads": 2, "groups": 4, "mask": (2, 1, 7, 7)},
    "cross": {"branches": "qpgs", "key_heads": 2, "groups": 2, "keys": 9, "mask": (2, 1, 1, 9)},
    "pre": {"branches": "qpg", "post": None, "key_heads": 2, "groups": 2},
    "post": {"branches": None, "post": "qpg", "key_heads": 2, "groups": 2},
    "one query": {"branches": "qpgs", "key_heads": 2, "groups": 2, "queries": 1, "keys": 9, "mask": (2, 1, 1, 9)},
    "gates of heads with their own keys": {"branches": "qg", "key_heads": 4, "groups": 2, "causal": True},
}
IN_EXHAUSTIVE = ("mask", "pre")  # their options are in other cases


def case(name, dtype):
    options = dict(CASES[name])
    args, options = random_case(options.pop("queries", 7), heads=4, batch=2, dtype=dtype, **options)
    return args, options


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.exhaustive] if n in IN_EXHAUSTIVE else []) for n in CASES]
)
def test_output_and_gradients_equal_the_reference_in_float64(x64, name):
    args, options = case(name, jnp.float64)
    found, right = (
        output_and_gradients(lambda *a, n=n, **o: dcmha.attention(*a, **o, implementation=n), args, options)
        for n in ("folded", "reference")
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12 * max(1, float(jnp.abs(y).max())))


@pytest.mark.parametrize("name", CASES)
def test_it_is_chosen_where_it_is_exact(name):
    args, options = case(name, jnp.float32)
    assert plan.decide(make_call(Inputs(*args), groups=options["groups"])) == "folded"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"branches": "kpg", "groups": 2}, "key-wise"),
        ({"branches": "qpg", "groups": 1}, "1 groups of heads are not inside the 2 key heads"),
    ],
)
def test_a_composition_that_cannot_be_folded_is_refused_with_the_reason(change, reason):
    args, options = random_case(5, heads=4, key_heads=2, **change)
    assert plan.decide(make_call(Inputs(*args), groups=options["groups"])) != "folded"
    with pytest.raises(ValueError, match=f"implementation folded does not support this case: .*{reason}"):
        dcmha.attention(*args, **options, implementation="folded")


@pytest.mark.slow
def test_bfloat16_is_rounded_as_the_queries_and_outputs_of_plain_attention():
    args, options = case("causal", jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    found, right = (
        np.asarray(jax.jit(lambda *a, n=n: dcmha.attention(*a, **options, implementation=n))(*given))
        for n, given in (("folded", args), ("reference", wide))
    )
    assert found.dtype == jnp.bfloat16
    error = np.linalg.norm(np.float32(found) - right) / np.linalg.norm(right)
    assert error < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 5, 2, 3, 3), (1, 5, 3, 2, 2), (1, 1, 1, 6, 6)])  # of the matrices
def test_sums_and_products_of_heads_and_their_gradients_are_equal(x64, shape):
    rng = np.random.default_rng(0)
    x, matrices, d_out = (jnp.asarray(rng.normal(size=s)) for s in ((2, 5, 6, 4), shape, (2, 5, 6, 4)))

    @jax.jit
    def both(x, matrices, d_out):
        return [(f(x, matrices), jax.vjp(f, x, matrices)[1](d_out))
                for f in (folded.multiply_heads, folded.combine_heads)]  # fmt: skip

    found, right = both(x, matrices, d_out)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.exhaustive
@pytest.mark.parametrize("key_heads", [1, 2, 4])  # on a tensor axis of 2 devices
def test_output_and_gradients_on_a_mesh_equal_those_of_one_device(key_heads):
    options = {"branches": "qpgs", "key_heads": key_heads, "groups": key_heads, "causal": True}
    check_on_a_mesh(None, *random_case(24, heads=8, batch=2, rank=1, **options))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"qk_norm": "rmsnorm"}, {"window": 3}])
def test_the_layer_computes_the_same_function_with_the_reference(x64, library_promotion, fields):
    fields = {"num_key_heads": 2, "groups": 2, "branches": "q", "static": True, "compose": "both", **fields}
    layers = [
        Attention(8, causal=True, param_dtype=jnp.float64, implementation=name, **fields)
        for name in (None, "reference")
    ]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 32)))
    params = random_params(param_shapes(layers[0], x))
    params = {"params": jax.tree.map(lambda p: jnp.asarray(np.asarray(p), jnp.float64), params)}
    found = jax.jit(lambda *a: [layer.apply(*a) for layer in layers])(params, x)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_gradients_hold_no_array_of_all_scores():
    """Half of the memory of the scores would be enough for neither their composition nor their softmax."""
    args, options = random_case(2048, heads=4, key_heads=2, groups=2, branches="qpg", causal=True)
    grad = jax.jit(jax.grad(lambda *a: dcmha.attention(*a, **options).sum(), argnums=(0, 1, 2, 3, 4)))
    assert grad.lower(*args).compile().memory_analysis().temp_size_in_bytes < 4 * 2048 * 2048 * 4 / 2
