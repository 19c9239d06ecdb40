"""Circuits are the bilinear forms by which a model computes scores and outputs, also under composition."""

import itertools

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from small_models import HEADS, make_lm, make_tokens

from dcvit.dcmha.compose import ComposeWeights
from dcvit.interpret import circuits as interpret
from dcvit.interpret.activations import compose_weights_of, run_with_cache

QUERY, KEY = 7, 3
FIELDS = dict(position="learned", compose="both", static=True, groups=2, num_key_heads=2)


@pytest.fixture(scope="module")
def run():
    """A model without biases and rotary embeddings, its arrays, and the normalized input of layer 1 in float64."""
    net, params = make_lm(**FIELDS)
    arrays = run_with_cache(net, params, make_tokens()).arrays
    x = np.asarray(arrays["block01/resid_pre"][0], np.float64)
    scale = np.asarray(params["Transformer"]["decoderblock_1"]["attention_norm"]["scale"], np.float64)
    return net, params, arrays, x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + net.norm_epsilon) * scale


def maps(net, arrays, query=QUERY, key=KEY):
    return [
        interpret.pair_map(
            compose_weights_of(arrays, 1, where), query, key, heads=HEADS, groups=net.groups
        )
        for where in ("pre", "post")
    ]  # fmt: skip


@pytest.mark.slow
def test_scores_are_the_forms_of_qk_circuits_and_composed_scores_those_of_effective_ones(run):
    net, params, arrays, x = run
    plain = interpret.circuits(net, params, 1)
    for forms, name in (
        (plain, "scores"), (interpret.effective_circuits(plain, *maps(net, arrays)), "composed_scores"),
    ):  # fmt: skip
        found = np.einsum("m,hmn,n->h", x[QUERY], np.asarray(forms.qk, np.float64), x[KEY])
        np.testing.assert_allclose(found, arrays[f"block01/{name}"][0, :, QUERY, KEY], rtol=2e-4, atol=2e-5)


def test_the_output_is_the_sum_of_weights_times_effective_ov_circuits(run):
    """Over all keys, with the weights before post-compose."""
    net, params, arrays, x = run
    plain = interpret.circuits(net, params, 1)
    out = 0
    for key in range(QUERY + 1):
        ov = np.asarray(interpret.effective_circuits(plain, *maps(net, arrays, key=key)).ov, np.float64)
        out += np.einsum("h,m,hmn->n", arrays["block01/weights"][0, :, QUERY, key], x[key], ov)
    np.testing.assert_allclose(out, arrays["block01/attention_out"][0, QUERY], rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("branches", "groups"), [*zip(oracle.BRANCHES, itertools.cycle([1, 2]), strict=False)])
def test_a_map_is_the_composition_of_unit_vectors(branches, groups):
    """Row h' of the map of a pair is the composition of head h' alone, for every branch."""
    weights = oracle.random_weights(
        np.random.default_rng(0), branches, batch=2, queries=3, keys=4, heads=4, groups=groups
    )
    one_head = np.zeros((2, 4, 3, 4))
    given = ComposeWeights(**{k: None if w is None else jnp.asarray(w, jnp.float32) for k, w in weights.items()})
    found = interpret.pair_map(given, 2, 1, heads=4, groups=groups, example=1)
    for head in range(4):
        one_head[:] = 0
        one_head[:, head] = 1
        expected = oracle.compose(one_head, weights, groups)[1, :, 2, 1]
        np.testing.assert_allclose(found[head], expected, rtol=1e-5, atol=1e-6)
    terms = interpret.pair_terms(given, 2, 1, groups=groups)
    assert [*terms] == [name for name in interpret.TERMS if name in terms]
    assert len(terms) == 1 + ("s" in branches) + sum(s in branches for s in "qk") * sum(b in branches for b in "pg")


@pytest.mark.slow
def test_captured_variance_is_that_of_a_singular_value_decomposition():
    forms = np.random.default_rng(0).normal(size=(3, 8, 6)) * np.linspace(0.1, 1, 6)
    squares = np.linalg.svd(forms.reshape(24, 6), compute_uv=False) ** 2
    found = interpret.captured_variance(jnp.asarray(forms, jnp.float32))
    np.testing.assert_allclose(found, np.cumsum(squares) / squares.sum(), rtol=1e-5)
