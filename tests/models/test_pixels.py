"""Device side of preprocessing: the deferred op, and the same pixels as on the host."""

import image_datasets
import jax
import numpy as np
import pytest

import input_pipeline as ip
from dcvit.models import pixels

TAIL = "onehot(10)|keep('image', 'labels')"


@pytest.mark.parametrize(
    ("spec", "host", "found"),
    [
        (f"decode|value_range(-1, 1)|{TAIL}", f"decode|{TAIL}", (-1, 1, 0, 255)),
        ("value_range(clip_values=True)", "value_range(clip_values=True)", None),
        (f"value_range|{TAIL}|drop('x')|", f"{TAIL}|drop('x')", (-1, 1, 0, 255)),
        ("value_range|copy('image', 'x')", "value_range|copy('image', 'x')", None),
        ("value_range(0, 1, [0, 1, 2])", "value_range(0, 1, [0, 1, 2])", None),
        (TAIL, TAIL, None),
    ],
)
def test_value_range_is_deferred_only_as_the_last_image_op(spec, host, found):
    assert ip.defer_value_range(spec) == (host, found)


@pytest.mark.parametrize("spec", ["value_range(-1, 1)", "value_range(-3, 2, 10, 200)"])
def test_device_and_host_compute_the_same_pixels(spec):
    image = image_datasets.image_array(0)
    whole = ip.Preprocess(spec)({"image": image}, np.random.default_rng(0))["image"]
    host, on_device = pixels.split(spec)
    half = ip.Preprocess(host)({"image": image}, np.random.default_rng(0))["image"]
    assert half.dtype == np.uint8
    np.testing.assert_allclose(jax.jit(on_device)(half), whole, rtol=0, atol=1e-6)  # ranges are up to 5 wide


@pytest.mark.parametrize(
    ("dtype", "spec"),
    [
        ("uint16", "value_range(-1, 1, 0, 65535)"),
        ("int16", "value_range(0, 1, -300.5, 10000)"),
        ("float32", "value_range(0, 1, -300.5, 10000)"),
    ],
)
def test_images_of_16_bits_and_floats_are_exact_on_the_device(dtype, spec):
    image = np.arange(1 << 15, dtype=np.int64)[:, None, None] * [1, 2 if dtype == "uint16" else -1]
    whole = ip.Preprocess(spec)({"image": image.astype(dtype)}, np.random.default_rng(0))["image"]
    host, on_device = pixels.split(spec)
    half = ip.Preprocess(host)({"image": image.astype(dtype)}, np.random.default_rng(0))["image"]
    assert half.dtype == dtype
    found = np.asarray(jax.jit(on_device)(half))
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-6)
    assert len(np.unique(found[..., 0])) == 1 << 15  # neighboring values stay different
