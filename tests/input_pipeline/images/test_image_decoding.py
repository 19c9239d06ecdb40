"""Decoding of unusual and damaged image files, as the table in `docs/data.md` describes."""

import itertools

import image_datasets
import numpy as np
import pytest
from PIL import Image
from refusals import refused

import input_pipeline as ip
from input_pipeline.images import decode as decoding

ODD = image_datasets.odd_images()
PIXELS = image_datasets.image_array(0)
READ = {name for name in ODD if not name.startswith(("empty", "truncated", "text"))}
CROP = "decode_jpeg_and_inception_crop"
DECODERS = ["decode", "decode(precise=True)", CROP, f"{CROP}(exif=True)"]


def decode(data, spec="decode", seed=0):
    return ip.Preprocess(spec)({"image": data}, np.random.default_rng(seed))["image"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spec"), [*zip(sorted(READ), itertools.cycle(DECODERS), strict=False)])
def test_every_supported_file_decodes_to_three_channels_of_uint8(name, spec):
    image = decode(ODD[name], spec)
    assert image.dtype == np.uint8
    assert image.shape[2] == 3


@pytest.mark.parametrize("spec", DECODERS[:2])
@pytest.mark.parametrize(("name", "mean"), [("rgba.png", 0.01), ("palette.png", 8), ("animated.gif", 12),
                                            ("webp.webp", 8), ("animated.webp", 8), ("cmyk.jpg", 8)])  # fmt: skip
def test_colors_are_kept_and_transparency_and_later_frames_are_dropped(name, mean, spec):
    image = decode(ODD[name], spec)
    assert image.shape == PIXELS.shape
    assert np.abs(image.astype(int) - PIXELS).mean() < mean  # levels, after lossy compression


def test_upper_eight_of_sixteen_bits_are_kept():
    np.testing.assert_array_equal(decode(ODD["gray16.png"]), np.repeat(PIXELS[..., :1], 3, axis=2))
    assert decode(ODD["gray16.png"], "decode(1)").shape == (60, 80, 1)
    deep = image_datasets.encoded(Image.fromarray(np.full((4, 5), 0x12FF, np.uint16)), "PNG")
    assert set(decode(deep, "decode(1)").ravel()) == {0x12}


def test_gray_image_has_one_channel_or_three_equal_channels():
    gray = decode(ODD["gray.jpg"], "decode(1)")
    np.testing.assert_array_equal(decode(ODD["gray.jpg"]), np.repeat(gray, 3, axis=2))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_only_on_request(orientation):
    precise = orientation % 2 == 1
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = image_datasets.jpeg(0, 60, 80, exif=exif)
    stored = decode(data, f"decode(precise={precise})")
    assert stored.shape == (60, 80, 3)
    shown = {2: stored[:, ::-1], 3: stored[::-1, ::-1], 4: stored[::-1], 5: stored.transpose(1, 0, 2),
             6: np.rot90(stored, -1), 7: np.rot90(stored, 2).transpose(1, 0, 2), 8: np.rot90(stored)}  # fmt: skip
    upright = decode(data, f"decode(precise={precise}, exif=True)")
    np.testing.assert_array_equal(upright, shown.get(orientation, stored))
    np.testing.assert_array_equal(
        decoding.decode_crop(data, (0, 0, 60, 80), exif=True), decoding.decode(data, exif=True)
    )


@pytest.mark.parametrize(("name", "spec"), [("empty.jpg", DECODERS[0]), ("text.jpg", DECODERS[3])])
def test_file_that_is_not_an_image_is_refused(name, spec):
    with pytest.raises(ip.InputError, match="not an image"):
        decode(ODD[name], spec)


@pytest.mark.parametrize("spec", DECODERS[:2])
def test_truncated_file_is_refused(spec):
    for data in (ODD["truncated.jpg"], ODD["palette.png"][:-40], ODD["webp.webp"][:99]):
        with pytest.raises(ip.InputError, match=r"broken image|not an image"):
            decode(data, spec)


def test_crop_of_a_truncated_file_is_decoded_only_above_the_cut():
    truncated, complete = ODD["truncated.jpg"], image_datasets.jpeg(0)
    above = (0, 0, 8, 80)
    np.testing.assert_array_equal(decoding.decode_crop(truncated, above), decoding.decode_crop(complete, above))
    with pytest.raises(ip.InputError, match="damaged or cut off"):
        decoding.decode_crop(truncated, (40, 0, 20, 80))


@pytest.mark.slow
def test_random_damage_gives_pixels_or_an_input_error_of_one_line():
    outcomes = set()
    rng = np.random.default_rng(0)
    for name in ("exif6.jpg", "cmyk.jpg", "palette.png", "webp.webp", "animated.gif"):
        for _ in range(15):
            data = bytearray(ODD[name])
            for at in rng.integers(len(data), size=rng.integers(1, 20)):
                data[at] = rng.integers(256)
            try:
                outcomes.add(decode(bytes(data)).dtype.name)
            except ip.InputError as e:
                outcomes.add(len(str(e).splitlines()))
    assert outcomes == {"uint8", 1}


def jpeg_outcome(decode, data, errors):
    try:
        return np.asarray(decode(data))
    except errors:
        return None


@pytest.mark.parametrize("name", ["exif6.jpg", "cmyk.jpg", "gray.jpg"])
def test_pixels_of_damaged_jpegs_are_refused_or_decoded_as_by_tensorflow(name):
    """Damage to the pixels. In headers, Pillow reads a few files that TensorFlow refuses."""
    tf = pytest.importorskip("tensorflow")
    rng, start = np.random.default_rng(0), ODD[name].rindex(b"\xff\xda") + 20
    outcomes = set()
    for i in range(60):
        data = bytearray(ODD[name])
        for at in rng.integers(start, len(data) - 2, size=rng.integers(1, 6)):
            data[at] = rng.integers(256)
        data = bytes(data[: len(data) - 200] if i % 6 == 0 else data)
        found = jpeg_outcome(decode, data, ip.InputError)
        expected = jpeg_outcome(lambda data: tf.io.decode_jpeg(data, channels=3), data, tf.errors.OpError)
        assert (found is None) == (expected is None)
        if found is not None:
            np.testing.assert_array_equal(found, expected)
        outcomes.add(found is None)
    assert outcomes == {True, False}


def test_inverted_cmyk_is_told_by_the_marker_of_adobe():
    tf = pytest.importorskip("tensorflow")
    data = ODD["cmyk.jpg"]
    at = data.index(b"\xff\xee")  # the marker, then the length of its segment
    plain = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
    for file in (data, plain):
        np.testing.assert_array_equal(decode(file), tf.io.decode_jpeg(file, channels=3).numpy())
    assert np.abs(decode(data).astype(int) - decode(plain)).mean() > 20


def test_what_turbojpeg_does_not_read_is_decoded_by_pillow_or_refused():
    data = image_datasets.jpeg(0, 64, 64)
    frame = data.index(b"\xff\xc0")
    odd = data[: frame + 11] + b"\x31" + data[frame + 12 :]  # sampling factors of the first component
    bytes_before_tables = data[:2] + b"abc" + data[2:]
    for file in (odd, bytes_before_tables):
        found = jpeg_outcome(decode, file, ip.InputError)
        assert found is None or found.shape == (64, 64, 3)
    assert decoding._jpeg_colors(odd) is None
    for file in (data[: frame + 15], data[: frame + 9] + b"\x14" + data[frame + 10 :]):
        jpeg_outcome(decode, file, ip.InputError)
        assert decoding.jpeg_warning(file) is None or isinstance(decoding.jpeg_warning(file), str)


@pytest.mark.parametrize(
    ("size", "options"),
    [((8, 9), {}), ((60, 80), {"exif": b"Exif\0\0" + b"\xff\xc0" * 40}), ((1000, 3), {"progressive": True})],
)
def test_size_is_read_from_the_frame_header(size, options):
    data = image_datasets.jpeg(0, *size, **options)
    assert decoding.jpeg_size(data) == size
    assert decoding.jpeg_size(data[:2] + b"\xff\xff" + data[2:]) == size  # padding before a marker


@pytest.mark.parametrize("spec", DECODERS[:3])
def test_size_that_no_image_has_is_refused_before_decoding(spec):
    data = image_datasets.jpeg(0)
    at = data.index(b"\xff\xc0") + 5  # the height and the width
    for damaged in (data[:at] + b"\xfd\xe8\xfd\xe8" + data[at + 4 :], image_datasets.bomb_png(60_000, 60_000)):
        with refused(ip.InputError, match="exceeds (the )?limit", most_bytes=1 << 24):
            decode(damaged, spec)


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
def test_decoded_crop_differs_from_the_crop_of_a_decoded_image_only_at_the_sides(subsampling):
    data = image_datasets.jpeg(3, 200, 300, subsampling=subsampling)
    top, left, height, width = window = 32, 48, 96, 112
    whole = decoding.decode(data)[top : top + height, left : left + width].astype(int)
    difference = np.abs(decoding.decode_crop(data, window) - whole)
    assert not difference[:, 1:-1].any()
    assert bool(difference.any()) == (subsampling != "4:4:4")
    assert difference.max() <= 16
