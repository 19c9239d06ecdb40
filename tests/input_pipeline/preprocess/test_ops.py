"""Preprocessing ops: exact results computed with numpy and Pillow, and the pixels of big_vision's TensorFlow code."""

import math

import image_datasets
import numpy as np
import pytest
from PIL import Image

import input_pipeline as ip
from input_pipeline.images import decode

SMALL = np.arange(2 * 3 * 1, dtype=np.uint8).reshape(2, 3, 1)
PHOTO = image_datasets.image_array(1, 75, 100)


def apply(spec, image=SMALL, seed=0, **example):
    return ip.Preprocess(spec)({"image": image, **example}, np.random.default_rng(seed))


class TestTable:
    """The exact result of each op, computed independently."""

    def test_resize_pillow_is_pillows(self):
        expected = np.asarray(Image.fromarray(PHOTO).resize((20, 30), Image.Resampling.BILINEAR))
        np.testing.assert_array_equal(apply("resize_pillow((30, 20))", PHOTO)["image"], expected)
        np.testing.assert_array_equal(apply("resize_pillow((2, 3))")["image"], SMALL)

    @pytest.mark.parametrize(
        ("spec", "rows", "columns"),
        [("central_crop((32, 41))", (21, 53), (29, 70)), ("central_crop(75)", (0, 75), (12, 87)),
         ("central_crop", (0, 75), (12, 87))],
    )  # fmt: skip
    def test_central_crop_rounds_down(self, spec, rows, columns):
        np.testing.assert_array_equal(apply(spec, PHOTO)["image"], PHOTO[slice(*rows), slice(*columns)])

    def test_pad_and_random_crop_give_every_window(self):
        padded = apply("pad(1, value=7)")["image"]
        np.testing.assert_array_equal(padded, np.pad(SMALL, ((1, 1), (1, 1), (0, 0)), constant_values=7))
        pp, rng = ip.Preprocess("pad(1)|random_crop((2, 3))"), np.random.default_rng(0)
        windows = {pp({"image": SMALL}, rng)["image"].tobytes() for _ in range(100)}
        zero = np.pad(SMALL, ((1, 1), (1, 1), (0, 0)))
        assert windows == {zero[y : y + 2, x : x + 3].tobytes() for y in range(3) for x in range(3)}

    def test_flip_lr_mirrors_half_of_the_time(self):
        pp, rng = ip.Preprocess("flip_lr"), np.random.default_rng(0)
        flipped = [np.array_equal(pp({"image": SMALL}, rng)["image"], SMALL[:, ::-1]) for _ in range(400)]
        assert 150 < sum(flipped) < 250

    def test_value_range_maps_every_pixel_value(self):
        every = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
        for spec, low, high in (("value_range(-1, 1)", -1, 1), ("value_range(0, 1)", 0, 1), ("value_range", -1, 1)):
            got = apply(spec, every)["image"]
            expected = np.float32(low) + (every.astype(np.float32) / np.float32(255)) * np.float32(high - low)
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, expected)
        clipped = apply("value_range(0, 1, 100, 200, clip_values=True)", every)["image"].ravel()
        np.testing.assert_allclose(clipped, np.clip((np.arange(256) - 100) / 100, 0, 1), atol=1e-6)

    def test_onehot_accepts_one_several_or_no_labels(self):
        assert apply("onehot(4)", label=2)["labels"].tolist() == [0, 0, 1, 0]
        assert apply("onehot(4, key='a', key_result='b')", a=np.array([0, 3]))["b"].tolist() == [1, 0, 0, 1]
        assert apply("onehot(4)", label=np.array([], int))["labels"].tolist() == [0, 0, 0, 0]
        assert apply("onehot(4)", label=[])["labels"].tolist() == [0, 0, 0, 0]

    def test_onehot_of_several_labels_has_one_vector_each_or_one_for_all(self):
        label = np.array([2, 0])
        smoothed = apply("onehot(3, on=0.75, off=0.125)", label=label)["labels"]
        assert smoothed.dtype == np.float32
        assert smoothed.tolist() == [0.75, 0.125, 0.75]
        assert apply("onehot(3, multi=False)", label=label)["labels"].tolist() == [[0, 0, 1], [1, 0, 0]]
        assert apply("onehot(3, multi=False)", label=1)["labels"].tolist() == [0, 1, 0]
        grid = np.array([[0, 2, 1], [1, 1, 0]])
        np.testing.assert_array_equal(apply("onehot(3, multi=False)", label=grid)["labels"], np.eye(3)[grid])
        assert apply("onehot(3, multi=False)", label=[])["labels"].shape == (0, 3)
        assert apply("onehot(3, 'label', None)", label=1)["label"].tolist() == [0, 1, 0]

    def test_keys_are_kept_dropped_and_copied(self):
        assert apply('keep("label")', label=2, other=3) == {"label": 2}
        assert apply("drop('image', 'absent')", label=2) == {"label": 2}
        copied = apply("copy('image', 'original')|pad(1)")
        np.testing.assert_array_equal(copied["original"], SMALL)
        assert copied["image"].shape == (4, 5, 1)

    def test_ops_read_and_store_other_keys(self):
        mask = np.ones((2, 3, 1), np.uint8)
        result = apply("resize_pillow(4, inkey='mask', outkey='small')|pad(1, key='mask')", mask=mask)
        assert {key: value.shape[:2] for key, value in result.items()} == {
            "image": (2, 3), "mask": (4, 5), "small": (4, 4)
        }  # fmt: skip
        np.testing.assert_array_equal(result["image"], SMALL)


def windows_of_tensorflow(tf, size, area, draws):
    """The windows (top, left, height, width) of the op that big_vision calls, in one graph."""

    @tf.function
    def sample(seeds):
        def one(seed):
            begin, shape, _ = tf.raw_ops.StatelessSampleDistortedBoundingBox(
                image_size=[*size, 3], bounding_boxes=tf.zeros([1, 0, 4]), min_object_covered=0.0, seed=[seed, 1],
                aspect_ratio_range=[0.75, 1.33], area_range=list(area), use_image_if_no_bounding_boxes=True,
            )  # fmt: skip
            return tf.concat([begin[:2], shape[:2]], 0)

        return tf.map_fn(one, seeds, fn_output_signature=tf.int32)

    return sample(tf.range(draws)).numpy()


class TestBigVision:
    """The pixels are bitwise equal to those of the TensorFlow functions that big_vision calls."""

    @pytest.fixture
    def tf(self):
        return pytest.importorskip("tensorflow")

    @pytest.mark.parametrize(
        ("mode", "options"),
        [("L", {}), ("RGB", {"subsampling": 0}), ("RGB", {"quality": 30}), ("RGB", {"progressive": True})],
    )
    def test_decode_equals_tensorflow(self, tf, mode, options):
        data = image_datasets.jpeg(3, 75, 101, mode, **options)
        expected = tf.io.decode_image(data, channels=3, expand_animations=False).numpy()
        np.testing.assert_array_equal(apply("decode", data)["image"], expected)
        accurate = tf.io.decode_jpeg(data, channels=3, dct_method="INTEGER_ACCURATE").numpy()
        np.testing.assert_array_equal(apply("decode(precise=True)", data)["image"], accurate)

    @pytest.mark.parametrize("window", [(0, 0, 75, 101), (13, 22, 40, 31), (70, 90, 5, 11), (8, 16, 16, 16)])
    def test_decode_crop_equals_tensorflow(self, tf, window):
        data = image_datasets.jpeg(3, 75, 101)
        expected = tf.io.decode_and_crop_jpeg(data, window, channels=3).numpy()
        np.testing.assert_array_equal(decode.decode_crop(data, window), expected)

    @pytest.mark.parametrize("options", ["", ", method='bilinear', antialias=False", ", 'bicubic'"])
    def test_resize_long_equals_tensorflow(self, tf, options):
        for image in (PHOTO, PHOTO[:, :40]):
            factor = tf.constant(60, tf.float32) / tf.cast(max(image.shape[:2]), tf.float32)
            size = [int(tf.round(side * factor)) for side in map(float, image.shape[:2])]
            method = "bicubic" if "bicubic" in options else "bilinear" if options else "area"
            resized = tf.image.resize(image, size, method=method, antialias="False" not in options)
            expected = tf.cast(tf.clip_by_value(resized, 0, 255), tf.uint8).numpy()
            assert max(expected.shape) == 60
            np.testing.assert_array_equal(apply(f"resize_long(60{options})", image)["image"], expected)

    def test_value_ranges_of_channels_equal_tensorflow(self, tf):
        image = tf.cast(PHOTO, tf.float32)
        low, high = tf.constant([3, 4, 5.5]), tf.constant([200, 250, 255.0])
        expected = -1 + (image - low) / (high - low) * (2 - -1)
        got = apply("value_range(-1, 2, [3, 4, 5.5], [200, 250, 255])", PHOTO)["image"]
        np.testing.assert_array_equal(got, expected.numpy())
        clipped = apply("value_range(0, 1, 10, [200, 250, 255], True)", PHOTO)["image"]
        inside = (image - 10) / (tf.constant([200, 250, 255.0]) - 10)
        np.testing.assert_array_equal(clipped, tf.clip_by_value(inside, 0, 1).numpy())
        mean = tf.constant([0.485 * 255, 0.456 * 255, 0.406 * 255])
        std = tf.constant([0.229 * 255, 0.224 * 255, 0.225 * 255])
        vgg = apply("vgg_value_range", PHOTO)["image"]
        assert vgg.dtype == np.float32
        np.testing.assert_array_equal(vgg, ((image - mean) / std).numpy())

    @pytest.mark.parametrize("antialias", [False, True])
    @pytest.mark.parametrize("method", decode.METHODS)
    def test_resize_equals_tensorflow(self, tf, method, antialias):
        resized = tf.image.resize(PHOTO, (43, 130), method=method, antialias=antialias)
        expected = tf.cast(tf.clip_by_value(resized, 0, 255), tf.uint8).numpy()
        got = apply(f"resize((43, 130), {method!r}, {antialias})", PHOTO)["image"]
        np.testing.assert_array_equal(got, expected)

    def test_evaluation_preprocessing_equals_tensorflow(self, tf):
        data = image_datasets.jpeg(5, 375, 500)
        image = tf.io.decode_image(data, channels=3, expand_animations=False)
        image = tf.cast(tf.image.resize(image, (256, 341), method="area"), tf.uint8)
        image = tf.image.crop_to_bounding_box(image, 16, 58, 224, 224)
        image = -1.0 + (tf.cast(image, tf.float32) - 0.0) / 255.0 * 2.0
        got = apply("decode|resize_small(256)|central_crop(224)|value_range(-1, 1)", data)["image"]
        np.testing.assert_array_equal(got, image.numpy())

    def test_training_crop_of_a_given_window_equals_tensorflow(self, tf):
        data = image_datasets.jpeg(5, 375, 500)
        spec = "decode_jpeg_and_inception_crop(224)"
        for seed in range(5):
            window = decode.sample_window((375, 500), (0.05, 1), (0.75, 1.33), np.random.default_rng(seed))
            crop = tf.image.decode_and_crop_jpeg(data, window, channels=3)
            expected = tf.cast(tf.image.resize(crop, (224, 224)), tf.uint8).numpy()
            np.testing.assert_array_equal(apply(spec, data, seed)["image"], expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("size", [(375, 500), (60, 200)])
    def test_windows_have_the_distribution_of_tensorflows(self, tf, size):
        """Area, aspect ratio and center: means within 4 standard errors, standard deviations within 10 %."""
        draws = 3000
        rng = np.random.default_rng(0)
        ours = np.array([decode.sample_window(size, (0.05, 1), (0.75, 1.33), rng) for _ in range(draws)])
        theirs = windows_of_tensorflow(tf, size, (0.05, 1), draws)
        for name, value in {
            "area": lambda w: w[:, 2] * w[:, 3] / (size[0] * size[1]),
            "aspect": lambda w: w[:, 3] / w[:, 2],
            "row": lambda w: w[:, 0] + w[:, 2] / 2,
            "column": lambda w: w[:, 1] + w[:, 3] / 2,
        }.items():
            a, b = value(ours), value(theirs.astype(float))
            error = math.hypot(a.std(), b.std()) / math.sqrt(draws)
            assert abs(a.mean() - b.mean()) < 4 * error, name
            assert a.std() == pytest.approx(b.std(), rel=0.1), name

    @pytest.mark.slow
    def test_offsets_of_windows_have_the_range_and_distribution_of_tensorflows(self, tf):
        """For small images, where an offset more or less would show: every offset but the last, each equally often."""
        size, draws, rng = (4, 7), 1500, np.random.default_rng(0)
        ours = [decode.sample_window(size, (0.2, 0.4), (0.75, 1.33), rng) for _ in range(draws)]
        theirs = windows_of_tensorflow(tf, size, (0.2, 0.4), draws)
        for axis in (0, 1):
            for side in {*theirs[:, 2 + axis].tolist()}:
                room = size[axis] - side
                found = [np.bincount([w[axis] for w in ws if w[2 + axis] == side]) for ws in (ours, theirs.tolist())]
                assert [len(counts) for counts in found] == [max(1, room)] * 2
                a, b = (counts / counts.sum() for counts in found)
                np.testing.assert_allclose(a, b, atol=4 * math.sqrt(0.5 / min(f.sum() for f in found)))


class TestWindows:
    @pytest.mark.parametrize("size", [(1, 1), (3, 1000)])
    def test_windows_are_inside_the_image(self, size):
        rng = np.random.default_rng(0)
        for _ in range(300):
            top, left, height, width = decode.sample_window(size, (0.05, 1), (0.75, 1.33), rng)
            assert 0 <= top <= top + height <= size[0]
            assert 0 <= left <= left + width <= size[1]
            assert height * width > 0

    def test_window_is_the_whole_image_if_no_valid_one_is_found(self):
        assert decode.sample_window((10, 1000), (0.9, 1), (0.9, 1.1), np.random.default_rng(0)) == (0, 0, 10, 1000)

    def test_inception_crop_of_pixels_and_of_a_lossless_file_are_equal(self):
        pytest.importorskip("tensorflow")
        data = image_datasets.encoded(Image.fromarray(PHOTO), "PNG")
        for seed in range(5):
            one = apply("inception_crop(32)", PHOTO, seed)["image"]
            other = apply("decode_jpeg_and_inception_crop(32)", data, seed)["image"]
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("label", [-1, 10, [3, 10]])
def test_onehot_refuses_a_label_out_of_range(label):
    with pytest.raises(ip.InputError, match="out of range"):
        apply("onehot(10)", label=label)
