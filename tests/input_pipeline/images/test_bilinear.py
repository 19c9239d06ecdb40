"""Bilinear resizing against TensorFlow's kernel, and the images and sizes that it refuses."""

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline.images import bilinear

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
            np.testing.assert_array_equal(bilinear.resize_bilinear(image, size), expected.astype(np.uint8))


@pytest.mark.slow
def test_positions_of_every_side_up_to_2000_are_those_of_tensorflow():
    tf = pytest.importorskip("tensorflow")
    ramp = np.arange(2000, dtype=np.float32)
    for length in range(1, 2001):
        before, after, weight = bilinear._interpolation(length, 224)
        found = ramp[before] + (ramp[after] - ramp[before]) * weight
        image = ramp[None, None, :length, None]
        expected = tf.raw_ops.ResizeBilinear(images=image, size=(1, 224), half_pixel_centers=True).numpy().ravel()
        np.testing.assert_array_equal(found, expected)


def test_result_does_not_depend_on_layout_or_threads_and_the_image_is_unchanged():
    image = noise(64, 80)
    view = np.asfortranarray(image)
    view.setflags(write=False)
    expected = bilinear.resize_bilinear(image, (50, 30))
    np.testing.assert_array_equal(image, noise(64, 80))
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(lambda _: bilinear.resize_bilinear(view, (50, 30)), range(64)):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((0, 5, 3), np.uint8), np.zeros((5, 0, 3), np.uint8), np.zeros((5, 5, 1), np.uint8),
        np.zeros((5, 5, 4), np.uint8), np.zeros((5, 15), np.uint8), np.zeros((2, 5, 5, 3), np.uint8),
        np.zeros((5, 5, 3), np.float32), np.zeros((5, 5, 3), np.int8), np.zeros((5, 5, 3), bool),
        np.broadcast_to(np.uint8(0), (1 << 16, 1 << 15, 3)),
    ],
    ids=lambda image: f"{image.shape}-{image.dtype}",
)  # fmt: skip
def test_images_that_the_loop_cannot_index_are_errors_of_one_line(image, monkeypatch):
    monkeypatch.setattr(bilinear, "_compiled", lambda: pytest.fail("the loop has run"))
    with pytest.raises(ip.InputError, match=r"^resize: expected [^\n]*$"):
        bilinear.resize_bilinear(image, (4, 4))


@pytest.mark.parametrize("size", [(0, 3), (3, 0), (-1, 3), (1 << 16, 1 << 15)])
def test_sizes_without_pixels_are_errors(size):
    with pytest.raises(ip.InputError, match=f"^resize: {size[1]}x{size[0]} is not the size of an image$"):
        bilinear.resize_bilinear(noise(2, 2), size)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "new_length"), [(1, 224), (2000, 1), (2000, 2000), (2**24 + 1, 2**24 + 1)])
def test_no_position_is_outside_of_the_axis(length, new_length):
    before, after, _ = bilinear._interpolation.__wrapped__(length, new_length)
    assert max(before.max(), after.max()) < length


@pytest.mark.exhaustive
def test_a_cache_that_cannot_be_written_is_not_needed(tmp_path):
    """A limit of files to 0 bytes is as a full disk: the folder is writable, but OSError ends every write."""
    code = (
        "import resource, numpy as np\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"
        "from input_pipeline.images import bilinear\n"
        "print(bilinear.resize_bilinear(np.full((2, 2, 3), 4, np.uint8), (1, 1))[0, 0, 0])"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("4\n", 0), done.stderr


def test_without_numba_the_error_names_the_extra_and_no_example(monkeypatch):
    class Images(list):
        class_names = None

        def describe(self, index):
            return f"image {index}"

        def nbytes(self):
            return 0

    bilinear._compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ip.MissingLibraryError, match=r'^this needs numba, which .* pip install "dcvit\[data\]"$'):
        next(ip.train_batches(Images([{"image": noise(4, 4)}] * 4), "resize(3)", 2, seed=0))
