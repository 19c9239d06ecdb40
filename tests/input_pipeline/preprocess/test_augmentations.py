"""Augmentations of colors and geometry: torchvision's and Pillow's pixels, and the distributions of the papers."""

import image_datasets
import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps

import input_pipeline as ip
from input_pipeline.preprocess import augmentations, randaug

PHOTO = image_datasets.image_array(1, 40, 56)
PILLOW = Image.fromarray(PHOTO)


def apply(spec, image=PHOTO, seed=0):
    return ip.Preprocess(spec)({"image": image}, np.random.default_rng(seed))["image"]


class Drawn(np.random.Generator):
    """A generator that returns given numbers, and records the calls."""

    def __init__(self, **values):
        super().__init__(np.random.PCG64(0))
        self.values, self.calls = {key: list(found) for key, found in values.items()}, []

    def _draw(self, name, *args):
        self.calls.append((name, *args))
        return self.values[name].pop(0)

    def integers(self, *args):
        return self._draw("integers", *args)

    def uniform(self, *args):
        return self._draw("uniform", *args)

    def permutation(self, *args):
        return self._draw("permutation", *args)

    def dirichlet(self, alpha):
        return np.array(self._draw("dirichlet", alpha))

    def beta(self, *args):
        return self._draw("beta", *args)


@pytest.mark.interop
def test_changes_of_colors_are_those_of_torchvision():
    pytest.importorskip("torch")
    import torchvision_ops  # noqa: F401

    functional = pytest.importorskip("torchvision.transforms.functional")
    pairs = {
        "brightness": functional.adjust_brightness, "contrast": functional.adjust_contrast,
        "saturation": functional.adjust_saturation, "hue": functional.adjust_hue,
    }  # fmt: skip
    for name, theirs in pairs.items():
        ours = augmentations.COLORS[name]
        for factor in (-0.5, -0.21, 0.0, 0.004, 0.5) if name == "hue" else (0.0, 0.3, 1.0, 1.7):
            np.testing.assert_array_equal(np.asarray(ours(PILLOW, factor)), np.asarray(theirs(PILLOW, factor)))
    assert (np.asarray(functional.solarize(PILLOW, 128)) == np.asarray(ImageOps.solarize(PILLOW))).all()
    gray = np.asarray(functional.rgb_to_grayscale(PILLOW, 3))
    np.testing.assert_array_equal(three(Drawn(integers=[0])), gray)
    blurred = np.asarray(functional.gaussian_blur(PILLOW, 13, [1.5, 1.5]), np.int32)  # Pillow's is a sum of boxes
    assert np.abs(three(Drawn(integers=[2], uniform=[1.5])).astype(np.int32) - blurred).mean() < 1


def three(rng):
    return ip.Preprocess("three_augment")({"image": PHOTO}, rng)["image"]


def test_three_augment_is_one_of_three_with_equal_probability():
    solarized = np.where(PHOTO < 128, PHOTO, 255 - PHOTO)
    np.testing.assert_array_equal(three(Drawn(integers=[1])), solarized)
    blur = Drawn(integers=[2], uniform=[0.7])
    np.testing.assert_array_equal(three(blur), np.asarray(PILLOW.filter(ImageFilter.GaussianBlur(0.7))))
    assert blur.calls == [("integers", 3), ("uniform", 0.1, 2)]
    pp, rng = ip.Preprocess("three_augment"), np.random.default_rng(0)
    small = PHOTO[:4, :4]
    results = [pp({"image": small}, rng)["image"] for _ in range(600)]
    solar = np.where(small < 128, small, 255 - small)
    counts = sum((x == solar).all() for x in results), sum((x[..., :1] == x).all() for x in results)
    assert all(160 < count < 240 for count in counts)


def test_color_jitter_draws_factors_and_an_order():
    rng = Drawn(permutation=[[3, 0, 2, 1]], uniform=[0.05, 1.2, 0.8])
    found = ip.Preprocess("color_jitter(0.3, 0, 0.4, 0.1)")({"image": PHOTO}, rng)["image"]
    steps = (("hue", 0.05), ("brightness", 1.2), ("saturation", 0.8))
    expected = PILLOW
    for name, factor in steps:
        expected = augmentations.COLORS[name](expected, factor)
    np.testing.assert_array_equal(found, np.asarray(expected))
    assert rng.calls == [("permutation", 4), *(("uniform", *ends) for ends in ((-0.1, 0.1), (0.7, 1.3), (0.6, 1.4)))]
    means = [apply("color_jitter(0.5)", np.full((1, 1, 3), 100, np.uint8), seed)[0, 0, 0] for seed in range(400)]
    assert 50 <= min(means) < 55 < 145 < max(means) <= 150
    assert abs(np.mean(means) - 100) < 5
    assert apply("color_jitter(2.0)", np.full((1, 1, 3), 100, np.uint8), 1).min() >= 0  # no negative factor


def test_augmix_is_the_mixture_of_its_chains():
    """Algorithm 1 of the paper, with the ops drawn in this order: weights, share, and for each chain its ops."""
    rng = Drawn(dirichlet=[[0.2, 0.8]], beta=[0.4], integers=[1, 0, 2, 2, 4], uniform=[3.0, 3.0, 2.5])
    found = ip.Preprocess("augmix(width=2)")({"image": PHOTO}, rng)["image"]
    contrasted = randaug.autocontrast(PHOTO)
    both = randaug.solarize(randaug.posterize(PHOTO, 3), 256 - 64)
    expected = 0.4 * PHOTO + 0.6 * (0.2 * contrasted.astype(float) + 0.8 * both)
    assert np.abs(found - expected).max() <= 0.5 + 1e-4
    assert rng.calls[:3] == [("dirichlet", [1.0, 1.0]), ("beta", 1.0, 1.0), ("integers", 1, 4)]
    assert ("integers", len(augmentations.AUGMIX_OPS)) in rng.calls


def test_ops_of_augmix_have_the_magnitudes_of_the_paper(monkeypatch):
    level = 0.3
    names = ("posterize", "rotate", "solarize", "shear_x", "shear_y", "translate_x", "translate_y")
    found = {}
    for name in ("autocontrast", "equalize", *names):
        monkeypatch.setattr(randaug, name, lambda image, *args, name=name: found.update({name: args}))
    for op in augmentations.AUGMIX_OPS:
        op(PHOTO, level, np.random.default_rng(3))
    sizes = {key: abs(args[0]) for key, args in found.items() if args}
    assert sizes == {
        "posterize": 4 - int(4 * level), "rotate": int(30 * level), "solarize": 256 - int(256 * level),
        "shear_x": 0.3 * level, "shear_y": 0.3 * level,
        "translate_x": int(level * 56 / 3), "translate_y": int(level * 40 / 3),
    }  # fmt: skip
    assert len(found) == len(augmentations.AUGMIX_OPS) == 9
