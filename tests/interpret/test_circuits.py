"""Circuits are the bilinear forms by which a model computes scores and outputs; contributions are those of numpy."""

import itertools

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from small_models import HEADS, LENGTH, make_lm, make_tokens

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


def pair_map(arrays, where, key=KEY):
    """The sum of the terms of a pair, from heads (rows) to heads, in float64."""
    terms = interpret.pair_terms(compose_weights_of(arrays, 1, where), QUERY, key, groups=FIELDS["groups"])
    return sum(np.asarray(term, np.float64) for term in terms.values())


@pytest.mark.slow
def test_scores_are_the_forms_of_qk_circuits_and_composed_scores_those_of_the_composed_forms(run):
    net, params, arrays, x = run
    qk = np.asarray(interpret.circuits(net, params, 1).qk, np.float64)
    for forms, name in ((qk, "scores"), (np.einsum("gh,gmn->hmn", pair_map(arrays, "pre"), qk), "composed_scores")):
        found = np.einsum("m,hmn,n->h", x[QUERY], forms, x[KEY])
        np.testing.assert_allclose(found, arrays[f"block01/{name}"][0, :, QUERY, KEY], rtol=2e-4, atol=2e-5)


def test_the_output_is_the_sum_of_weights_times_composed_ov_circuits(run):
    """Over all keys, with the weights before post-compose."""
    net, params, arrays, x = run
    ov, out = np.asarray(interpret.circuits(net, params, 1).ov, np.float64), 0
    for key in range(QUERY + 1):
        weights = np.asarray(arrays["block01/weights"][0, :, QUERY, key], np.float64) @ pair_map(arrays, "post", key)
        out += np.einsum("h,m,hmn->n", weights, x[key], ov)
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
    terms = interpret.pair_terms(given, 2, 1, groups=groups, example=1)
    found = sum(terms.values())
    for head in range(4):
        one_head[:] = 0
        one_head[:, head] = 1
        expected = oracle.compose(one_head, weights, groups)[1, :, 2, 1]
        np.testing.assert_allclose(found[head], expected, rtol=1e-5, atol=1e-6)
    assert [*terms] == [name for name in interpret.TERMS if name in terms]
    assert len(terms) == 1 + ("s" in branches) + sum(s in branches for s in "qk") * sum(b in branches for b in "pg")


@pytest.mark.slow
def test_captured_variance_is_that_of_a_singular_value_decomposition():
    forms = np.random.default_rng(0).normal(size=(3, 8, 6)) * np.linspace(0.1, 1, 6)
    squares = np.linalg.svd(forms.reshape(24, 6), compute_uv=False) ** 2
    found = interpret.captured_variance(jnp.asarray(forms, jnp.float32))
    np.testing.assert_allclose(found, np.cumsum(squares) / squares.sum(), rtol=1e-5)


def map_of(fields, query, key, groups, example):
    """The map of a pair by composing unit vectors with the oracle."""
    unit = np.zeros((HEADS, HEADS, 1, 1))
    unit[np.arange(HEADS), np.arange(HEADS)] = 1
    at = {}
    for name, w in fields.items():
        w = None if w is None else np.asarray(w, np.float64)
        if w is not None and name != "static":
            position = query if name[0] == "q" else key
            w = np.repeat(w[example : example + 1, position : position + 1], HEADS, axis=0)
        at[name] = w
    return oracle.compose(unit, at, groups)[:, :, 0, 0]  # from heads (rows) to heads


@pytest.mark.exhaustive
def test_a_contribution_is_the_largest_amount_of_its_branch():
    net, params = make_lm(compose="both", static=True, groups=2, window_pattern="1:1")
    arrays = run_with_cache(net, params, make_tokens(batch=1)).arrays
    found = interpret.largest_contributions(arrays, 1, net.groups)
    heads = range(HEADS)
    same = [(g, h) for g in heads for h in heads if g != h and g // 2 == h // 2]
    assert len(found) == len({one[:5] for one in found}) == 2 * 3 * len(same)
    for one in found:
        fields = compose_weights_of(arrays, 1, one.where)._asdict()
        kept = {"static": ("static",), "query projection": ("q1", "q2"), "key projection": ("k1", "k2")}[one.branch]
        fields = {name: w if name in kept else None for name, w in fields.items()}
        a = np.asarray(arrays[f"block01/{'scores' if one.where == 'pre' else 'weights'}"])
        amounts = np.array([
            [a[0, one.from_head, t, s] * map_of(fields, t, s, net.groups, 0)[one.from_head, one.to_head]
             for s in range(LENGTH)] for t in range(LENGTH)
        ])  # fmt: skip
        np.testing.assert_allclose(amounts[one.query, one.key], one.amount, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(np.abs(amounts).max(), abs(one.amount), rtol=1e-4, atol=1e-7)
    windowed = interpret.largest_contributions(arrays, 1, net.groups, compose_window=1)
    assert all(one.query == one.key for one in windowed)
