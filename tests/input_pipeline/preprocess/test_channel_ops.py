"""Ops on images of other channels than 8-bit RGB: exact, or refused in one line."""

import itertools

import numpy as np
import pytest

import input_pipeline as ip

RNG = np.random.default_rng(0)
IMAGES = {
    "uint16": RNG.integers(0, 1 << 16, (24, 31, 13), np.uint16),
    "int16": RNG.integers(-(1 << 15), 1 << 15, (24, 31, 2), np.int16),
    "float32": RNG.normal(0, 1e3, (24, 31, 5)).astype(np.float32),
}


def apply(spec, image, seed=0):
    return ip.Preprocess(spec)({"image": image}, np.random.default_rng(seed))["image"]


@pytest.mark.parametrize(
    ("dtype", "spec"),
    [*zip(itertools.cycle(IMAGES), ["central_crop(16)", "random_crop((9, 8))", "flip_lr", "pad(2, 7)"], strict=False)],
)
def test_ops_that_move_pixels_treat_each_channel_alike_and_keep_the_dtype(dtype, spec):
    image = IMAGES[dtype]
    found = apply(spec, image)
    assert found.dtype == dtype
    for channel in range(image.shape[2]):
        np.testing.assert_array_equal(found[..., [channel]], apply(spec, image[..., [channel]]))
    assert np.isin(found, [*image.ravel(), 0, 7]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "method"),
    [*zip(itertools.cycle(IMAGES), ["bilinear", "nearest", "bicubic", "area", "lanczos3", "bilinear"], strict=False)],
)
def test_resize_is_tensorflows_in_float32_clipped_and_truncated(dtype, method):
    tf, image = pytest.importorskip("tensorflow"), IMAGES[dtype]
    found = apply(f"resize((17, 40), {method!r})", image)
    expected = np.asarray(tf.image.resize(image.astype(np.float32), (17, 40), method))
    if dtype != "float32":
        expected = np.trunc(np.clip(expected, np.iinfo(dtype).min, np.iinfo(dtype).max))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)
    assert apply("inception_crop(8)", image).shape == (8, 8, image.shape[2])


@pytest.mark.parametrize("dtype", IMAGES)
def test_resize_pillow_rounds_and_stays_in_the_range_of_the_pixels(dtype):
    image = IMAGES[dtype]
    found = apply("resize_pillow((7, 9))", image)
    assert (found.dtype, found.shape) == (dtype, (7, 9, image.shape[2]))
    assert (image.min() <= found).all()
    assert (found <= image.max()).all()
    np.testing.assert_array_equal(apply("resize_pillow(8)", np.full((5, 6, 2), 513, dtype)), np.full((8, 8, 2), 513))


@pytest.mark.parametrize("dtype", IMAGES)
def test_ranges_of_each_channel_are_those_of_numpy_in_float64(dtype):
    image = IMAGES[dtype]
    low, high = (np.arange(1.0, 1 + image.shape[2]) * factor for factor in (-100, 3000))
    ranged = apply(f"value_range(-1, 1, {low.tolist()}, {high.tolist()})", image)
    np.testing.assert_allclose(ranged, 2 * (image - low) / (high - low) - 1, rtol=1e-5, atol=1e-5)
    normed = apply(f"vgg_value_range({low.tolist()}, {high.tolist()})", image)
    np.testing.assert_allclose(normed, (image - low) / high, rtol=1e-5, atol=1e-5)
    with pytest.raises(ip.ReadingError, match=f"4 values for an image of {image.shape[2]} channels"):
        apply("value_range(0, 1, 0, (1, 2, 3, 4))", image)


def test_pad_with_a_value_that_the_dtype_does_not_hold_is_refused():
    with pytest.raises(ip.ReadingError, match="the image is uint8, which does not hold the value"):
        apply("pad(1, 256)", np.zeros((2, 2, 2), np.uint8))


@pytest.mark.parametrize(("dtype", "op"), [("uint16", "value_range(0, 1)"), ("float32", "value_range(in_min=1)")])
def test_a_range_of_8_bits_for_other_images_is_refused(dtype, op):
    with pytest.raises(ip.InputError, match="whose default is that of 8 bits"):
        ip.Preprocess(f"decode(3, dtype={dtype!r})|resize(8)|{op}")
    ip.Preprocess(f"decode(4)|resize(8)|{op}")
