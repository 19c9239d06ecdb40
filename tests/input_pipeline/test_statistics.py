"""Statistics of images equal numpy's over all pixels, in any grouping."""

import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline.check import Statistics, value_range


def images(dtype, channels=3, offset=0.0):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, (20, 2))
    found = [rng.normal(offset, 50, (*size, channels)) + 10 * i for i, size in enumerate(sizes)]
    return [np.clip(x, 0, None).astype(dtype) for x in found]


def measured(parts):
    statistics = Statistics()
    for image in parts:
        statistics.add(image)
    return statistics


@pytest.mark.parametrize(("dtype", "offset"), [("uint8", 40), ("uint16", 3e4), ("int16", 2e4), ("float32", 1e6)])
def test_they_are_those_of_numpy_over_all_pixels(dtype, offset):
    parts = images(dtype, offset=offset)
    pixels = np.concatenate([image.reshape(-1, 3) for image in parts]).astype(np.longdouble)
    expected = [pixels.mean(0), pixels.std(0), pixels.min(0), pixels.max(0)]
    np.testing.assert_allclose(np.transpose(measured(parts).channels()), np.float64(expected), rtol=1e-12)


def test_they_are_the_same_in_any_grouping():
    parts, rng = images("uint16"), np.random.default_rng(1)
    merged = Statistics()
    for group in np.split(rng.permutation(len(parts)), np.sort(rng.integers(0, len(parts), 4))):
        merged.update(measured(parts[i] for i in group))
    np.testing.assert_allclose(merged.channels(), measured(parts).channels(), rtol=1e-12)


def test_nothing_cancels_where_the_mean_is_large():
    parts = [np.full((4, 4, 1), 16_777_214, np.float32), np.full((4, 4, 1), 16_777_215, np.float32)]
    (channel,) = measured(parts).channels()
    assert (channel.mean, channel.std) == (16_777_214.5, 0.5)


def test_the_printed_op_normalizes_the_images_and_takes_a_constant_channel():
    parts = images("uint16", 2)
    for image in parts:
        image[..., 1] = 7
    op = ip.Preprocess(f"decode(2, dtype='uint16')|{value_range(measured(parts).channels())}").ops[1]
    found = np.concatenate([op({"image": i}, np.random.default_rng(0))["image"].reshape(-1, 2) for i in parts])
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(found.std(0), [1, 0], atol=1e-5)


def test_images_of_other_channels_are_refused():
    with pytest.raises(ip.InputError, match="2 channels, others 3"):
        measured([*images("uint8"), *images("uint8", 2)])
    assert Statistics().channels() == []
