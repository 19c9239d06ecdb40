"""Weights of classes: scikit-learn's balanced ones, refusals, and unknown labels through augmentation and the step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight
from sources import ListSource
from training_runs import make_step, refusal, small_lm_setup, small_setup

from dcvit.errors import ConfigError
from dcvit.models import losses
from dcvit.training.augment import cutmix, mixup
from dcvit.training.tasks import class_weights

CLASSES = 4
SINGLE = np.array([0, 0, 0, 1, 2, 2, 3, -1, -1], np.int32)
MULTI = np.array([[1, 0, -1, 1], [0, 1, 0, -1], [1, 1, 1, 0], [-1, -1, -1, -1], [1, 0, 0, 1]], np.int8)


def labeled(labels, **options):
    source = ListSource([{}], **options)
    source.labels = labels
    return source


def test_balanced_weights_of_one_label_are_those_of_scikit_learn():
    known = SINGLE[SINGLE >= 0]
    expected = compute_class_weight("balanced", classes=np.arange(CLASSES), y=known)
    np.testing.assert_allclose(class_weights("class_weights", "balanced", labeled(SINGLE), CLASSES), expected)


def test_balanced_weights_of_several_labels_are_those_of_scikit_learn_for_all_labels():
    every = np.nonzero(MULTI == 1)[1]
    expected = compute_class_weight("balanced", classes=np.arange(CLASSES), y=every)
    np.testing.assert_allclose(class_weights("class_weights", "balanced", labeled(MULTI), CLASSES), expected)
    for c, weight in enumerate(class_weights("pos_weight", "balanced", labeled(MULTI), CLASSES)):
        known = MULTI[:, c][MULTI[:, c] >= 0]
        negative, positive = compute_class_weight("balanced", classes=np.arange(2), y=known)
        assert weight == pytest.approx(positive / negative)


@pytest.mark.parametrize(("key", "value", "labels", "message"), [
    ("class_weights", "balanced", None, "has to read its images to know their labels; give 4 numbers"),
    ("class_weights", "balanced", SINGLE[:6], "such as 'd', have no positive label"),
])  # fmt: skip
def test_weights_that_cannot_be_counted_are_refused(key, value, labels, message):
    source = labeled(labels, class_names=tuple("abcd"))
    with pytest.raises(ConfigError, match=message):
        class_weights(key, value, source, CLASSES)


@pytest.mark.interop
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_losses_are_those_of_pytorch_but_for_the_divisor_of_mixed_labels(smoothing):
    """PyTorch divides by the weights of class indices, and by the number of examples for probabilities."""
    import torch
    from torch.nn import functional

    rng = np.random.default_rng(0)
    logits, weights = rng.normal(0, 2, (7, CLASSES)).astype(np.float32), np.float32([0.2, 1, 3, 0.5])
    index, mixed = rng.integers(0, CLASSES, 7), rng.dirichlet(np.ones(CLASSES), 7).astype(np.float32)

    def ours(labels):
        smooth = losses.smooth(jnp.asarray(labels), smoothing)
        scale = losses.mean_scale("softmax_xent", jnp.asarray(labels), jnp.asarray(weights))
        return float(jnp.mean(losses.softmax_xent(jnp.asarray(logits), smooth, jnp.asarray(weights)) * scale))

    def theirs(target):
        arguments = torch.tensor(logits), torch.tensor(target), torch.tensor(weights)
        return float(functional.cross_entropy(*arguments, label_smoothing=smoothing))

    assert ours(np.eye(CLASSES, dtype=np.float32)[index]) == pytest.approx(theirs(index), rel=1e-5)
    assert ours(mixed) * (mixed @ weights).sum() / 7 == pytest.approx(theirs(mixed), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mix", [mixup, cutmix])
def test_a_mixed_label_is_unknown_where_a_part_of_it_is(mix):
    labels = jnp.asarray(MULTI, jnp.float32)
    images = jnp.zeros((5, 8, 8, 1))
    mixed = np.asarray(mix(jax.random.key(1), images, labels, 1.0)[1])
    unknown = (MULTI < 0) | (np.roll(MULTI, 1, axis=0) < 0)
    np.testing.assert_array_equal(mixed == -1, unknown)
    known = np.asarray(mix(jax.random.key(1), images, jnp.maximum(labels, 0), 1.0)[1])
    np.testing.assert_array_equal(mixed[~unknown], known[~unknown])
    assert set(np.unique(known)) - {0, 1}


@pytest.mark.slow
@pytest.mark.usefixtures("library_promotion")
def test_weights_and_unknown_labels_give_the_same_step_in_parts():
    """The mean is over the known labels of the whole batch."""
    options = {
        "loss": "sigmoid_xent", "class_weights": tuple(range(1, 11)), "pos_weight": "balanced", "mixup": 0.2,
        "label_smoothing": 0.1, "optax_name": "scale_by_learning_rate", "optax": {"learning_rate": -1.0}, "lr": 0.1,
        "schedule": {"decay_type": "constant"}, "model.depth": 0,
    }  # fmt: skip
    setup = small_setup(**options)
    assert setup.task.weights["class_weights"] == tuple(range(1, 11))
    state, batch, update = make_step(setup)
    _, _, accumulated = make_step(small_setup(**options, grad_accum=4))
    batch["labels"] = batch["labels"].at[::3, 2:5].set(-1)
    for (name, one), other in zip(update(state, batch)[1].items(), accumulated(state, batch)[1].values(), strict=True):
        assert float(one) == pytest.approx(float(other), rel=1e-5), name


@pytest.mark.slow
def test_keys_without_an_effect_are_refused():
    assert refusal(small_setup, pos_weight="balanced") == (
        "config.pos_weight is for loss='sigmoid_xent', not 'softmax_xent'"
    )
    assert refusal(small_lm_setup, class_weights="balanced") == "config.class_weights='balanced' is for images"
    for value in ("blanced", [1, -1]):
        assert "should be 'balanced', or finite numbers, 0 or more" in refusal(small_setup, class_weights=value)
