"""Captured arrays are those of the model, and hooks change the forward pass as a change of the model would."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from small_models import HEADS, LENGTH, jit, logits_of, make_lm, make_tokens
from test_attention_maps import block, captured

from dcvit.interpret.activations import compose_weights_of, run_with_cache


def changed(params, layer, change):
    """Parameters with the attention module of a layer after `change`, which edits a copy of its dict in place."""
    copy = jax.tree.map(np.array, params)
    change(block(copy, layer))
    return copy


@pytest.mark.slow
def test_each_composition_is_that_of_its_factors_in_float64_numpy():
    net, _, found, _ = captured("documents, static, groups, shared keys, windows of rows")
    arrays = found.arrays
    double = lambda x: np.asarray(x, np.float64)  # noqa: E731
    for layer in range(net.depth):
        for where, before, after in (("pre", "scores", "composed_scores"), ("post", "weights", "composed_weights")):
            weights = {k: double(w) for k, w in compose_weights_of(arrays, layer, where)._asdict().items()}
            expected = oracle.compose(double(arrays[f"block{layer:02d}/{before}"]), weights, groups=2)
            np.testing.assert_allclose(arrays[f"block{layer:02d}/{after}"], expected, rtol=1e-4, atol=1e-5)
    assert compose_weights_of(arrays, net.depth, "pre") is None


@pytest.mark.slow
def test_hooks_with_other_numbers_do_not_compile_again_and_remove_a_head_as_its_output_weights_do():
    net, params = make_lm(compose="both")
    tokens, traced = make_tokens(), []
    logits = jit(lambda params: net.apply({"params": params}, tokens)[0])

    def without(head, x):
        traced.append(head)
        return x.at[:, :, head].set(0)

    for head in range(HEADS):
        found = run_with_cache(net, params, tokens, {"block01/heads": jax.tree_util.Partial(without, head)}).output

        def remove(attention, head=head):
            attention["out"]["kernel"][head] = 0

        expected = logits(changed(params, 1, remove))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert np.abs(expected - logits(params)).max() > 0.01
    assert len(traced) == 1


@pytest.mark.slow
def test_ablated_branches_are_those_of_a_model_without_them():
    net, params = make_lm(compose="both")
    tokens = make_tokens()
    found = run_with_cache(net, params, tokens, {"*/k2": jnp.zeros_like, "*/kg": jnp.zeros_like}).output
    without = changed(params, 0, lambda _: None)
    for layer in range(net.depth):
        for where in ("pre", "post"):
            for name in ("w_k1", "w_k2", "w_kg"):
                del block(without, layer)[where][name]
    expected = logits_of(net.clone(branches="q"), without, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_hooks_see_the_arrays_of_hooks_before_them_and_returned_arrays_are_replaced():
    net, params = make_lm()
    arrays = run_with_cache(net, params, make_tokens(), {"block00/scores": jnp.zeros_like}).arrays
    assert not arrays["block00/scores"].any()
    counts = np.arange(1, LENGTH + 1)
    expected = np.tril(np.ones((LENGTH, LENGTH))) / counts[:, None]
    np.testing.assert_allclose(arrays["block00/weights"][0, 0], expected, rtol=1e-6)


@pytest.mark.slow
def test_names_select_the_returned_arrays():
    net, params = make_lm(compose="pre")
    arrays = run_with_cache(net, params, make_tokens(), names=["block01/scores", "*/pre/q?"]).arrays
    assert [*arrays] == [
        "block00/pre/q1", "block00/pre/q2", "block00/pre/qg", "block01/pre/q1", "block01/pre/q2", "block01/pre/qg",
        "block01/scores",
    ]  # fmt: skip
    assert arrays["block01/scores"].shape == (2, HEADS, LENGTH, LENGTH)


@pytest.mark.slow
def test_unknown_names_and_other_shapes_are_refused():
    net, params = make_lm()
    with pytest.raises(ValueError, match="no array 'block00/score'; did you mean 'block00/scores'"):
        run_with_cache(net, params, make_tokens(), names=["block00/score"])
    with pytest.raises(ValueError, match="no array 'block02/\\*'"):
        run_with_cache(net, params, make_tokens(), {"block02/*": jnp.zeros_like})
    with pytest.raises(ValueError, match=r"hook of block00/heads returns shape \(1, .*expected \(2, "):
        run_with_cache(net, params, make_tokens(), {"block00/heads": lambda x: x[:1]})
