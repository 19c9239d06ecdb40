"""Tokens follow the distribution of temperature, top-k and top-p."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit.inference import sampling
from dcvit.inference.sampling import Sampling, sample

DRAWS = 4000


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The probabilities of the tokens, computed by a loop over the ranked logits."""
    logits = np.asarray(logits, np.float64) / temperature
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = {i: np.exp(logits[i] - logits.max()) for i in order}
    kept, cumulative = [], 0.0
    for i in order:
        kept.append(i)
        cumulative += weights[i] / sum(weights.values())
        if cumulative >= top_p:
            break
    probabilities = np.zeros(len(logits))
    probabilities[kept] = [weights[i] / sum(weights[j] for j in kept) for i in kept]
    return probabilities


def draws(logits, options):
    keys = jax.random.split(jax.random.key(0), DRAWS)
    many = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None], (DRAWS, len(logits)))
    return np.asarray(jax.jit(sample, static_argnums=2)(many, keys, options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.8, "temperature": 1.5}]
)
def test_tokens_follow_the_distribution_of_a_loop(options):
    logits = np.random.default_rng(3).normal(size=9) * 1.2
    expected = distribution(logits, **options)
    counts = np.bincount(draws(logits, Sampling(**options)), minlength=9)
    kept = expected > 0
    assert not counts[~kept].any()
    expected = DRAWS * expected[kept]
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 35  # chi-square, 8 degrees of freedom: 1 in 40,000
    assert set(np.flatnonzero(counts)) >= set(np.flatnonzero(kept)[expected > 20])


@pytest.mark.exhaustive
@pytest.mark.parametrize("top_p", [0.7, 0.999])
def test_sorting_a_shortlist_changes_no_token(monkeypatch, top_p):
    logits = jax.random.normal(jax.random.key(1), (200, 40)) * 2
    keys = jax.random.split(jax.random.key(2), 200)
    compiled = lambda: jax.jit(lambda *a: sample(*a, Sampling(top_p=top_p)))  # noqa: E731
    complete = compiled()(logits, keys)
    monkeypatch.setattr(sampling, "SHORTLIST", 12)
    shortlisted = compiled()
    np.testing.assert_array_equal(complete, shortlisted(logits, keys))
    few = [shortlisted(logits[i : i + 1], keys[i : i + 1]) for i in range(20)]
    np.testing.assert_array_equal(complete[:20], np.concatenate(few))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logits", "options", "expected"),
    [
        ([0.0, 2.0, 2.0, 2.0], {"top_k": 2}, {1, 2}),
        ([0.0, 2.0, 2.0, 2.0], {"top_p": 0.5}, {1, 2}),
        ([1.0, 3.0, 2.0], {"top_p": 1e-9}, {1}),
        ([1.0, 3.0, 3.0], {"temperature": 0.0}, {1}),
        ([1.0, 3e38, -3e38], {"top_p": 0.9}, {1}),
    ],
)
def test_equal_and_extreme_logits(logits, options, expected):
    assert set(draws(logits, Sampling(**options))) == expected
