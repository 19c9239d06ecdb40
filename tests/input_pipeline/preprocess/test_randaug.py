"""RandAugment ops: the pixels of TensorFlow's kernels, of Pillow, and of slow loops over pixels."""

import itertools
import math

import numpy as np
import pytest
from PIL import Image, ImageOps

from input_pipeline.errors import ReadingError
from input_pipeline.preprocess import randaug

NAMES = [
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast", "Brightness",
    "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd",
]  # fmt: skip
LEVELS = np.arange(256, dtype=np.uint8)
EVERY_VALUE = np.stack([LEVELS.reshape(8, 32), LEVELS[::-1].reshape(8, 32), np.roll(LEVELS, 99).reshape(8, 32)], -1)
FACTORS = [0.0, 0.1, 0.37, 1.0, 1.9, 5.5]  # 0.1, 1, 1.9 and 5.5 are those of magnitudes 0, 5, 10 and 30


def noise(height, width, low=0, high=256):
    image = np.random.default_rng(height).integers(low, high, (height, width, 3), dtype=np.uint8)
    image.setflags(write=False)
    return image


IMAGES = {
    "noise": noise(37, 53),
    "smooth": np.asarray(Image.fromarray(noise(8, 11)).resize((100, 75), Image.Resampling.BICUBIC)),
    "dim": noise(64, 31, 90, 104),
    "constant": np.full((37, 53, 3), 77, np.uint8),
    "one channel constant": noise(37, 53) * np.array([1, 0, 1], np.uint8),
    "row": noise(1, 300),
    "pixel": noise(1, 1),
    "two rows": noise(2, 5),
}


@pytest.fixture
def tf():
    return pytest.importorskip("tensorflow")


def blended(tf, start, end, factor):
    """Interpolation or extrapolation of images in float32 with TensorFlow."""
    start, end = tf.cast(start, tf.float32), tf.cast(end, tf.float32)
    return tf.cast(tf.clip_by_value(start + factor * (end - start), 0.0, 255.0), tf.uint8).numpy()


class TestGeometry:
    """Affine transforms equal those of TensorFlow's kernel."""

    @staticmethod
    def transform(tf, image, coefficients):
        """The kernel's result, in which a fourth channel marks the positions inside the image."""
        wrapped = np.concatenate([image, np.ones_like(image[..., :1])], axis=-1)
        moved = tf.raw_ops.ImageProjectiveTransformV3(
            images=wrapped[None],
            transforms=tf.stack([*(tf.cast(c, tf.float32) for c in coefficients), 0.0, 0.0])[None],
            output_shape=image.shape[:2],
            fill_value=0.0,
            interpolation="NEAREST",
            fill_mode="CONSTANT",
        )[0].numpy()
        return np.where(moved[..., 3:] == 1, moved[..., :3], 128)

    @pytest.mark.parametrize("degrees", [30, -15, 7.5])
    def test_rotate_equals_tensorflows_transform_about_the_center(self, tf, degrees):
        angle = tf.constant(degrees, tf.float32) * (math.pi / 180)
        cos, sin = tf.cos(angle), tf.sin(angle)
        for name, image in IMAGES.items():
            bottom, right = (tf.cast(side - 1, tf.float32) for side in image.shape[:2])
            x = (right - (cos * right - sin * bottom)) / 2.0
            y = (bottom - (sin * right + cos * bottom)) / 2.0
            expected = self.transform(tf, image, [cos, -sin, x, sin, cos, y])
            assert np.array_equal(randaug.rotate(image, degrees), expected), name

    @pytest.mark.parametrize(
        ("op", "at", "amounts"),
        [
            (randaug.shear_x, 1, (0.3, -0.3, 0.15, -0.15, 0, 0.9)),
            (randaug.shear_y, 3, (0.3, -0.3, 0.15, -0.15, 0, 0.9)),
            (randaug.translate_x, 2, (100, -50, 0, 2.5, -2.5, 0.5, -0.5, 300)),
            (randaug.translate_y, 5, (100, -50, 0, 2.5, -2.5, 0.5, -0.5, 300)),
        ],
    )
    def test_shears_and_translations_equal_tensorflows_transform(self, tf, op, at, amounts):
        for (name, image), amount in itertools.product(IMAGES.items(), amounts):
            coefficients = [1, 0, 0, 0, 1, 0]
            coefficients[at] = amount
            assert np.array_equal(op(image, amount), self.transform(tf, image, coefficients)), (name, amount)


class TestValues:
    """Ops that change the value of each pixel."""

    def test_posterize_clips_invalid_numbers_of_bits_as_tensorflow_does(self, tf):
        for bits in range(13):
            shifted = tf.bitwise.right_shift(EVERY_VALUE, 8 - bits)
            expected = tf.bitwise.left_shift(shifted, 8 - bits).numpy()
            assert np.array_equal(randaug.posterize(EVERY_VALUE, bits), expected), bits

    @pytest.mark.parametrize("threshold", [0, 128, 255, 256, 281, 768])
    def test_solarize_wraps_thresholds_above_255_as_tensorflow_does(self, tf, threshold):
        image = tf.constant(EVERY_VALUE)
        expected = tf.where(image < threshold, image, 255 - image).numpy()
        assert np.array_equal(randaug.solarize(EVERY_VALUE, threshold), expected)

    def test_invert_equals_pillow(self):
        assert np.array_equal(randaug.invert(EVERY_VALUE), ImageOps.invert(Image.fromarray(EVERY_VALUE)))

    @pytest.mark.parametrize("addition", [0, 55, 110, 330, -60])
    def test_solarize_add_adds_below_128_and_clips(self, addition):
        expected = [min(max(v + addition, 0), 255) if v < 128 else v for v in EVERY_VALUE.ravel().tolist()]
        assert randaug.solarize_add(EVERY_VALUE, addition).ravel().tolist() == expected

    def test_equalize_makes_the_cumulative_histogram_linear(self):
        """v becomes min(255, (step // 2 + Σ_{u<v} n_u) // step), step = (Σ_u n_u - n_{greatest value}) // 255."""
        for (name, image), channel in itertools.product(IMAGES.items(), range(3)):
            counts = np.bincount(image[..., channel].ravel(), minlength=256)
            step = (counts.sum() - counts[counts > 0][-1]) // 255
            table = np.minimum((np.cumsum(counts) - counts + step // 2) // max(1, step), 255) if step else LEVELS
            assert np.array_equal(randaug.equalize(image)[..., channel], table[image[..., channel]]), name

    @pytest.mark.slow
    def test_autocontrast_scales_in_float32_as_tensorflow_does(self, tf):
        for low, high in np.sort(np.random.default_rng(0).choice(256, (200, 2)), axis=1):
            values = LEVELS[low : high + 1]
            expected = values
            if low < high:
                scale = 255.0 / (tf.constant(high, tf.float32) - tf.constant(low, tf.float32))
                scaled = tf.cast(values, tf.float32) * scale + -tf.constant(low, tf.float32) * scale
                expected = tf.cast(tf.clip_by_value(scaled, 0.0, 255.0), tf.uint8)
            image = np.repeat(values[None, :, None], 3, axis=-1)
            assert np.array_equal(randaug.autocontrast(image)[0, :, 1], expected)


class TestBlends:
    """Ops that interpolate between a degenerate image and the image."""

    @pytest.mark.slow
    def test_gray_equals_tensorflow_for_every_color(self, tf):
        for colors in np.arange(2**24, dtype="<u4").reshape(16, 1024, 1024):
            image = np.ascontiguousarray(colors[..., None].view(np.uint8)[..., :3])
            assert np.array_equal(randaug.color(image, 0)[..., :1], tf.image.rgb_to_grayscale(image))

    @pytest.mark.parametrize("name", IMAGES)
    def test_color_brightness_and_contrast_interpolate_from_gray_black_and_the_mean_count(self, tf, name):
        image = IMAGES[name]
        gray = tf.image.rgb_to_grayscale(image)
        counts = tf.histogram_fixed_width(tf.cast(gray, tf.int32), [0, 255], nbins=256)
        mean = tf.clip_by_value(tf.reduce_sum(tf.cast(counts, tf.float32)) / 256.0, 0.0, 255.0)
        for op, start in (
            (randaug.color, tf.image.grayscale_to_rgb(gray)),
            (randaug.brightness, np.zeros_like(image)),
            (randaug.contrast, tf.fill(image.shape, tf.cast(mean, tf.uint8))),
        ):
            for factor in FACTORS:
                assert np.array_equal(op(image, factor), blended(tf, start, image, factor)), (op, factor)

    @pytest.mark.parametrize("factor", FACTORS)
    def test_sharpness_interpolates_from_the_mean_added_row_by_row(self, tf, factor):
        image = noise(19, 23)
        smooth, once, five = image.copy(), np.float32(1) / np.float32(13), np.float32(5) / np.float32(13)
        for row in range(1, 18):
            for column in range(1, 22):
                total = np.zeros(3, np.float32)
                for i in (-1, 0, 1):
                    for j in (-1, 0, 1):
                        weight = five if i == j == 0 else once
                        total = total + image[row + i, column + j].astype(np.float32) * weight
                smooth[row, column] = total.astype(np.uint8)
        assert np.array_equal(randaug.sharpness(image, factor), blended(tf, smooth, image, factor))

    def test_sharpness_equals_tensorflows_convolution_up_to_rounding(self, tf):
        inner = smoothed(tf, noise(200, 201))
        error = np.abs(randaug.sharpness(noise(200, 201), 0)[1:-1, 1:-1].astype(int) - inner)
        assert error.max() <= 1
        assert (error > 0).mean() < 0.01


def smoothed(tf, image):
    """TensorFlow's weighted mean of each pixel's neighbors, truncated to integers."""
    kernel = np.float32([[1, 1, 1], [1, 5, 1], [1, 1, 1]])[..., None, None] / np.float32(13)
    floats = tf.cast(image, tf.float32)[None]
    out = tf.nn.depthwise_conv2d(floats, tf.tile(kernel, [1, 1, 3, 1]), [1, 1, 1, 1], padding="VALID")
    return tf.cast(tf.clip_by_value(out[0], 0.0, 255.0), tf.uint8).numpy()


class TestCutout:
    @pytest.mark.parametrize(("half", "row", "column"), [(4, 10, 20), (4, 0, 0), (5, 36, 52), (0, 9, 9), (120, 1, 1)])
    def test_square_is_gray_as_far_as_it_is_inside_the_image(self, half, row, column):
        image = noise(37, 53)
        expected = image.copy()
        for y in range(37):
            for x in range(53):
                if -half <= y - row < half and -half <= x - column < half:
                    expected[y, x] = 128
        assert np.array_equal(randaug.cutout(image, half, row, column), expected)

    def test_center_is_uniformly_distributed(self):
        rng, image = np.random.default_rng(0), np.zeros((3, 4, 3), np.uint8)
        squares = [randaug.OPS["Cutout"](image, 0.25, rng)[..., 0] // 128 for _ in range(2400)]  # half a side: 1
        # pixel (y, x) is gray where the center is one of (y, x), (y + 1, x), (y, x + 1) and (y + 1, x + 1)
        expected = np.outer([2, 2, 1], [2, 2, 2, 1]) * 2400 / 12
        assert np.abs(np.sum(squares, axis=0) - expected).max() < 120


ARGUMENTS = [
    ("Rotate", randaug.rotate, {0: 0, 5: 15, 10: 30, 30: 90}),
    ("Posterize", randaug.posterize, {0: 0, 5: 2, 7: 2, 10: 4, 30: 12}),
    ("Solarize", randaug.solarize, {0: 0, 3: 76, 5: 128, 10: 256, 30: 768}),
    ("Color", randaug.color, {0: 0.1, 5: 1, 10: 1.9, 30: 5.5}),
    ("Contrast", randaug.contrast, {0: 0.1, 5: 1, 10: 1.9, 30: 5.5}),
    ("Brightness", randaug.brightness, {0: 0.1, 5: 1, 10: 1.9, 30: 5.5}),
    ("Sharpness", randaug.sharpness, {0: 0.1, 5: 1, 10: 1.9, 30: 5.5}),
    ("ShearX", randaug.shear_x, {0: 0, 5: 0.15, 10: 0.3, 30: 0.9}),
    ("ShearY", randaug.shear_y, {0: 0, 5: 0.15, 10: 0.3, 30: 0.9}),
    ("TranslateX", randaug.translate_x, {0: 0, 1: 10, 5: 50, 10: 100, 30: 300}),
    ("TranslateY", randaug.translate_y, {0: 0, 1: 10, 5: 50, 10: 100, 30: 300}),
    ("SolarizeAdd", randaug.solarize_add, {0: 0, 5: 55, 7: 77, 10: 110, 30: 330}),
]
SIGNED = {"Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"}


class TestMagnitude:
    """The argument of an op as a function of the magnitude."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "function", "arguments"), ARGUMENTS)
    def test_magnitude_sets_the_argument_and_the_sign_is_random(self, name, function, arguments):
        image, rng = IMAGES["smooth"], np.random.default_rng(0)
        for magnitude, argument in arguments.items():
            results = [randaug.OPS[name](image, magnitude, rng) for _ in range(64)]
            plus = [np.array_equal(result, function(image, argument)) for result in results]
            if name not in SIGNED or not magnitude:
                assert all(plus)
            else:
                minus = [np.array_equal(result, function(image, -argument)) for result in results]
                assert all(np.logical_or(plus, minus))
                if not all(np.logical_and(plus, minus)):  # otherwise the result is completely gray for both signs
                    assert 16 < sum(plus) < 48

    @pytest.mark.slow
    @pytest.mark.parametrize(("magnitude", "side"), [(0, 0), (3, 24), (5, 40), (10, 80), (30, 240)])
    def test_magnitude_sets_the_side_of_a_cutout(self, magnitude, side):
        image = np.zeros((500, 500, 3), np.uint8)
        results = [randaug.OPS["Cutout"](image, magnitude, np.random.default_rng(seed)) for seed in range(20)]
        assert max((result == 128).all(2).sum() for result in results) == side**2


class TestRandaug:
    def test_ops_are_drawn_uniformly(self, monkeypatch):
        assert list(randaug.OPS) == NAMES  # the sixteen of big_vision
        drawn = []
        for name in NAMES:
            monkeypatch.setitem(randaug.OPS, name, lambda image, magnitude, rng, n=name: drawn.append(n) or image)
        randaug.randaug(noise(1, 1), np.random.default_rng(0), 16_000, 10)
        counts = np.array([drawn.count(name) for name in NAMES])
        assert counts.sum() == 16_000
        distance = ((counts - 1000) ** 2 / 1000).sum()
        assert distance < 38  # exceeded by one in 1,000 values of χ² with 15 degrees of freedom

    def test_result_is_a_function_of_the_image_and_the_generator(self):
        def augmented(seed):
            return randaug.randaug(noise(224, 224), np.random.default_rng(seed), 2, 10)

        assert all(np.array_equal(augmented(seed), augmented(seed)) for seed in range(20))
        assert len({augmented(seed).tobytes() for seed in range(20)}) > 10

    @pytest.mark.parametrize("name", NAMES)
    def test_ops_return_new_images_and_do_not_change_their_input(self, name):
        rng = np.random.default_rng(0)
        for image, magnitude in itertools.product(IMAGES.values(), (0, 0.5, 10, 30)):
            before = image.copy()
            result = randaug.OPS[name](image, magnitude, rng)
            assert (result.shape, result.dtype) == (image.shape, np.uint8)
            assert not np.shares_memory(result, image)
            assert np.array_equal(image, before)

    def test_other_dtypes_are_refused(self):
        with pytest.raises(ReadingError, match=r"^randaug: expected 3 channels of uint8, got shape .* of uint16$"):
            randaug.randaug(np.zeros((4, 4, 3), np.uint16), np.random.default_rng(0), 2, 10)
