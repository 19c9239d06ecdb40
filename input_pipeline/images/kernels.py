"""Operations on the pixels of RGB images as one compiled loop each, with the arithmetic of TensorFlow.

The loops are in `input_pipeline.images.loops`, which needs numba; it is imported when the first of them runs. All
functions return new images, and threads run them in parallel.
"""

import functools
import types

import numpy as np
from jaxtyping import Float32, Int64, UInt8, UInt32

from input_pipeline.optional import require

Pixels = UInt8[np.ndarray, "height width 3"]
Axis = tuple[UInt32[np.ndarray, "n"], UInt32[np.ndarray, "n"], Float32[np.ndarray, "n"]]


@functools.cache
def _loops() -> types.ModuleType:
    """Import the compiled loops. Raises ReadingError if numba is not installed."""
    require("numba")
    from input_pipeline.images import loops

    return loops


def resize_bilinear(image: Pixels, size: tuple[int, int]) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """Resize an image as TensorFlow's ResizeBilinear with half-pixel centers, and truncate the result.

    At position x of a row, between the pixels a at ⌊x⌋ and b, the value is a + (b - a) · (x - ⌊x⌋) in float32. The
    values of the rows above and below are interpolated in the same way.

    Args:
      image: the pixels.
      size: height and width of the result.
    """
    out = np.empty((*size, 3), np.uint8)
    left, right, across = _interpolation(image.shape[1], size[1])
    upper, lower, down = _interpolation(image.shape[0], size[0])
    _loops().resize(np.ascontiguousarray(image), 3 * left, 3 * right, across, upper, lower, down, out)
    return out


@functools.lru_cache(maxsize=4096)  # at most 3 kB each for an output of 224 pixels
def _interpolation(length: int, new_length: int) -> Axis:
    """Return the index before and after each output position of an axis, and the position's distance to the first."""
    scale = np.float32(length) / np.float32(new_length)
    position = (np.arange(new_length, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    below = np.floor(position)
    before, after = np.maximum(below, 0).astype(np.uint32), np.minimum(np.ceil(position).astype(np.int64), length - 1)
    return before, after.astype(np.uint32), position - below


def lookup(image: Pixels, tables: UInt8[np.ndarray, "3 256"]) -> Pixels:
    """Replace each value v of channel c by tables[c, v]."""
    out = np.empty(image.shape, np.uint8)
    _loops().lookup(np.ascontiguousarray(image), np.ascontiguousarray(tables), out)
    return out


def histogram(image: Pixels) -> Int64[np.ndarray, "3 256"]:
    """Return the number of pixels of each channel and value."""
    counts = np.zeros((3, 256), np.int64)
    _loops().count(np.ascontiguousarray(image), counts)
    return counts


def move(image: Pixels, sources: UInt32[np.ndarray, "height width"], outside: int) -> Pixels:
    """Return the image whose pixel at (y, x) is the pixel with the row-major index sources[y, x].

    Args:
      image: the pixels.
      sources: indices of pixels; height · width stands for a pixel of value `outside` in every channel.
      outside: 0 to 255.
    """
    out = np.empty(image.shape, np.uint8)
    _loops().move(np.ascontiguousarray(image), sources, np.uint8(outside), out)
    return out


def color(image: Pixels, factor: float) -> Pixels:
    """Return gray + factor · (image - gray); see `input_pipeline.preprocess.randaug.color`."""
    out = np.empty(image.shape, np.uint8)
    _loops().color(np.ascontiguousarray(image), np.float32(factor), out)
    return out


def sharpen(image: Pixels, factor: float) -> Pixels:
    """Return smooth + factor · (image - smooth); see `input_pipeline.preprocess.randaug.sharpness`."""
    out = image.copy()
    _loops().sharpen(np.ascontiguousarray(image), np.float32(factor), out)
    return out
