"""The composition of a layer as one value: the same from the fields of a module and from the weights it computes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from dcvit.dcmha import ComposeWeights, kv_cache
from dcvit.dcmha.inputs import Composition, Inputs, make_call
from dcvit.models.composition import ComposeParams, compose_inputs, compose_weights

HEADS, WIDTH, BATCH, TOKENS = 4, 8, 2, 3
SWITCHES = [s for s in itertools.product((True, False), repeat=3) if any(s)]  # projection, gate, static
CASES = [(branches, *switches) for branches in ("qk", "q", "k") for switches in SWITCHES]


def weights_of(composition):
    """The shapes of the weights that a layer computes."""

    def compute(key, x):
        module = ComposeParams(composition, HEADS)
        params = {name: module.init_with_output(key, WIDTH)[0] for name in composition.names}
        found = compose_weights(
            composition, params, compose_inputs(x, x, groups=composition.groups), num_heads=HEADS, dtype=None
        )
        return found.pre, found.post

    return jax.eval_shape(compute, jax.random.key(0), jnp.zeros((BATCH, TOKENS, WIDTH)))


@pytest.mark.parametrize(("branches", "projection", "gate", "static"), CASES)
def test_weights_have_the_composition_that_computes_them(branches, projection, gate, static):
    """So whether a model folds is the same before and after its weights are computed."""
    for compose, groups in (("both", 2), ("pre", 4), ("post", 1)):
        given = Composition(compose, branches, projection, gate, static, rank=3, groups=groups)
        found = Composition.of_weights(*weights_of(given), groups)
        for name in ("names", "is_key_wise", "mixes_heads"):
            assert getattr(found, name) == getattr(given, name)
        assert all(found.why_not_foldable(k) == given.why_not_foldable(k) for k in (1, 2, 4))
        assert found.rank == (3 if projection else 0)


@pytest.mark.parametrize(("branches", "projection", "gate", "static"), CASES)
def test_an_empty_cache_has_a_slot_for_every_key_wise_weight(branches, projection, gate, static):
    given = Composition("post", branches, projection, gate, static)
    k = jax.ShapeDtypeStruct((BATCH, TOKENS, 2, 5), jnp.float32)
    filled = jax.eval_shape(lambda *arrays: kv_cache.cache_of(Inputs(*arrays)), k, k, k, *weights_of(given))
    empty = jax.eval_shape(lambda: kv_cache.empty(given, (BATCH, TOKENS), HEADS, 10, jnp.float32))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), empty) == jax.tree.map(lambda x: (x.shape, x.dtype), filled)


def test_no_composition_has_no_composes_and_costs_nothing():
    none = Composition.of_weights(None, None)
    assert (none.names, none.is_key_wise, none.cached(HEADS)) == ((), False, {})
    assert none.why_not_foldable(1) == "there is no composition"
    assert none.multiply_adds(HEADS, HEADS, WIDTH, TOKENS, TOKENS**2) == 0


@pytest.mark.parametrize("wrong", [{"compose": "post"}, {"branches": "qk"}], ids=["compose", "key-wise"])
def test_a_call_whose_weights_have_another_composition_is_refused(wrong):
    """It could be folded where that is wrong."""
    given = Composition("pre", "q", gate=False)
    q = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS, 5), jnp.float32)
    inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), Inputs(q, q, q, *weights_of(given)))
    assert make_call(inputs, given).composition == given
    with pytest.raises(ValueError, match="the weights have the composition"):
        make_call(inputs, dataclasses.replace(given, **wrong))


@pytest.mark.parametrize(
    ("compose_window", "options", "expected"),
    [(4, {}, 4), (5, {}, None), (4, {"window": 4}, None), (3, {"window": 4}, 3), (5, {"window": 9}, None)],
)
def test_a_window_of_composition_is_kept_if_some_pair_is_outside(compose_window, options, expected):
    q, k = jnp.zeros((1, 5, 2, 4)), jnp.zeros((1, 3, 2, 4))
    call = make_call(
        Inputs(q, k, k, ComposeWeights(qg=jnp.zeros((1, 5, 2)))), causal=True, compose_window=compose_window, **options
    )
    assert call.options.compose_window == expected
    assert call.composition.compose_window == compose_window
