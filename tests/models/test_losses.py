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


def test_smoothed_labels_still_sum_to_one_and_unknown_ones_stay_unknown():
    smoothed = losses.smooth(jnp.asarray(LABELS), 0.2)
    np.testing.assert_allclose(smoothed.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(smoothed[0], [0.85, 0.05, 0.05, 0.05], rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(losses.smooth(jnp.asarray(MULTI), 0.2)) < 0, MULTI < 0)


WEIGHTS, POSITIVE = np.array([0.5, 2.0, 1.0, 3.0], np.float32), np.array([4.0, 0.25, 1.0, 2.0], np.float32)
MULTI = np.array([[1, 0, -1, 1], [0, 0, 0, 0], [-1, -1, -1, -1], [0, 1, 1, -1], [1, 1, 1, 1]], np.float32)


def mean_loss(name, labels, **weights):
    """The mean over a batch that training computes."""
    weights = {key: jnp.asarray(value) for key, value in weights.items()}
    scale = losses.mean_scale(name, jnp.asarray(labels), weights.get("class_weights"))
    return float(jnp.mean(getattr(losses, name)(jnp.asarray(LOGITS), jnp.asarray(labels), **weights)) * scale)


@pytest.mark.parametrize("weighted", [False, True])
def test_unknown_labels_count_neither_in_the_sigmoid_loss_nor_in_its_mean(weighted):
    s = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
    w, p = (WEIGHTS, POSITIVE) if weighted else (np.ones(4), np.ones(4))
    known = MULTI >= 0
    nats = -w * (p * MULTI * np.log(s) + (1 - MULTI) * np.log(1 - s))
    options = {"class_weights": WEIGHTS, "pos_weight": POSITIVE} if weighted else {}
    assert mean_loss("sigmoid_xent", MULTI, **options) == pytest.approx(4 * nats[known].mean(), rel=1e-5)
    gradient = jax.grad(lambda x: jnp.sum(losses.sigmoid_xent(x, jnp.asarray(MULTI))))(jnp.asarray(LOGITS))
    np.testing.assert_array_equal(np.asarray(gradient)[~known], 0)


@pytest.mark.parametrize("weighted", [False, True])
def test_examples_without_a_label_do_not_count_in_the_softmax_mean(weighted):
    labels = LABELS.copy()
    labels[1] = -1
    w = WEIGHTS if weighted else np.ones(4)
    log_p = LOGITS - np.log(np.exp(LOGITS).sum(axis=1, keepdims=True))
    rows, classes = [0, 2, 3, 4], [0, 2, 3, 1]
    expected = -(w[classes] * log_p[rows, classes]).sum() / w[classes].sum()
    options = {"class_weights": WEIGHTS} if weighted else {}
    assert mean_loss("softmax_xent", labels, **options) == pytest.approx(expected, rel=1e-5)
    labels[1] = 0  # no label at all
    marked = losses.unlabeled_as_unknown(jnp.asarray(labels))
    assert mean_loss("softmax_xent", np.asarray(marked), **options) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", losses.NAMES)
def test_a_batch_of_unknown_labels_has_no_loss_and_without_unknown_ones_the_scale_is_one(name):
    assert mean_loss(name, np.full((5, 4), -1, np.float32)) == 0
    assert float(losses.mean_scale(name, jnp.asarray(LABELS))) == 1


@pytest.mark.interop
def test_weighted_losses_equal_those_of_pytorch():
    import torch

    smoothing = 0.1
    logits, hot = torch.tensor(LOGITS), np.where(np.arange(5)[:, None] == 1, -1, LABELS).astype(np.float32)
    smoothed = losses.smooth(jnp.asarray(hot), smoothing)
    weights = jnp.asarray(WEIGHTS)
    scale = losses.mean_scale("softmax_xent", jnp.asarray(hot), weights)
    ours = jnp.mean(losses.softmax_xent(jnp.asarray(LOGITS), smoothed, weights)) * scale
    options = {"weight": torch.tensor(WEIGHTS), "ignore_index": -1, "label_smoothing": smoothing}
    theirs = torch.nn.CrossEntropyLoss(**options)(logits, torch.tensor([0, -1, 2, 3, 1]))
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)

    known = MULTI >= 0
    loss = torch.nn.BCEWithLogitsLoss(torch.tensor(WEIGHTS), pos_weight=torch.tensor(POSITIVE), reduction="none")
    theirs = loss(logits, torch.tensor(MULTI)).numpy()[known].mean()
    ours = mean_loss("sigmoid_xent", MULTI, class_weights=WEIGHTS, pos_weight=POSITIVE)
    assert ours == pytest.approx(4 * float(theirs), rel=1e-5)


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
