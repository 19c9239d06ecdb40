"""Decoding of images to the values that a file stores, with any number of channels of 8 or 16 bits or floats.

TIFF files are read by tifffile, PNG files of 16 bits by imagecodecs, arrays of numpy (`.npy`) directly, and other
formats by Pillow. The size that a header announces is checked before memory is allocated.
"""

import contextlib
import functools
import io
import logging
import math
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Num

from input_pipeline.errors import InputError, MissingLibraryError, first_line
from input_pipeline.images.decode import MAX_PIXELS, ORIENTATION, TIFF_STARTS, pillow_image, upright
from input_pipeline.optional import require

if TYPE_CHECKING:
    import tifffile

DTYPES = ("uint8", "uint16", "int16", "float32")
Pixels = Num[np.ndarray, "height width channels"]
MAX_CHANNELS = 4096
MAX_VALUES = 3 * MAX_PIXELS  # pixels times channels
ARRAY_START, PNG_START = b"\x93NUMPY", b"\x89PNG\r\n\x1a\n"
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")  # of Pillow's images, of 8 bits or less
PNG_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by the color type in the header
PNG_CHUNKS = (b"IHDR", b"IDAT", b"IEND")  # that hold the pixels of a PNG of 16 bits
# Lossless compressions of TIFF.
COMPRESSIONS = {1: "none", 5: "LZW", 8: "Deflate", 32773: "PackBits", 32946: "Deflate", 34925: "LZMA", 50000: "ZSTD"}
REDUCED_OR_MASK = 0b101  # bits of a TIFF page's NewSubfileType: a smaller copy, a mask
PALETTE = 3  # PhotometricInterpretation


class Wanted:
    """The number of channels and the dtype that an op asks for."""

    def __init__(self, channels: int, dtype: str):
        self.channels, self.dtype = channels, np.dtype(dtype)

    def check(self, height: int, width: int, channels: int, stored: np.dtype[np.generic]) -> None:
        """Raise InputError if an image has other channels, no or too many pixels, or values unfit for the dtype."""
        if channels != self.channels:
            raise InputError(f"the image has {channels} channels; expected {self.channels}, the number given to decode")
        if min(height, width) < 1 or height * width * channels > MAX_VALUES:
            raise InputError(
                f"the image announces {width}x{height} pixels of {channels} channels; expected 1 to {MAX_VALUES} values"
            )
        if not np.can_cast(stored, self.dtype, "safe"):
            raise InputError(f"the image has {stored} values, which {self.dtype} does not hold; expected {DTYPES}")


def is_array(data: bytes) -> bool:
    """Return True if the bytes start like a `.npy` file."""
    return data.startswith(ARRAY_START)


def decode(data: bytes, channels: int, dtype: str, *, exif: bool = False) -> Pixels:
    """Return the pixels of an image file, with the values that it stores, of shape (height, width, channels).

    The channels of a TIFF are those of all its pages, in their order; pages that are masks or reduced copies do not
    count. The colors of a palette are RGB, or RGBA if one is transparent.

    Args:
      data: the bytes of the file.
      channels: the number of channels that the file must have.
      dtype: one of DTYPES, which must hold every value of the file's own dtype.
      exif: rotate and mirror the image as its EXIF orientation says.

    Raises:
      InputError: the file is not an image, is damaged, has other channels or values, has a float that is not finite, or
        has more than MAX_VALUES.
      MissingLibraryError: tifffile or imagecodecs is not installed, and the file is a TIFF or a PNG of 16 bits.
    """
    wanted = Wanted(channels, dtype)
    if is_array(data):
        pixels, orientation = _array(data, wanted), 1
    elif data[:4] in TIFF_STARTS:
        pixels, orientation = _tiff(data, wanted)
    else:
        pixels, orientation = _other(data, wanted, exif)
    if pixels.dtype.kind == "f" and not (finite := np.isfinite(pixels)).all():
        row, column, channel = np.argwhere(~finite)[0]
        raise InputError(
            f"the pixel in row {row}, column {column} is {pixels[row, column, channel]} in channel {channel}; replace "
            "values that are not finite"
        )
    return upright(pixels.astype(wanted.dtype, copy=False), orientation if exif else 1)


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Context manager that makes an InputError of every error of a decoder."""
    try:
        yield
    except (InputError, MemoryError, MissingLibraryError):
        raise
    except Exception as e:  # decoders raise any type of exception for damaged files
        raise InputError(f"broken image: {first_line(e)}") from None


def _array(data: bytes, wanted: Wanted) -> Pixels:
    """Return the array in a `.npy` file of shape (height, width) or (height, width, channels); pickles are not read."""
    with _damage():
        stream = io.BytesIO(data)
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        if len(shape) not in (2, 3):
            raise InputError(f"the array has the shape {shape}; expected (height, width, channels)")
        height, width, channels = (*shape, 1)[:3]
        wanted.check(height, width, channels, dtype)
        values = np.frombuffer(data, dtype, math.prod(shape), stream.tell())
        return values.reshape((height, width, channels), order="F" if fortran else "C")


def _other(data: bytes, wanted: Wanted, exif: bool) -> tuple[Pixels, int]:
    """Return the pixels of a file that Pillow recognizes, and with `exif` their orientation, else 1."""
    with pillow_image(data) as image:
        if image.format == "AVIF" or image.mode not in (*MODES, "I;16", "I"):
            raise InputError(f"{image.format} of mode {image.mode} is read by decode(1) or decode(3) as uint8 only")
        orientation = int(image.getexif().get(ORIENTATION, 1)) if exif else 1
        if data.startswith(PNG_START) and data[24] == 16:  # bits of a channel; Pillow keeps 8 bits of colors
            return _png16(data, wanted, (image.height, image.width)), orientation
        if image.mode in ("1", "P", "PA"):
            image = image.convert("L" if image.mode == "1" else "RGBA" if image.has_transparency_data else "RGB")
        wanted.check(image.height, image.width, len(image.getbands()), np.dtype(np.uint8))
        return np.asarray(image).reshape(image.height, image.width, -1), orientation


def _png16(data: bytes, wanted: Wanted, size: tuple[int, int]) -> Pixels:
    """Return the pixels of a PNG of 16 bits per channel, without those chunks that do not hold pixels."""
    wanted.check(*size, PNG_CHANNELS[data[25]], np.dtype(np.uint16))
    parts, at = [data[:8]], 8
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] in PNG_CHUNKS:
            parts.append(data[at:end])
        at = end
    pixels: Pixels = require("imagecodecs").png_decode(b"".join(parts))
    return pixels.reshape(*size, wanted.channels)


@functools.cache
def _tifffile() -> types.ModuleType:
    """Import tifffile. Raises MissingLibraryError if it, or imagecodecs, is not installed."""
    library = require("tifffile")
    require("imagecodecs")  # decompresses
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # it logs unusual tags of every file
    return library


def _tiff(data: bytes, wanted: Wanted) -> tuple[Pixels, int]:
    """Return the pixels and the orientation of a TIFF: the channels of all pages, except masks and reduced copies."""
    library = _tifffile()
    with _damage(), library.TiffFile(io.BytesIO(data)) as file:
        pages = [page for page in file.pages if not page.subfiletype & REDUCED_OR_MASK]
        if len({(page.imagelength, page.imagewidth, page.dtype) for page in pages}) != 1:
            raise InputError("the pages of the TIFF differ in size or type, or there are none")
        first, channels = pages[0], sum(page.samplesperpixel for page in pages)
        if first.dtype is None:
            raise InputError(f"the TIFF has {first.bitspersample} bits of {first.sampleformat!r:.40} per channel")
        wanted.check(first.imagelength, first.imagewidth, channels, first.dtype)
        for page in pages:
            _check_page(page, len(data))
        pixels = np.empty((first.imagelength, first.imagewidth, channels), first.dtype)
        at = 0
        for page in pages:
            # planes, depth, height, width, samples: one of the first and the last is 1
            values = page.asarray(squeeze=False, maxworkers=1)
            pixels[..., at : at + page.samplesperpixel] = np.moveaxis(values[:, 0], 0, 2).reshape(*pixels.shape[:2], -1)
            at += page.samplesperpixel
        return pixels, int(first.tags.valueof(ORIENTATION, 1))


def _check_page(page: "tifffile.TiffPage", size: int) -> None:
    """Raise InputError if a page of a TIFF of `size` bytes is of another kind, or is cut off."""
    if page.imagedepth != 1 or page.photometric == PALETTE or not isinstance(page.bitspersample, int):
        raise InputError("the TIFF is a volume, or has a palette or channels of different sizes, which are not read")
    if page.compression not in COMPRESSIONS:
        known = ", ".join(dict.fromkeys(COMPRESSIONS.values()))
        raise InputError(f"the TIFF has compression {int(page.compression)}; expected {known}")
    number = math.prod(page.chunked)  # of strips or tiles
    places = [*zip(page.dataoffsets, page.databytecounts, strict=False)][:number]
    if len(places) < number or any(not 0 < at < at + count <= size for at, count in places):
        raise InputError("broken image: a strip or tile of the TIFF is missing or cut off")
