"""Decoding of images to the values that a file stores, with any number of channels of 8 or 16 bits or floats.

TIFF files are read by tifffile, PNG files of 16 bits by imagecodecs, arrays (`.npy`) by numpy, and other formats by
Pillow.
"""

import functools
import io
import logging
import math
import types
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Num

from input_pipeline.errors import InputError, library_errors
from input_pipeline.images.decode import ORIENTATION, TIFF_STARTS, pillow_image, upright
from input_pipeline.optional import require

if TYPE_CHECKING:
    import tifffile

DTYPES = ("uint8", "uint16", "int16", "float32")
Pixels = Num[np.ndarray, "height width channels"]
ARRAY_START, PNG_START = b"\x93NUMPY", b"\x89PNG\r\n\x1a\n"
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")  # of Pillow's images, of 8 bits or less
# Lossless compressions of TIFF.
COMPRESSIONS = {1: "none", 5: "LZW", 8: "Deflate", 32773: "PackBits", 32946: "Deflate", 34925: "LZMA", 50000: "ZSTD"}
REDUCED_OR_MASK = 0b101  # bits of a TIFF page's NewSubfileType: a smaller copy, a mask
PALETTE = 3  # PhotometricInterpretation


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
      InputError: the file is not an image, is damaged, has other channels or values, or has a float that is not finite.
      MissingLibraryError: tifffile or imagecodecs is not installed, and the file is a TIFF or a PNG of 16 bits.
    """
    if is_array(data):
        pixels, orientation = _array(data), 1
    elif data[:4] in TIFF_STARTS:
        pixels, orientation = _tiff(data)
    else:
        pixels, orientation = _other(data)
    if pixels.shape[2] != channels:
        raise InputError(f"the image has {pixels.shape[2]} channels; expected {channels}, the number given to decode")
    if not np.can_cast(pixels.dtype, dtype, "safe"):
        raise InputError(f"the image has {pixels.dtype} values, which {dtype} does not hold; expected {DTYPES}")
    if pixels.dtype.kind == "f" and not (finite := np.isfinite(pixels)).all():
        row, column, channel = np.argwhere(~finite)[0]
        raise InputError(
            f"the pixel in row {row}, column {column} is {pixels[row, column, channel]} in channel {channel}; replace "
            "values that are not finite"
        )
    return upright(pixels.astype(dtype, copy=False), orientation if exif else 1)


def _array(data: bytes) -> Pixels:
    """Return the array in a `.npy` file of shape (height, width) or (height, width, channels); pickles are not read."""
    with library_errors("broken image"):
        values: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
        if values.ndim not in (2, 3) or not values.size:
            raise InputError(f"the array has the shape {values.shape}; expected (height, width, channels)")
        return values.reshape(*values.shape[:2], -1)


def _other(data: bytes) -> tuple[Pixels, int]:
    """Return the pixels of a file that Pillow recognizes, and their orientation."""
    with pillow_image(data) as image:
        if image.format == "AVIF" or image.mode not in (*MODES, "I;16", "I"):
            raise InputError(f"{image.format} of mode {image.mode} is read by decode(1) or decode(3) as uint8 only")
        orientation, size = int(image.getexif().get(ORIENTATION, 1)), (image.height, image.width)
        if data.startswith(PNG_START) and data[24] == 16:  # bits of a channel; Pillow keeps 8 bits of colors
            return require("imagecodecs").png_decode(data).reshape(*size, -1), orientation
        if image.mode in ("1", "P", "PA"):
            image = image.convert("L" if image.mode == "1" else "RGBA" if image.has_transparency_data else "RGB")
        return np.asarray(image).reshape(*size, -1), orientation


@functools.cache
def _tifffile() -> types.ModuleType:
    """Import tifffile. Raises MissingLibraryError if it, or imagecodecs, is not installed."""
    library = require("tifffile")
    require("imagecodecs")  # decompresses
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # it logs unusual tags of every file
    return library


def _tiff(data: bytes) -> tuple[Pixels, int]:
    """Return the pixels and the orientation of a TIFF: the channels of all pages, except masks and reduced copies."""
    library = _tifffile()
    with library_errors("broken image"), library.TiffFile(io.BytesIO(data)) as file:
        pages = [page for page in file.pages if not page.subfiletype & REDUCED_OR_MASK]
        if len({(page.imagelength, page.imagewidth, page.dtype) for page in pages}) != 1:
            raise InputError("the pages of the TIFF differ in size or type, or there are none")
        first = pages[0]
        if first.dtype is None:
            raise InputError(f"the TIFF has {first.bitspersample} bits of {first.sampleformat!r:.40} per channel")
        for page in pages:
            _check_page(page, len(data))
        # planes, depth, height, width, samples: one of the first and the last is 1
        parts = [np.moveaxis(page.asarray(squeeze=False, maxworkers=1)[:, 0], 0, 2) for page in pages]
        size = first.imagelength, first.imagewidth
        pixels = np.concatenate([part.reshape(*size, -1) for part in parts], axis=-1)
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
