"""Contributions between heads and their averages are those of numpy, from the maps of single pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from small_models import HEADS, LENGTH, logits_of, make_lm, make_tokens

from dcvit.interpret.ablations import Ablation, ablated_outputs
from dcvit.interpret.activations import compose_weights_of, run_with_cache
from dcvit.interpret.contributions import average_contributions, largest_contributions

FIELDS = dict(compose="both", static=True, groups=2, window_pattern="1:1")


def pair_map(fields, query, key, groups, example):
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
def test_averages_are_those_of_the_maps_of_all_pairs_that_are_attended_to():
    """In layer 1, large scores let weights underflow to zero."""
    net, params = make_lm(**FIELDS, window=3, prefill_window=4, end_of_text=0)
    attention = params["Transformer"]["decoderblock_1"]["MultiHeadDotProductAttention_0"]
    attention["query"]["kernel"] = attention["query"]["kernel"].at[:, 0].multiply(60)
    tokens = make_tokens(batch=3, length=6).at[1, 2].set(0)
    found = average_contributions(net, params, [tokens[:2], tokens[2:]])
    arrays = run_with_cache(net, params, tokens).arrays
    assert found.examples == 3
    distance = np.subtract.outer(np.arange(6), np.arange(6))
    documents = np.cumsum(np.asarray(tokens) == 0, axis=1)
    for layer in range(net.depth):
        weights = np.asarray(arrays[f"block{layer:02d}/weights"], np.float64)
        seen = (distance >= 0) & (distance < (4 if layer == 0 else 6)) & (documents[:, :, None] == documents[:, None])
        assert not (weights[:, 1] > 0)[~seen].any()
        assert (weights[:, 0] > 0)[seen].all() == (layer == 0)
        entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=-1).mean(axis=(0, 2))
        np.testing.assert_allclose(found.entropy[layer], entropy, rtol=1e-4)
        for where, name in (("pre", "scores"), ("post", "weights")):
            fields = compose_weights_of(arrays, layer, where)._asdict()
            a = np.asarray(arrays[f"block{layer:02d}/{name}"], np.float64)
            pairs = np.argwhere(seen)
            maps = np.stack([pair_map(fields, t, s, net.groups, b) for b, t, s in pairs])
            added = sum(np.abs(a[b, :, t, s][:, None] * m) for (b, t, s), m in zip(pairs, maps, strict=True))
            np.testing.assert_allclose(found.share[where][layer], added / added.sum(axis=0), rtol=1e-3, atol=1e-6)


@pytest.mark.exhaustive
def test_a_contribution_is_the_largest_amount_of_its_branch():
    net, params = make_lm(**FIELDS)
    arrays = run_with_cache(net, params, make_tokens(batch=1)).arrays
    found = largest_contributions(arrays, 1, net.groups)
    heads = range(HEADS)
    same = [(g, h) for g in heads for h in heads if g != h and g // 2 == h // 2]
    assert len(found) == len({one[:5] for one in found}) == 2 * 3 * len(same)
    for one in found:
        fields = compose_weights_of(arrays, 1, one.where)._asdict()
        kept = {"static": ("static",), "query projection": ("q1", "q2"), "key projection": ("k1", "k2")}[one.branch]
        fields = {name: w if name in kept else None for name, w in fields.items()}
        a = np.asarray(arrays[f"block01/{'scores' if one.where == 'pre' else 'weights'}"])
        amounts = np.array([
            [a[0, one.from_head, t, s] * pair_map(fields, t, s, net.groups, 0)[one.from_head, one.to_head]
             for s in range(LENGTH)] for t in range(LENGTH)
        ])  # fmt: skip
        np.testing.assert_allclose(amounts[one.query, one.key], one.amount, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(np.abs(amounts).max(), abs(one.amount), rtol=1e-4, atol=1e-7)


composed = functools.cache(lambda: make_lm(compose="both"))


@pytest.mark.slow
def test_ablated_outputs_are_those_of_hooks():
    net, params = composed()
    tokens = make_tokens()
    zero = lambda head: lambda x: x.at[:, head].set(0)  # noqa: E731
    cases = {
        Ablation(1, head=2): {f"block01/{name}": zero(2) for name in ("scores", "weights", "composed_weights")},
        Ablation(0, None, "post", "key projection"): {"block00/post/k2": jnp.zeros_like},
    }
    found = ablated_outputs(net, params, tokens, [*cases, Ablation(None, None, "both", "all")])
    assert found.shape == (3, 2, net.vocab_size)
    for logits, hooks in zip(found[:2], cases.values(), strict=True):
        expected = run_with_cache(net, params, tokens, hooks).output[:, -1]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    plain = jax.tree.map(lambda x: x, params)
    for layer in range(net.depth):
        block = plain["Transformer"][f"decoderblock_{layer}"]["MultiHeadDotProductAttention_0"]
        block.pop("pre"), block.pop("post")
    expected = logits_of(net.clone(compose=None), plain, tokens)[:, -1]
    np.testing.assert_allclose(found[2], expected, rtol=1e-4, atol=1e-5)


def test_an_ablation_of_what_a_model_does_not_have_is_refused():
    net, params = composed()
    for head in (None, 1):
        with pytest.raises(ValueError, match=r"the model has nothing that Ablation\(layer="):
            ablated_outputs(net, params, make_tokens(), [Ablation(0, head, "pre", "static")])
