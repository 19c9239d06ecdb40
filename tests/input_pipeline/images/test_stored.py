"""Images keep the channels and values of their files, and damaged files end in one line."""

import io
import struct

import image_datasets
import numpy as np
import pytest
from PIL import Image
from refusals import refused

import input_pipeline as ip

tifffile = pytest.importorskip("tifffile")
imagecodecs = pytest.importorskip("imagecodecs")
RNG = np.random.default_rng(0)


def values(dtype, channels, height=37, width=45):
    """Numbers over the whole range of a dtype."""
    if dtype.startswith("float"):
        return (1e4 * RNG.normal(size=(height, width, channels))).astype(dtype)
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max, (height, width, channels), dtype, endpoint=True)


def decode(data, channels, dtype="uint8", **options):
    words = "".join(f", {key}={value!r}" for key, value in options.items())
    spec = f"decode({channels}, dtype={dtype!r}{words})"
    return ip.Preprocess(spec)({"image": data}, np.random.default_rng(0))["image"]


def tiff(image, layout="contig", **options):
    """The bytes of a TIFF whose channels are mixed ("contig"), in planes ("separate"), or in pages."""
    file = io.BytesIO()
    kept = {"photometric": "minisblack", "metadata": None} | options
    if layout == "contig":
        tifffile.imwrite(file, image, planarconfig="contig", **kept)
    else:
        planes = {"planarconfig": "separate"} if layout == "separate" else {}
        tifffile.imwrite(file, np.moveaxis(image, 2, 0), **planes, **kept)
    return file.getvalue()


def npy(image):
    file = io.BytesIO()
    np.save(file, image, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize("layout", ["contig", "separate", "pages"])
@pytest.mark.parametrize(
    "options",
    [{"compression": "lzw", "predictor": True, "byteorder": ">"}, {"compression": "zlib", "tile": (16, 32)},
     {"compression": "zstd", "rowsperstrip": 9}, {"compression": "lzma", "bigtiff": True}, {"compression": "packbits"}],
    ids=str,
)  # fmt: skip
def test_tiffs_of_every_layout_and_compression_keep_their_values(layout, options):
    image = values("uint16", 13)
    np.testing.assert_array_equal(decode(tiff(image, layout, **options), 13, "uint16"), image)


@pytest.mark.parametrize(
    ("dtype", "channels", "layout"), [("uint8", 4, "contig"), ("int16", 2, "separate"), ("float32", 3, "pages")]
)
def test_tiffs_of_every_dtype_keep_their_values(dtype, channels, layout):
    image = values(dtype, channels)
    found = decode(tiff(image, layout, compression="lzw", predictor=True), channels, dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, image)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "float16"])
def test_a_wider_dtype_holds_the_values_of_smaller_ones(dtype):
    for data in (tiff(image := values(dtype, 5)), npy(image), npy(np.asfortranarray(image))):
        np.testing.assert_array_equal(decode(data, 5, "float32"), image)


@pytest.mark.parametrize("compression", ["zlib", "lzw"])
def test_planes_of_a_tiff_of_bytes_are_all_read(compression):
    """Pillow would return the first plane three times."""
    image = values("uint8", 3)
    data = tiff(image, "separate", compression=compression)
    np.testing.assert_array_equal(decode(data, 3), image)
    for file in (data, npy(image)):
        with refused(ip.InputError, "no .npy file, and no TIFF of several gray channels: use decode"):
            ip.Preprocess("decode_jpeg_and_inception_crop(8)")({"image": file}, np.random.default_rng(0))


def test_masks_and_reduced_copies_are_not_channels():
    image, file = values("uint16", 2), io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        for band, kind in ((image[..., 0], 0), (image[..., 1], 0), (image[::2, ::2, 0], 1)):
            writer.write(band, photometric="minisblack", subfiletype=kind, metadata=None)
        writer.write(image[..., 0] > 9, photometric=4, subfiletype=4, metadata=None)
    np.testing.assert_array_equal(decode(file.getvalue(), 2, "uint16"), image)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_pngs_of_8_and_16_bits_keep_their_channels(channels):
    for dtype in ("uint8", "uint16"):
        image = values(dtype, channels)
        data = imagecodecs.png_encode(image[..., 0] if channels == 1 else image)
        np.testing.assert_array_equal(decode(data, channels, "uint16"), image)


def test_transparency_of_a_palette_and_gray_arrays_are_read():
    indices = Image.fromarray(values("uint8", 3)).quantize(8)
    expected = np.asarray(indices.convert("RGBA")).copy()
    expected[np.asarray(indices) == 0, 3] = 0
    data = image_datasets.encoded(indices, "PNG", transparency=0)
    np.testing.assert_array_equal(decode(data, 4), expected)
    gray = values("uint16", 1)[..., 0]
    np.testing.assert_array_equal(decode(npy(gray), 1, "uint16")[..., 0], gray)
    rgb = values("uint8", 3)
    np.testing.assert_array_equal(decode(npy(rgb), 3), rgb)  # `decode` alone, too


def test_files_of_8_bits_have_the_pixels_of_pillow():
    for kind in ("JPEG", "WEBP", "BMP"):
        picture = Image.fromarray(image_datasets.image_array(0))
        data = image_datasets.encoded(picture, kind)
        np.testing.assert_array_equal(decode(data, 3, "float32"), np.asarray(Image.open(io.BytesIO(data))))


def test_orientation_is_applied_on_request():
    image = values("uint16", 5, 6, 8)
    data = tiff(image, extratags=[(274, "H", 1, 6, True)])  # turned clockwise to be upright
    np.testing.assert_array_equal(decode(data, 5, "uint16"), image)
    np.testing.assert_array_equal(decode(data, 5, "uint16", exif=True), np.rot90(image, 3))


def patched(data, code, number):
    """A TIFF whose tag has another value."""
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        tag = file.pages[0].tags[code]
    at = tag.offset + 8
    return data[:at] + (struct.pack("<HH", number, 0) if tag.dtype == 3 else struct.pack("<I", number)) + data[at + 4 :]


GOOD = tiff(values("uint16", 13, 32, 32), "separate", compression="zlib")
SMALL = np.zeros((2, 2, 13), np.uint16)
WIDTH, HEIGHT = 256, 257


@pytest.mark.parametrize(
    ("match", "data"),
    [
        ("missing or cut off", lambda: patched(patched(GOOD, WIDTH, 60_000), HEIGHT, 60_000)),
        ("missing or cut off", lambda: GOOD[:-900]),
        ("broken image: .*", lambda: npy(SMALL)[:-1]),
        ("not an image", lambda: b"hello"),
    ],
)  # fmt: skip
def test_damaged_files_are_one_line_without_memory_for_the_size_in_the_header(match, data):
    file = data()
    with refused(ip.InputError, match=match, most_bytes=1 << 24):
        decode(file, 13, "uint16")


@pytest.mark.parametrize(
    ("match", "channels", "dtype", "data"),
    [
        ('which uint8 does not hold; expected', 13, "uint8", lambda: GOOD),
        ("13 channels; expected 12", 12, "uint16", lambda: GOOD),
        ("compression 7; expected none, LZW", 3, "uint16", lambda: tiff(values("uint8", 3), compression="jpeg")),
        ("CMYK is read by decode", 4, "uint8", lambda: image_datasets.jpeg(0, mode="CMYK")),
    ],
)  # fmt: skip
def test_other_channels_types_and_kinds_are_refused(match, channels, dtype, data):
    file = data()
    with refused(ip.InputError, match=match):
        decode(file, channels, dtype)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("write", [tiff, npy])
def test_floats_that_are_not_finite_are_an_error_of_the_example(number, write):
    image = values("float32", 2)
    image[3, 4, 1] = number
    with pytest.raises(ip.InputError, match=f"row 3, column 4 is {number} in channel 1"):
        decode(write(image), 2, "float32")
