"""Order, preprocessing and batches: deterministic, complete, resumable."""

import io
import itertools
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

import input_pipeline as ip
from input_pipeline import ops, order

PP = 'pad(1)|random_crop(8)|flip_lr|value_range(-1, 1)|onehot(10)|keep("image", "labels")'


class Numbers:
    """A source whose example i is the number i."""

    class_names = None

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"image": np.int64(index)}


def take(batches, n):
    return [batch["image"].tolist() for batch in itertools.islice(batches, n)]


@pytest.mark.parametrize(("size", "batch"), [(10, 5), (10, 4), (7, 3), (5, 5), (3, 8)])
def test_each_epoch_of_the_stream_is_a_permutation(size, batch):
    stream = np.concatenate(take(ip.train_batches(Numbers(size), "", batch, seed=3), 4 * size)).tolist()
    epochs = [stream[i : i + size] for i in range(0, 4 * size, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert size < 4 or len(set(map(tuple, epochs))) > 1


def test_a_stream_started_at_any_step_is_the_rest_of_the_whole_stream():
    source = ip.open_source("digits", split="train")
    whole = list(itertools.islice(ip.train_batches(source, PP, 100, seed=1), 20))
    for start in range(20):
        rest = next(ip.train_batches(source, PP, 100, seed=1, start_step=start))
        for key in rest:
            np.testing.assert_array_equal(rest[key], whole[start][key])


def test_seeds_give_different_orders_and_different_augmentations():
    assert take(ip.train_batches(Numbers(50), "", 50, seed=0), 1) != take(
        ip.train_batches(Numbers(50), "", 50, seed=1), 1
    )
    draws = [
        order.example_rng(seed, epoch, index).random() for seed, epoch, index in itertools.product(range(3), repeat=3)
    ]
    assert len(set(draws)) == 27
    assert order.example_rng(2, 1, 0).random() == order.example_rng(2, 1, 0).random()


def test_the_order_is_the_same_on_every_machine():
    """Written down once: a change would break the resumption of runs that exist."""
    assert order.permutation(8, 0, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert len(set(order.permutation(100_000, 5, 2).tolist())) == 100_000


@pytest.mark.parametrize("batch", [1, 7, 120, 1000])
def test_evaluation_sees_every_example_once_and_marks_the_padding(batch):
    source = ip.open_source("digits", split="test")
    batches = list(ip.eval_batches(source, "onehot(10)", batch))
    mask = np.concatenate([b["_mask"] for b in batches])
    images = np.concatenate([b["image"] for b in batches])
    assert {len(b["image"]) for b in batches} == {batch}
    assert mask.sum() == len(source) == 360
    np.testing.assert_array_equal(images[mask > 0], source.images)
    assert not images[mask == 0].any()


def test_digits_are_scikit_learns_split_once_and_for_all():
    from sklearn.datasets import load_digits

    train, test = (ip.open_source("digits", split=s) for s in ("train", "test"))
    everything = np.concatenate([train.images, test.images])[..., 0]
    expected = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    assert sorted(x.tobytes() for x in everything) == sorted(x.tobytes() for x in expected)
    assert np.bincount(test.labels).min() >= 20
    assert train.class_names == tuple("0123456789")


def png(array, **options):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG", **options)
    return file.getvalue()


class TestOps:
    image = np.arange(2 * 3 * 1, dtype=np.uint8).reshape(2, 3, 1)

    def apply(self, spec, seed=0, **example):
        return ip.Preprocess(spec)({"image": self.image, **example}, np.random.default_rng(seed))

    def test_decode_gives_grey_or_rgb_and_keeps_the_upper_bits_of_16(self):
        colour = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
        np.testing.assert_array_equal(self.apply("decode", image=png(colour))["image"], colour)
        grey = self.apply("decode(1)", image=png(colour[..., 0]))["image"]
        np.testing.assert_array_equal(grey, colour[..., :1])
        deep = (colour[..., 0].astype(np.uint16) << 8) + 7
        np.testing.assert_array_equal(self.apply("decode(1)", image=png(deep))["image"], colour[..., :1])
        assert self.apply("decode", image=png(colour[..., 0]))["image"].shape == (4, 5, 3)

    def test_decode_turns_a_rotated_photograph_upright(self):
        colour = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
        exif = Image.Exif()
        exif[274] = 6  # the camera was turned: rotate by 90 degrees clockwise to show
        np.testing.assert_array_equal(self.apply("decode", image=png(colour, exif=exif))["image"], np.rot90(colour, -1))

    def test_resize_of_a_constant_and_of_the_same_size(self):
        np.testing.assert_array_equal(self.apply("resize(2, 3)")["image"], self.image)
        constant = np.full((7, 5, 3), 9, np.uint8)
        np.testing.assert_array_equal(self.apply("resize(4)", image=constant)["image"], np.full((4, 4, 3), 9))

    def test_pad_and_random_crop_see_every_window(self):
        padded = self.apply("pad(1, value=7)")["image"]
        np.testing.assert_array_equal(padded, np.pad(self.image, ((1, 1), (1, 1), (0, 0)), constant_values=7))
        windows = {self.apply("pad(1)|random_crop(2, 3)", seed)["image"].tobytes() for seed in range(200)}
        zero = np.pad(self.image, ((1, 1), (1, 1), (0, 0)))
        assert windows == {zero[y : y + 2, x : x + 3].tobytes() for y in range(3) for x in range(3)}

    def test_flip_lr_mirrors_half_of_the_time(self):
        flipped = [np.array_equal(self.apply("flip_lr", s)["image"], self.image[:, ::-1]) for s in range(400)]
        assert 150 < sum(flipped) < 250

    def test_value_range_onehot_keep(self):
        out = self.apply("value_range(-1, 1)", image=np.array([[[0], [255], [51]]], np.uint8))["image"]
        np.testing.assert_allclose(out[0, :, 0], [-1, 1, -0.6], atol=1e-6)
        assert out.dtype == np.float32
        assert self.apply("onehot(4)", label=2)["labels"].tolist() == [0, 0, 1, 0]
        assert self.apply("onehot(4)", label=np.array([0, 3]))["labels"].tolist() == [1, 0, 0, 1]
        assert self.apply("onehot(4)", label=np.array([], int))["labels"].tolist() == [0, 0, 0, 0]
        assert self.apply('keep("label")', label=2) == {"label": 2}

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("pda(1)", "unknown op 'pda'; did you mean 'pad'"),
            ("pad()", "missing a required argument: 'border'"),
            ("pad('1')", "border='1' should be of type int"),
            ("pad(True)", "border=True should be of type int"),
            ("pad(n)", "must be literals"),
            ("pad(__import__('os').getpid())", "must be literals"),
            ("pad(1", "cannot parse"),
            ("pad(1)||keep('image')", "cannot parse"),
            ("os.system('true')", "not of the form"),
            ("resize(8, hight=3)", "did you mean 'height'"),
            ("decode(2)", "expected 1 or 3"),
            ("random_crop(5)", "the image is only 2x3"),
            ("onehot(10)", "preprocessing needs 'label', the example has image"),
            ("keep('labels')", "preprocessing needs 'labels'"),
            ("keep('label')|resize(4)", "preprocessing needs"),
            ("resize(0)", "resize: 0x0 pixels"),
            ("pad(-1)", "expected a border of 0 to 10,000"),
            ("value_range(0, 1, 5, 5)", "in_min=5 should be below in_max=5"),
        ],
    )
    def test_a_bad_string_is_named(self, spec, message):
        with pytest.raises(ip.InputError, match=message):
            self.apply(spec)

    @pytest.mark.parametrize("label", [-1, 10])
    def test_a_label_out_of_range_is_refused(self, label):
        with pytest.raises(ip.InputError, match="out of range"):
            self.apply("onehot(10)", label=label)

    @pytest.mark.parametrize(
        "data", [b"", b"hello", png(np.zeros((50, 50), np.uint8))[:-40], b"\x89PNG\r\n\x1a\n" + bytes(30)]
    )
    def test_what_is_no_image_is_refused(self, data):
        with pytest.raises(ip.InputError, match=r"not an image|broken image"):
            self.apply("decode", image=data)

    def test_a_decompression_bomb_is_refused_before_it_is_decoded(self):
        header = png(np.zeros((1, 1), np.uint8))
        bomb = header[:16] + (60_000).to_bytes(4, "big") * 2 + header[24:29]
        bomb += zlib.crc32(bomb[12:29]).to_bytes(4, "big") + header[33:]
        with pytest.raises(ip.InputError, match="exceeds limit"):
            self.apply("decode", image=bomb)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "digts"}, "did you mean 'digits'"),
        ({"kind": "digits", "split": "tset"}, "did you mean 'test'"),
        ({"kind": "digits", "spilt": "test"}, "did you mean 'split'"),
        ({"kind": "digits", "split": 3}, "split=3 should be of type str"),
    ],
)
def test_a_bad_source_is_named(options, message):
    with pytest.raises(ip.InputError, match=message):
        ip.open_source(**options)


def test_every_op_is_documented_and_an_error_names_its_example():
    assert all(getattr(ops, name).__doc__ for name in ops.__all__)
    with pytest.raises(ip.InputError, match=r"example 2: onehot\(5\)"):
        list(ip.eval_batches(ip.open_source("digits", split="test"), "onehot(5)", 400))


def test_examples_of_unequal_shapes_are_named():
    class Ragged(Numbers):
        def __getitem__(self, index):
            return {"image": np.zeros((index + 1, 2))}

    with pytest.raises(ip.InputError, match=r"'image' has shapes \[\(1, 2\), \(2, 2\)\] in one batch"):
        next(ip.eval_batches(Ragged(2), "", 2))


def test_the_pipeline_knows_nothing_of_jax():
    code = "import sys, input_pipeline.digits; sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'dcvit')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
