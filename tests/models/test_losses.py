"""Losses and label smoothing: equal to their definitions in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit.models import losses

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


def hidden_states():
    rng = np.random.default_rng(0)
    hidden, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 11, 8), (8, 37)))
    return hidden, kernel, jnp.asarray(rng.integers(37, size=(3, 11)))


@pytest.mark.slow
def test_token_cross_entropy_equals_minus_the_log_of_the_softmax():
    hidden, kernel, targets = hidden_states()
    logits = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    picked = np.take_along_axis(p, np.asarray(targets)[..., None], -1)[..., 0]
    got = losses.token_xent(lambda h: h @ kernel, hidden, targets)
    np.testing.assert_allclose(got, -np.log(picked), rtol=1e-5)
    log_z = np.log(np.exp(logits).sum(-1))
    got = losses.token_xent(lambda h: h @ kernel, hidden, targets, z_loss=0.1)
    np.testing.assert_allclose(got, 0.1 * log_z**2 - np.log(picked), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [4, 100])
def test_chunks_change_neither_token_cross_entropy_nor_its_gradients(chunk):
    hidden, kernel, targets = hidden_states()

    def loss(hidden, kernel, chunk):
        return jnp.mean(losses.token_xent(lambda h: h @ kernel, hidden, targets, chunk=chunk, z_loss=1e-2))

    plain, chunked = (
        jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)(hidden, kernel, c) for c in (None, chunk)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), chunked, plain)


@pytest.mark.slow
def test_with_chunks_the_logits_of_a_whole_batch_never_exist():
    batch, length, vocab, chunk = 2, 512, 4096, 32
    hidden, kernel = jnp.zeros((batch, length, 16)), jnp.zeros((16, vocab))
    targets = jnp.zeros((batch, length), jnp.int32)

    def bytes_needed(chunk):
        def loss(hidden, kernel):
            return jnp.sum(losses.token_xent(lambda h: h @ kernel, hidden, targets, chunk=chunk))

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, kernel).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    all_logits = 4 * batch * length * vocab
    assert bytes_needed(None) >= all_logits
    assert bytes_needed(chunk) < all_logits / 4
