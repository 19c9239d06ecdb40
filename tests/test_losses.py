"""Losses, label smoothing and mixup against their definitions in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit import losses

LOGITS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32) * 3
LABELS = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 1]]


def test_softmax_and_sigmoid_cross_entropy():
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        losses.softmax_xent(LOGITS * jnp.ones(()), jnp.asarray(LABELS)), -np.log((p * LABELS).sum(axis=1)), rtol=1e-5
    )
    s = 1 / (1 + np.exp(-LOGITS))
    expected = -(LABELS * np.log(s) + (1 - LABELS) * np.log(1 - s)).sum(axis=1)
    np.testing.assert_allclose(losses.sigmoid_xent(jnp.asarray(LOGITS), jnp.asarray(LABELS)), expected, rtol=1e-5)


def test_smoothed_labels_still_sum_to_one():
    smoothed = losses.smooth(jnp.asarray(LABELS), 0.2)
    np.testing.assert_allclose(smoothed.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(smoothed[0], [0.85, 0.05, 0.05, 0.05], rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_mixup_uses_one_share_of_at_least_half_for_images_and_labels(seed):
    images = jnp.arange(5.0)[:, None, None, None] * jnp.ones((5, 2, 2, 1))
    mixed, labels = losses.mixup(jax.random.key(seed), images, jnp.eye(5), 0.4)
    share = float(labels[0, 0])
    assert 0.5 <= share <= 1
    for i in range(5):
        assert float(mixed[i, 0, 0, 0]) == pytest.approx(share * i + (1 - share) * ((i - 1) % 5), abs=1e-5)
        assert float(labels[i, (i - 1) % 5]) == pytest.approx(1 - share, abs=1e-6)


def test_mixup_shares_follow_the_beta_distribution():
    def share(key):
        return losses.mixup(key, jnp.ones((2, 1)), jnp.eye(2), 0.2)[1][0, 0]

    shares = np.asarray(jax.vmap(share)(jax.random.split(jax.random.key(0), 4000)))
    drawn = np.random.default_rng(0).beta(0.2, 0.2, 100_000)
    assert shares.mean() == pytest.approx(np.maximum(drawn, 1 - drawn).mean(), abs=0.01)
