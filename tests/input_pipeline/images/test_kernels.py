"""Loops over pixels: resizing against TensorFlow's kernel, and the others against numpy."""

import importlib.util
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline.images import decode, kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
SIDES = [(1, 1), (1, 300), (2, 3), (17, 200), (224, 224), (375, 500), (1000, 31)]


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("sides", SIDES)
def test_resized_pixels_are_bitwise_those_of_tensorflow(sides):
    tf = pytest.importorskip("tensorflow")
    for size in ((1, 1), (2, 500), (224, 224), (301, 97)):
        for image in (noise(*sides), np.full((*sides, 3), 255, np.uint8)):
            expected = tf.raw_ops.ResizeBilinear(images=image[None], size=size, half_pixel_centers=True).numpy()[0]
            np.testing.assert_array_equal(kernels.resize_bilinear(image, size), expected.astype(np.uint8))


@pytest.mark.parametrize("sides", SIDES)
def test_averaged_pixels_are_bitwise_those_of_tensorflow(sides):
    tf = pytest.importorskip("tensorflow")
    for size in ((1, 1), (2, 500), (224, 224), (301, 97)):
        for image in (noise(*sides), np.full((*sides, 3), 255, np.uint8)):
            expected = tf.image.resize(image, size, method="area").numpy()
            np.testing.assert_array_equal(kernels.resize_area(image, size), expected.astype(np.uint8))


@pytest.mark.parametrize("by_numpy", [0, 10**6], ids=["numba", "numpy"])
@pytest.mark.parametrize("method", kernels.ANTIALIASED)
@pytest.mark.parametrize("sides", SIDES)
def test_antialiased_pixels_are_bitwise_those_of_tensorflow(monkeypatch, sides, method, by_numpy):
    """Compared as floats, before they are clipped."""
    tf = pytest.importorskip("tensorflow")
    monkeypatch.setattr(kernels, "BEFORE_NUMBA", by_numpy)
    for size in ((1, 1), (2, 500), (224, 224), (301, 97)):
        for image in (noise(*sides), noise(*sides)[..., :1]):
            expected = tf.image.resize(image, size, method=method, antialias=True).numpy()
            np.testing.assert_array_equal(kernels.resize_antialiased(image, size, method), expected)


def test_antialiased_resizing_does_not_import_tensorflow(monkeypatch):
    """Models of timm and transformers are used with it."""
    monkeypatch.setattr(decode, "tensorflow", None)
    for method in kernels.ANTIALIASED:
        assert decode.resize(noise(9, 7), (4, 5), method, antialias=True).shape == (4, 5, 3)


def test_the_first_antialiased_images_do_not_start_numba(monkeypatch):
    """Its start would take longer than a prediction."""
    monkeypatch.setattr(kernels, "_resized", itertools.count())
    monkeypatch.setattr(kernels, "_machine_code", None)
    assert kernels.resize_antialiased(noise(9, 7), (4, 5), "bicubic").shape == (4, 5, 3)


@pytest.mark.slow
def test_positions_of_every_side_up_to_2000_are_those_of_tensorflow():
    tf = pytest.importorskip("tensorflow")
    ramp = np.arange(2000, dtype=np.float32)
    for length in range(1, 2001):
        before, after, weight = kernels._interpolation(length, 224)
        found = ramp[before] + (ramp[after] - ramp[before]) * weight
        image = ramp[None, None, :length, None]
        expected = tf.raw_ops.ResizeBilinear(images=image, size=(1, 224), half_pixel_centers=True).numpy().ravel()
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("length", "new_length"), [(1, 224), (2000, 1), (2000, 2000), (10**6, 999)])
def test_no_position_is_outside_of_the_axis(length, new_length):
    """The loops do not check indices, except for the last ones of an area."""
    before, after, _ = kernels._interpolation.__wrapped__(length, new_length)
    assert max(before.max(), after.max()) < length
    (first, end, *_), _ = kernels._cover.__wrapped__(length, new_length)
    assert (first < end).all()
    assert (first < length).all()


@pytest.mark.parametrize("sides", SIDES)
def test_moved_pixels_equal_numpys_indexing(sides):
    image, rng = noise(*sides), np.random.default_rng(1)
    pixels = image.shape[0] * image.shape[1]
    sources = rng.integers(0, pixels + 1, sides).astype(np.uint32)
    padded = np.concatenate([image.reshape(-1, 3), np.full((1, 3), 9, np.uint8)])
    np.testing.assert_array_equal(kernels.move(image, sources, 9), padded[sources])


def test_result_does_not_depend_on_layout_or_threads_and_the_image_is_unchanged():
    image = noise(64, 80)
    view = np.asfortranarray(image)
    view.setflags(write=False)
    expected = kernels.resize_bilinear(image, (50, 30))
    np.testing.assert_array_equal(image, noise(64, 80))
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(lambda _: kernels.resize_bilinear(view, (50, 30)), range(64)):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 5, 4)])
def test_images_that_the_loops_cannot_index_are_errors_of_one_line(shape):
    with pytest.raises(ip.InputError, match=r"^sharpen: expected [^\n]*$"):
        kernels.sharpen(np.zeros(shape, np.uint8), 1.0)
