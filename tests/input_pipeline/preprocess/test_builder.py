"""Parsing of preprocessing strings, and the errors of invalid ones."""

import re

import numpy as np
import pytest
from image_datasets import encoded
from PIL import Image
from refusals import refused

import input_pipeline as ip
from input_pipeline.preprocess import keys, ops

SMALL = np.arange(2 * 3 * 1, dtype=np.uint8).reshape(2, 3, 1)
CHANGES = [name for name in ops.__all__ if not hasattr(keys, name) and name != "patches"]  # ops on one value
# Arguments of ops that need some.
NEEDED = {"pad": [1], "random_crop": [2], "resize": [2], "resize_long": [4], "resize_pillow": [2]} | {
    "resize_small": [2], "inception_crop": [2], "decode_jpeg_and_inception_crop": [2], "color_jitter": [0.3]
}  # fmt: skip


def apply(spec, image=SMALL, **example):
    return ip.Preprocess(spec)({"image": image, **example}, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pda(1)", "unknown op 'pda'; did you mean 'pad'"),
        ("pad('1')", "border='1' should be of type int"),
        ("resize(8, 'aera')", "unknown method 'aera'; did you mean 'area'"),
        ("random_crop(5)", "the image is only 2x3"),
        ("onehot(10)", "preprocessing needs 'label', the example has image"),
    ],
)
def test_invalid_string_is_an_error_that_names_the_problem(spec, message):
    with pytest.raises(ip.InputError, match=message):
        apply(spec)


@pytest.mark.parametrize(
    ("spec", "image", "message"),
    [
        ("decode", SMALL, r"decode: 'image' should be the bytes of an image file, found uint8 of shape \(2, 3, 1\)"),
        ("value_range", b"x", r"value_range: 'image' should be pixels of shape \(height, width, chan.*, found bytes$"),
    ],
)
def test_unsuitable_input_of_an_op_is_an_error_of_one_line(spec, image, message):
    with refused(ip.InputError, match=message):
        apply(spec, image, label=3, labels=np.zeros(10, np.float32))


def test_empty_parts_are_skipped():
    """big_vision splits at every bar and skips what is empty, such as an augmentation that a config leaves out."""
    spec = "|pad(1)| |\n|pad(2) | "
    np.testing.assert_array_equal(apply(spec)["image"], apply("pad(1)|pad(2)")["image"])


def test_bars_in_quotes_are_part_of_a_key():
    assert apply("keep('a||b|')", **{"a||b|": 3}) == {"a||b|": 3}
    assert apply('keep("|")|', **{"|": 3}) == {"|": 3}


@pytest.mark.parametrize("name", CHANGES)
def test_every_op_on_one_value_reads_and_stores_the_named_keys(name):
    """`inkey` and `outkey` alone leave the other at "image", and `key` replaces both, as in big_vision."""
    arguments = ", ".join(map(str, NEEDED.get(name, ())))
    for given, inkey, outkey in (
        ("key='x'", "x", "x"), ("inkey='x'", "x", "image"), ("outkey='y'", "image", "y"),
        ("inkey='x', outkey='y'", "x", "y"), ("key='z', inkey='x'", "z", "z"), ("", "image", "image"),
    ):  # fmt: skip
        op = ip.Preprocess(f"{name}({', '.join(filter(None, (arguments, given)))})").ops[0]
        assert (op.inkey, op.outkey) == (inkey, outkey), given


@pytest.mark.parametrize("name", CHANGES)
def test_ops_that_say_so_keep_the_size(name):
    image = np.random.default_rng(0).integers(256, size=(7, 5, 3), dtype=np.uint8)
    (op,) = ip.Preprocess(f"{name}({', '.join(map(str, NEEDED.get(name, ())))})").ops
    if op.keeps_size:
        assert {op({"image": image}, np.random.default_rng(i))["image"].shape for i in range(9)} == {image.shape}


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "decode_jpeg_and_inception_crop(16)|flip_lr|randaug(2, 10)|value_range(-1, 1)|onehot(4)|keep('image', 'label')",
        "decode(1, precise=True)|resize_pillow(8)|value_range(0, 1, clip_values=True)|copy('label', 'class')",
    ],
)
def test_an_image_of_the_final_size_needs_only_the_other_ops(spec):
    file = encoded(Image.new("RGB", (40, 30)), "PNG")
    rest, size = ip.after_resizing(spec)
    whole = apply(spec, file, label=np.int32(1))
    part = apply(rest, np.zeros(size, np.uint8), label=np.int32(1))
    assert not re.search("decode|crop|resize|pad|flip|randaug", rest)
    for values in (whole, part):
        values["image"] = (values["image"].shape, values["image"].dtype)
    np.testing.assert_equal(part, whole)
