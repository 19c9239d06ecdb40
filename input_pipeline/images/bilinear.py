"""Bilinear resizing of RGB images with the arithmetic of TensorFlow, as a loop that numba compiles.

Numba compiles the loop when it first runs, which takes some seconds, and stores the machine code beside this file or in
the user's cache folder, if one can be written. The loop does not hold Python's lock and does not check bounds.
Floating-point operations are neither reordered nor fused.
"""

import functools
from collections.abc import Callable
from typing import no_type_check

import numpy as np
from jaxtyping import Float32, UInt8, UInt32

from input_pipeline.errors import InputError
from input_pipeline.optional import require

MOST_VALUES = 1 << 32  # of an image; the loop indexes with 32 bits
Axis = tuple[UInt32[np.ndarray, "n"], UInt32[np.ndarray, "n"], Float32[np.ndarray, "n"]]


def resize_bilinear(image: np.ndarray, size: tuple[int, int]) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """Resize an image as TensorFlow's ResizeBilinear with half-pixel centers, and truncate the result.

    At position x of a row, between the pixels a at ⌊x⌋ and b, the value is a + (b - a) · (x - ⌊x⌋) in float32. The
    values of the rows above and below are interpolated in the same way. Threads resize in parallel.

    Args:
      image: the pixels, uint8 of shape (height, width, 3).
      size: height and width of the result.

    Raises:
      InputError: the image has another shape or dtype, or the size is not positive.
      ReadingError: numba is not installed.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise InputError(f"resize: expected 3 channels of uint8, got shape {image.shape} of {image.dtype}")
    if not 0 < image.size < MOST_VALUES:
        raise InputError(f"resize: expected 1 to 2**32 / 3 pixels, got shape {image.shape}")
    height, width = size
    if not (height > 0 and width > 0 and 3 * height * width < MOST_VALUES):
        raise InputError(f"resize: {width}x{height} is not the size of an image")
    out = np.empty((height, width, 3), np.uint8)
    left, right, across = _interpolation(image.shape[1], width)
    rows = _interpolation(image.shape[0], height)
    _compiled()(np.ascontiguousarray(image), (3 * left, 3 * right, across), rows, out)
    return out


@functools.lru_cache(maxsize=4096)  # at most 3 kB each for an output of 224 pixels
def _interpolation(length: int, new_length: int) -> Axis:
    """Return (index before, index after, distance to the former) on the input axis for each position of the output."""
    scale = np.float32(length) / np.float32(new_length)
    position = (np.arange(new_length, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    below = np.floor(position)
    # float32 rounds positions near the end of a very long axis to ones beyond it.
    before, after = (np.clip(side.astype(np.int64), 0, length - 1) for side in (below, np.ceil(position)))
    return before.astype(np.uint32), after.astype(np.uint32), position - below


@functools.cache
def _compiled() -> Callable[..., None]:
    """Return `_resize`, compiled by numba. Raises ReadingError if numba is not installed."""
    numba = require("numba")
    types = numba.types
    image = types.Array(types.uint8, 3, "C", readonly=True)  # a writable array is accepted, too
    indices, weights = (types.Array(kind, 1, "C", readonly=True) for kind in (types.uint32, types.float32))
    axis = types.Tuple((indices, indices, weights))
    signature = types.void(image, axis, axis, types.Array(types.uint8, 3, "C"))
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    loop: Callable[..., None]
    try:
        loop = numba.njit(signature, cache=True, **options)(_resize)
    except (RuntimeError, OSError, EOFError):  # no folder is writable, the disk is full, or a file is cut off
        loop = numba.njit(signature, cache=False, **options)(_resize)
    return loop


@no_type_check  # numba does not compile a function that checks its arguments
def _resize(image, columns, rows, out):
    """Write the resized image to `out`: interpolate rows along x, then between the rows above and below each new row.

    `columns` and `rows` are results of `_interpolation`; the indices in `columns` are three times those of a pixel.
    """
    left, right, across = columns
    upper, lower, down = rows
    height, width = out.shape[:2]
    row = np.empty(image.shape[1] * 3, np.float32)
    above, below = np.empty(width * 3, np.float32), np.empty(width * 3, np.float32)
    in_above = in_below = np.int64(-1)  # the rows of the image in `above` and `below`
    for y in range(height):
        if upper[y] == in_below:
            above, below, in_above, in_below = below, above, in_below, in_above
        for side in range(2):
            wanted, current = (np.int64(upper[y]), in_above) if side == 0 else (np.int64(lower[y]), in_below)
            if wanted == current:
                continue
            line = above if side == 0 else below
            pixels = image[wanted].reshape(-1)
            for i in range(pixels.size):
                row[i] = pixels[i]
            for x in range(np.uint32(width)):  # unsigned indices need no check for negative ones
                first, second, weight = left[x], right[x], across[x]
                for channel in range(np.uint32(3)):
                    start = row[first + channel]
                    line[np.uint32(3) * x + channel] = start + (row[second + channel] - start) * weight
            if side == 0:
                in_above = wanted
            else:
                in_below = wanted
        weight, result = down[y], out[y].reshape(-1)
        for i in range(result.size):
            result[i] = np.uint8(np.int32(above[i] + (below[i] - above[i]) * weight))
