"""Mixup, cutmix and random erasing against their definitions in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import refusal, small_setup

from dcvit.training import augment
from dcvit.training.augment import Augmentation

KEYS = jax.random.split(jax.random.key(0), 4000)
BATCH = 5
CODED = jnp.arange(1.0, BATCH + 1)[:, None, None, None]  # each image has its own value


def batch_of(height, width):
    return CODED * jnp.ones((BATCH, height, width, 2)), jnp.eye(BATCH)


@pytest.mark.slow
def test_mixup_uses_one_weight_of_at_least_half_for_images_and_labels():
    images = jnp.arange(5.0)[:, None, None, None] * jnp.ones((5, 2, 2, 1))
    mixed, labels = jax.jit(augment.mixup, static_argnums=3)(jax.random.key(0), images, jnp.eye(5), 0.4)
    share = float(labels[0, 0])
    assert 0.5 <= share <= 1
    for i in range(5):
        assert float(mixed[i, 0, 0, 0]) == pytest.approx(share * i + (1 - share) * ((i - 1) % 5), abs=1e-5)
        assert float(labels[i, (i - 1) % 5]) == pytest.approx(1 - share, abs=1e-6)


@pytest.mark.slow
def test_mixup_weights_follow_the_beta_distribution():
    def share(key):
        return augment.mixup(key, jnp.ones((2, 1)), jnp.eye(2), 0.2)[1][0, 0]

    shares = np.asarray(jax.jit(jax.vmap(share))(KEYS))
    drawn = np.random.default_rng(0).beta(0.2, 0.2, 100_000)
    assert shares.mean() == pytest.approx(np.maximum(drawn, 1 - drawn).mean(), abs=0.01)


def cutmix_shares(rng, height, width, alpha, n):
    """Return the part of an image that the box covers, n times: Algorithm A1 of Yun et al., 2019."""
    sides = np.sqrt(1 - rng.beta(alpha, alpha, n))
    covered = np.ones(n)
    for length in (height, width):
        side, middle = np.floor(length * sides), rng.integers(length, size=n)
        start = middle - side // 2
        covered *= (np.minimum(start + side, length) - np.maximum(start, 0)) / length
    return covered


@pytest.mark.slow
@pytest.mark.parametrize(
    ("height", "width", "alpha"), [(7, 12, 1.0), pytest.param(8, 8, 0.2, marks=pytest.mark.exhaustive)]
)
def test_cutmix_pastes_one_box_and_weights_labels_by_its_exact_area(height, width, alpha):
    images, labels = batch_of(height, width)
    mix = jax.jit(jax.vmap(lambda key: augment.cutmix(key, images, labels, alpha)))
    mixed, mixed_labels = map(np.asarray, mix(KEYS))
    own, neighbor = (np.asarray(x)[:, :1, :1, :1] for x in (images, np.roll(images, 1, axis=0)))
    pasted = mixed == neighbor
    assert np.array_equal(mixed, np.where(pasted, neighbor, own))
    box = pasted[:, 0, :, :, 0]
    assert (pasted == box[:, None, :, :, None]).all()  # the same box for all images and channels
    rows, columns = box.any(axis=2), box.any(axis=1)
    assert np.array_equal(box, rows[:, :, None] & columns[:, None, :])
    for side in (rows, columns):  # without gaps
        assert (np.abs(np.diff(side.astype(int), axis=1, prepend=0, append=0)).sum(axis=1) <= 2).all()
    share = box.mean(axis=(1, 2))
    expected = np.eye(BATCH) * (1 - share[:, None, None]) + np.roll(np.eye(BATCH), 1, axis=0) * share[:, None, None]
    np.testing.assert_allclose(mixed_labels, expected, atol=1e-6)
    drawn = cutmix_shares(np.random.default_rng(0), height, width, alpha, 100_000)
    assert share.mean() == pytest.approx(drawn.mean(), abs=0.015)
    assert share.std() == pytest.approx(drawn.std(), abs=0.015)


def erased_area(rng, height, width):
    """Return the erased part of an image and its height over its width: Zhong et al., 2020, with ten attempts."""
    for _ in range(10):
        area, aspect = height * width * rng.uniform(0.02, 1 / 3), math.exp(rng.uniform(math.log(0.3), -math.log(0.3)))
        rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if rows < height and columns < width:
            return rows * columns / (height * width)
    return 0.0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pixel", pytest.param("const", marks=pytest.mark.exhaustive)])
def test_erasing_replaces_one_rectangle_in_a_part_of_the_images(mode):
    height, width, prob = 16, 24, 0.4
    images = jnp.full((4000, height, width, 1), 9.0)
    found = np.asarray(jax.jit(lambda key: augment.erase(key, images, prob, mode))(jax.random.key(1)))[..., 0]
    erased = found != 9
    chosen = erased.any(axis=(1, 2))
    assert chosen.mean() == pytest.approx(prob, abs=0.03)
    assert np.array_equal(erased, erased.any(axis=2)[:, :, None] & erased.any(axis=1)[:, None, :])
    values = found[erased]
    assert (values.mean(), values.std()) == pytest.approx((0, float(mode == "pixel")), abs=0.02)
    rng = np.random.default_rng(0)
    areas = np.array([erased_area(rng, height, width) for _ in range(20_000)])
    assert erased[chosen].mean(axis=(1, 2)).mean() == pytest.approx(areas.mean(), abs=0.005)
    corners = erased[:, 0, 0] | erased[:, 0, -1] | erased[:, -1, 0] | erased[:, -1, -1]
    assert 0 < corners.mean() < chosen.mean()  # some at the edges, and not all


@pytest.mark.slow
def test_a_batch_gets_mixup_or_cutmix_with_the_probability_of_a_switch():
    images, labels = batch_of(6, 6)
    options = Augmentation(mixup=1.0, cutmix=1.0, mixup_switch_prob=0.3)
    mixed = jax.jit(jax.vmap(lambda key: options(key, images, labels)[0]))(KEYS[:1000])
    is_cut = np.asarray(mixed == jnp.round(mixed)).all(axis=(1, 2, 3, 4))
    assert is_cut.mean() == pytest.approx(0.3, abs=0.05)


@pytest.mark.slow
def test_erasing_and_the_switch_do_not_share_keys_with_mixup_and_cutmix(monkeypatch):
    used = []
    real = jax.random.uniform
    monkeypatch.setattr(jax.random, "uniform", lambda key, *a, **k: used.append(key) or real(key, *a, **k))
    monkeypatch.setattr(augment, "erase", lambda key, images, *_: used.append(key) or images)
    images, labels = batch_of(6, 6)
    key = jax.random.key(5)
    with jax.disable_jit():
        Augmentation(mixup=1.0, cutmix=1.0, reprob=0.5)(key, images, labels)
    of_mixing = [key, *jax.random.split(key, 2), *jax.random.split(key, 3)]
    mine, theirs = ({np.asarray(jax.random.key_data(k)).tobytes() for k in keys} for keys in (used[:2], of_mixing))
    assert len(mine) == 2
    assert not mine & theirs


def test_an_erased_rectangle_depends_on_the_key_and_the_place_in_the_batch_only():
    """Without options nothing changes."""
    images, labels = batch_of(8, 8)
    key = jax.random.key(3)
    erase = jax.jit(lambda images: augment.erase(key, images, 1.0, "const"))
    assert np.array_equal(erase(images * 2), erase(images) * 2)
    assert Augmentation()(key, images, labels)[0] is images


def test_an_option_without_effect_is_refused_in_one_line():
    assert "set config.mixup and config.cutmix" in refusal(small_setup, mixup_switch_prob=0.3)
