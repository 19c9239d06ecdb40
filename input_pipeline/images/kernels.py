"""Operations on the pixels of RGB images, each as one compiled loop, with the arithmetic of TensorFlow.

The loops are in `input_pipeline.images.loops`, which needs numba; it is imported when the first of them runs. The loops
do not check bounds. Therefore every function raises InputError for an image that is not uint8 RGB. All functions return
new images, and threads run them in parallel.
"""

import functools
import types

import numpy as np
from jaxtyping import Float32, Int64, UInt8, UInt32

from input_pipeline.errors import InputError
from input_pipeline.optional import require

MOST_VALUES = 1 << 32  # of an image; the loops index with 32 bits
Pixels = UInt8[np.ndarray, "height width 3"]
Axis = tuple[UInt32[np.ndarray, "n"], UInt32[np.ndarray, "n"], Float32[np.ndarray, "n"]]


@functools.cache
def _loops() -> types.ModuleType:
    """Import the compiled loops. Raises ReadingError if numba is not installed."""
    require("numba")
    from input_pipeline.images import loops

    return loops


def resize_bilinear(image: np.ndarray, size: tuple[int, int]) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """Resize an image as TensorFlow's ResizeBilinear with half-pixel centers, and truncate the result.

    At position x of a row, between the pixels a at ⌊x⌋ and b, the value is a + (b - a) · (x - ⌊x⌋) in float32. The
    values of the rows above and below are interpolated in the same way.

    Args:
      image: the pixels, uint8 of shape (height, width, 3).
      size: height and width of the result, 1 or more.
    """
    image, (height, width) = _image(image, "resize"), size
    out = np.empty((height, width, 3), np.uint8)
    left, right, across = _interpolation(image.shape[1], width)
    upper, lower, down = _interpolation(image.shape[0], height)
    _loops().resize(image, (3 * left, 3 * right, across), (upper, lower, down), out)
    return out


@functools.lru_cache(maxsize=4096)  # at most 3 kB each for an output of 224 pixels
def _interpolation(length: int, new_length: int) -> Axis:
    """Return, for each output position of an axis, both neighboring input indices and the distance to the first."""
    scale = np.float32(length) / np.float32(new_length)
    position = (np.arange(new_length, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    below = np.floor(position)
    # float32 rounds positions near the end of a very long axis to ones beyond it.
    before, after = (np.clip(side.astype(np.int64), 0, length - 1) for side in (below, np.ceil(position)))
    return before.astype(np.uint32), after.astype(np.uint32), position - below


def lookup(image: np.ndarray, tables: UInt8[np.ndarray, "3 256"]) -> Pixels:
    """Replace each value v of channel c by tables[c, v]."""
    image = _image(image, "lookup")
    out = np.empty(image.shape, np.uint8)
    _loops().lookup(image, np.ascontiguousarray(tables), out)
    return out


def histogram(image: np.ndarray) -> Int64[np.ndarray, "3 256"]:
    """Return the number of pixels of each channel and value."""
    image = _image(image, "histogram")
    counts = np.zeros((3, 256), np.int64)
    _loops().count(image, counts)
    return counts


def move(image: np.ndarray, sources: UInt32[np.ndarray, "height width"], outside: int) -> Pixels:
    """Return the image whose pixel at (y, x) is the pixel with the row-major index sources[y, x].

    Args:
      image: the pixels, uint8 of shape (height, width, 3).
      sources: indices of pixels; height · width, or any larger index, stands for a pixel of value `outside` in every
        channel.
      outside: 0 to 255.
    """
    image = _image(image, "move")
    out = np.empty(image.shape, np.uint8)
    _loops().move(image, np.ascontiguousarray(sources), np.uint8(outside), out)
    return out


def color(image: np.ndarray, factor: float) -> Pixels:
    """Interpolate between the gray image (factor 0) and the image (factor 1), or extrapolate.

    Gray equals `tf.image.rgb_to_grayscale`, 0.2989 R + 0.587 G + 0.114 B in float32, for all 2²⁴ colors.
    """
    image = _image(image, "color")
    out = np.empty(image.shape, np.uint8)
    _loops().color(image, np.float32(factor), out)
    return out


def sharpen(image: np.ndarray, factor: float) -> Pixels:
    """Interpolate between a smoothed image (factor 0) and the image (factor 1), or extrapolate.

    The smoothed image is the mean over 3 × 3 pixels in which the center counts five times; the outermost pixels are
    not smoothed. The terms are added in float32 row by row, as in TensorFlow's own convolution. TensorFlow with oneDNN
    rounds differently: about 4 in 1,000 smoothed values differ by 1.
    """
    image = _image(image, "sharpen")
    out = image.copy()
    _loops().sharpen(image, np.float32(factor), out)
    return out


def _image(image: np.ndarray, name: str) -> Pixels:
    """Return an image as a contiguous array. Raises InputError unless it is uint8 RGB with at least one pixel."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise InputError(f"{name}: expected 3 channels of uint8, got shape {image.shape} of {image.dtype}")
    if not 0 < image.size < MOST_VALUES:
        raise InputError(f"{name}: expected 1 to 2**32 / 3 pixels, got shape {image.shape}")
    return np.ascontiguousarray(image)
