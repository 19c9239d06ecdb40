"""Parsing of preprocessing strings, and the errors of invalid ones."""

import inspect
import re

import numpy as np
import pytest
from image_datasets import encoded
from PIL import Image
from refusals import refused

import input_pipeline as ip
from input_pipeline.preprocess import keys, ops

SMALL = np.arange(2 * 3 * 1, dtype=np.uint8).reshape(2, 3, 1)


def apply(spec, image=SMALL, **example):
    return ip.Preprocess(spec)({"image": image, **example}, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pda(1)", "unknown op 'pda'; did you mean 'pad'"),
        ("pad()", "missing a required argument: 'border'"),
        ("pad('1')", "border='1' should be of type int"),
        ("pad(__import__('os').getpid())", "must be literals"),
        ("pad(1", "cannot parse"),
        ("pad(1)|(|)keep('image')", "cannot parse"),
        ("pad(1, inkey=3)", "inkey=3 should be a key of the example"),
        ("keep('image', key='image')", "preprocessing op 'keep' has no option 'key'"),
        ("pad(1, inky='image')", "preprocessing op 'pad' has no option 'inky'"),
        ("pad(1, inkey='depth')", "preprocessing needs 'depth', the example has image"),
        ("value_range(0, 1, [0, 0], [1, 2, 3])", "should be below"),
        ("value_range(0, 1, 0, [1, 2])", "value_range: 2 values for an image of 1 channels"),
        ("vgg_value_range", "vgg_value_range: 3 values for an image of 1 channels"),
        ("vgg_value_range([1, 2], [1])", "expected one mean and one std above 0"),
        ("os.system('true')", "not of the form"),
        ("resize(8, metod='area')", "did you mean 'method'"),
        ("resize(8, 'aera')", "unknown method 'aera'; did you mean 'area'"),
        ("resize((8, 8, 3))", "expected one number or"),
        ("decode(0)", "expected 1 to 4096"),
        ("decode(4097)", "expected 1 to 4096"),
        ("decode(4.0)", "channels=4.0 should be of type int"),
        ("decode(2, dtype='float64')", "dtype='float64'.; did you mean 'float32'"),
        ("random_crop(5)", "the image is only 2x3"),
        ("central_crop(3)", "the image is only 2x3"),
        ("onehot(10)", "preprocessing needs 'label', the example has image"),
        ("onehot(0)", "expected 1 class or more"),
        ("resize(0)", "a size of 0 pixels"),
        ("inception_crop(8, 50, 5)", "expected min <= max"),
        ("decode_jpeg_and_inception_crop(8, ratio_min=0)", "expected min <= max"),
        ("randaug(-1)", "expected 0 to 100 layers"),
        ("randaug(2, 31)", "magnitude 0 to 30"),
        ("color_jitter", "expected numbers of 0 or more, one above 0"),
        ("color_jitter(0.1, hue=0.6)", "a hue of at most 0.5"),
        ("color_jitter(-0.1)", "expected numbers of 0 or more"),
        ("color_jitter('a lot')", "brightness='a lot'"),
        ("three_augment(2)", "too many positional arguments"),
        ("augmix(11)", "expected a severity of 0.1 to 10"),
        ("augmix(width=0)", "1 to 20 chains and an alpha"),
        ("augmix(depth=0)", "expected 1 to 20 ops in a chain, or -1"),
        ("pad(-1)", "expected a border of 0 to 10,000"),
    ],
)
def test_invalid_string_is_an_error_that_names_the_problem(spec, message):
    with pytest.raises(ip.InputError, match=message):
        apply(spec)


@pytest.mark.parametrize(
    ("spec", "image", "message"),
    [
        ("decode", SMALL, r"decode: 'image' should be the bytes of an image file, found uint8 of shape \(2, 3, 1\)"),
        ("decode_jpeg_and_inception_crop(8, inkey='label')", SMALL, "'label' should be the bytes .* found int$"),
        ("value_range", b"x", r"value_range: 'image' should be pixels of shape \(height, width, chan.*, found bytes$"),
        ("resize(4, key='labels')", SMALL, r"resize: 'labels' .*, found float32 of shape \(10,\)$"),
        ("pad(1)", np.zeros((2, 2), np.uint8), r"pad: 'image' .*, found uint8 of shape \(2, 2\)$"),
        ("flip_lr", np.array([[["a"]]]), r"flip_lr: 'image' .*, found <U1 of shape \(1, 1, 1\)$"),
        ("resize_small(256)", np.zeros((20_000, 1, 3), np.uint8), "exceeds 178956970 pixels"),
        (
            "onehot(10, key='image')",
            SMALL.astype(np.float32),
            "'image' should be an integer or several, found float32 of shape",
        ),
        ("randaug(2, 10)", SMALL, "randaug: expected 3 channels"),
        ("three_augment", SMALL, r"three_augment: expected 3 channels of uint8, got shape \(2, 3, 1\) of uint8"),
        ("color_jitter(0.3)", np.zeros((2, 2, 13), np.uint8), "color_jitter: expected 3 channels"),
        ("augmix", np.zeros((2, 2, 3), np.uint16), "augmix: expected 3 channels of uint8, got .* of uint16"),
        ("randaug(2, 10)", "text", "randaug: 'image' should be pixels .*, found str$"),
    ],
)
def test_unsuitable_input_of_an_op_is_an_error_of_one_line(spec, image, message):
    with refused(ip.InputError, match=message):
        apply(spec, image, label=3, labels=np.zeros(10, np.float32))


@pytest.mark.parametrize(
    "spec",
    ["pad(1)|pad(2)|", "|pad(1)||pad(2)", "pad(1)| |\n|pad(2) | ", "pad(1) |pad(2)|keep('image')||drop('a||b|')"],
)
def test_empty_parts_are_skipped(spec):
    """big_vision splits at every bar and skips what is empty, such as an augmentation that a config leaves out."""
    np.testing.assert_array_equal(apply(spec)["image"], apply("pad(1)|pad(2)")["image"])


def test_bars_in_quotes_are_part_of_a_key():
    assert apply("keep('a||b|')", **{"a||b|": 3}) == {"a||b|": 3}
    assert apply('keep("|")|', **{"|": 3}) == {"|": 3}


@pytest.mark.parametrize("name", [name for name in ops.__all__ if not hasattr(keys, name) and name != "patches"])
def test_every_op_on_one_value_reads_and_stores_the_named_keys(name):
    """`inkey` and `outkey` alone leave the other at "image", and `key` replaces both, as in big_vision."""
    needed = {"pad": [1], "random_crop": [2], "resize": [2], "resize_long": [4], "resize_pillow": [2]} | {
        "resize_small": [2], "inception_crop": [2], "decode_jpeg_and_inception_crop": [2], "color_jitter": [0.3]
    }  # fmt: skip
    arguments = ", ".join(map(str, needed.get(name, ())))
    for given, inkey, outkey in (
        ("key='x'", "x", "x"), ("inkey='x'", "x", "image"), ("outkey='y'", "image", "y"),
        ("inkey='x', outkey='y'", "x", "y"), ("key='z', inkey='x'", "z", "z"), ("", "image", "image"),
    ):  # fmt: skip
        op = ip.Preprocess(f"{name}({', '.join(filter(None, (arguments, given)))})").ops[0]
        assert (op.inkey, op.outkey) == (inkey, outkey), given


@pytest.mark.parametrize("name", ops.__all__)
def test_every_argument_of_an_op_is_documented(name):
    op = getattr(ops, name)
    for argument in inspect.signature(op).parameters:
        assert re.search(rf"^  \*?{argument}: ", inspect.getdoc(op), re.MULTILINE), argument


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "decode_jpeg_and_inception_crop(16)|flip_lr|randaug(2, 10)|value_range(-1, 1)|onehot(4)|keep('image', 'label')",
        "decode|pad(4)|random_crop((24, 32))|vgg_value_range",
        "decode(1, precise=True)|resize_pillow(8)|value_range(0, 1, clip_values=True)|copy('label', 'class')",
        "decode|resize(20)|pad(2)|central_crop((10, 12))|pad(1)|drop('label')",
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


@pytest.mark.parametrize("spec", ["", "value_range", "decode|resize_small(8)", "decode|resize(8)|resize_long(4)"])
def test_without_an_op_that_sets_the_size_of_all_images_it_is_not_known(spec):
    assert ip.after_resizing(spec)[1] is None
