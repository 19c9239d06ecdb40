"""Operations on the pixels of RGB images, each as one loop that numba compiles, with the arithmetic of TensorFlow.

These are the loops without which training loses more than a few percent of its images/s. A loop is compiled when it
runs for the first time, which takes some seconds, and its machine code is stored beside this file or in the user's
cache folder, if one can be written. The loops do not hold Python's lock, do not check bounds, and neither reorder nor
fuse operations. Therefore every function raises InputError for an image that is not uint8 RGB. All functions return new
images, and threads run them in parallel.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import no_type_check

import numpy as np
from jaxtyping import Float32, UInt8, UInt32

from input_pipeline.errors import InputError
from input_pipeline.optional import require

MOST_VALUES = 1 << 32  # of an image; the loops index with 32 bits
# A process resizes so many images, of at most so many values, by NumPy, which takes less time than numba's start.
BEFORE_NUMBA, FEW_VALUES = 4, 1 << 21
Pixels = UInt8[np.ndarray, "height width 3"]
Cover = tuple[
    UInt32[np.ndarray, "n"], UInt32[np.ndarray, "n"], Float32[np.ndarray, "n"], Float32[np.ndarray, "n"]
]  # fmt: skip
Axis = tuple[UInt32[np.ndarray, "n"], UInt32[np.ndarray, "n"], Float32[np.ndarray, "n"]]

# Types of arguments, as numba names them. A writable array is accepted as a read-only one.
IMAGE, OUT = "Array(uint8, 3, 'C', readonly=True)", "Array(uint8, 3, 'C')"
SOURCES = "Array(uint32, 2, 'C', readonly=True)"
INDICES, WEIGHTS = "Array(uint32, 1, 'C', readonly=True)", "Array(float32, 1, 'C', readonly=True)"
COVER = f"Tuple(({INDICES}, {INDICES}, {WEIGHTS}, {WEIGHTS}))"  # first, end, shares of the first and of the last
TAPS, FLOATS = "Array(float32, 2, 'C', readonly=True)", "Array(float32, 3, 'C', readonly=True)"
TOTAL = "Array(float32, 3, 'C')"
AXIS = f"Tuple(({INDICES}, {INDICES}, {WEIGHTS}))"  # both neighbors of each pixel, and the weight of the second


def _compiled(*arguments: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a function of arguments of the given types, which is compiled at its first call."""
    signature = f"void({', '.join(arguments)})"
    return lambda function: lambda *values: _machine_code(function, signature)(*values)


@functools.cache
def _machine_code(function: Callable[..., None], signature: str) -> Callable[..., None]:
    """Return a compiled function. Raises MissingLibraryError if numba is not installed."""
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    njit = require("numba").njit
    compiled: Callable[..., None]
    try:
        compiled = njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError, EOFError):  # no folder is writable, the disk is full, or a file is cut off
        compiled = njit(signature, **options)(function)
    return compiled


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
    _resize(image, (3 * left, 3 * right, across), (upper, lower, down), out)
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


@_compiled(IMAGE, AXIS, AXIS, OUT)
@no_type_check  # numba does not compile a function that checks its arguments
def _resize(image, columns, rows, out):
    """Interpolate each row along x once, and then between the rows above and below each row of the output.

    The neighbors of `columns` are three times the index of a pixel, and index a channel of a row.
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


def resize_area(image: np.ndarray, size: tuple[int, int]) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """Resize an image as TensorFlow's ResizeArea, and truncate the result.

    Each value is the mean over the part of the image that its pixel covers, in float32: the sum over the columns of a
    row, weighted by the covered share of the row, is added row by row.

    Args:
      image: the pixels, uint8 of shape (height, width, 3).
      size: height and width of the result, 1 or more.
    """
    image = _image(image, "resize")
    out = np.empty((*size, 3), np.uint8)
    (rows, row_scale), (columns, column_scale) = (_cover(*lengths) for lengths in zip(image.shape, size, strict=False))
    _average(image, columns, rows, np.float32(1) / (row_scale * column_scale), out)
    return out


@functools.lru_cache(maxsize=4096)
def _cover(length: int, new_length: int) -> tuple[Cover, np.float32]:
    """Return, for each output position of an axis, the input positions that it covers, and the scale.

    They are the first position and the end, one after the last, and the covered shares of the first and the last.
    """
    scale = np.float32(length) / np.float32(new_length)
    start, end = (np.arange(i, new_length + i, dtype=np.float32) * scale for i in range(2))
    first, last = np.floor(start), np.ceil(end) - np.float32(1)
    shares = []
    for at in (first, last):
        inside = np.where(at + 1 > end, end - at, np.float32(1))
        shares.append(np.where(at < start, np.where(at + 1 > end, scale, at + 1 - start), inside).astype(np.float32))
    return (first.astype(np.uint32), last.astype(np.uint32) + np.uint32(1), *shares), scale


@_compiled(IMAGE, COVER, COVER, "float32", OUT)
@no_type_check
def _average(image, columns, rows, scale, out):
    """Write the weighted mean of the pixels that each pixel of the output covers."""
    lefts, rights, left_shares, right_shares = columns
    tops, bottoms, top_shares, bottom_shares = rows
    last_row, last_column = np.uint32(image.shape[0] - 1), np.uint32(image.shape[1] - 1)
    one, three, width = np.uint32(1), np.uint32(3), np.uint32(out.shape[1])
    total = np.empty(out.shape[1] * 3, np.float32)
    for y in range(out.shape[0]):
        total[:] = 0
        for row in range(tops[y], bottoms[y]):
            pixels = image[min(row, last_row)].reshape(-1)
            share = np.float32(1)
            if row == tops[y]:
                share = top_shares[y]
            elif row == bottoms[y] - one:
                share = bottom_shares[y]
            for x in range(width):
                left, last = lefts[x], rights[x] - one
                for channel in range(three):
                    part = np.float32(pixels[three * min(left, last_column) + channel]) * left_shares[x]
                    for column in range(left + one, last):
                        part += np.float32(pixels[three * min(column, last_column) + channel])
                    if left < last:
                        part += np.float32(pixels[three * min(last, last_column) + channel]) * right_shares[x]
                    total[three * x + channel] += part * share
        result = out[y].reshape(-1)
        for i in range(result.size):
            result[i] = np.uint8(np.int32(total[i] * scale))


RESIZE = {"bilinear": resize_bilinear, "area": resize_area}  # by method
_resized = itertools.count()


def resize_antialiased(
    image: UInt8[np.ndarray, "height width channels"], size: tuple[int, int], method: str
) -> Float32[np.ndarray, "new_height new_width channels"]:
    """Resize an image of any channels as TensorFlow's ScaleAndTranslate with antialiasing.

    Each value is a mean of neighbors under a kernel, which is stretched to the width of a pixel of the result if that
    is the larger one. The weighted rows are added first, then the weighted columns, in float32.

    Args:
      image: the pixels.
      size: height and width of the result.
      method: one of `ANTIALIASED`. Values of "bicubic" may be outside of [0, 255].
    """
    if image.shape[:2] == size:
        return image.astype(np.float32)
    (tops, down), (lefts, across) = (_taps(*lengths, method) for lengths in zip(image.shape, size, strict=False))
    rows = np.zeros((size[0], *image.shape[1:]), np.float32)
    out = np.zeros((*size, image.shape[2]), np.float32)
    few = image.size <= FEW_VALUES and next(_resized) < BEFORE_NUMBA
    if few or importlib.util.find_spec("numba") is None:
        _add_taps(image, tops, down, rows)
        _add_taps(rows.swapaxes(0, 1), lefts, across, out.swapaxes(0, 1))
        return out
    _add_rows(np.ascontiguousarray(image), tops, down, rows)
    _add_columns(rows, lefts, across, out)
    return out


def _add_taps(
    image: np.ndarray, starts: UInt32[np.ndarray, "n"], weights: Float32[np.ndarray, "n taps"], out: np.ndarray
) -> None:
    """Add the weighted rows of the image, from the start of each row of the output, to this row; as `_add_rows`."""
    for tap, weight in enumerate(weights.T):
        inside = starts + tap < len(image)
        out[inside] += image[starts[inside] + tap] * weight[inside][:, None, None]


def _cubic(x: np.ndarray) -> np.ndarray:
    """Return the values of the cubic kernel with a = -1/2 (Keys, 1981) at distances x of 0 or more."""
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x >= 2, 0, np.where(x >= 1, far, near))


# Radius and values of the kernel, by method.
ANTIALIASED: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "bilinear": (1, lambda x: np.maximum(1 - x, 0)),
    "bicubic": (2, _cubic),
}


@functools.lru_cache(maxsize=512)
def _taps(
    length: int, new_length: int, method: str
) -> tuple[UInt32[np.ndarray, "new_length"], Float32[np.ndarray, "new_length taps"]]:
    """Return, for each output position of an axis, its first input position, and the weights of it and the next."""
    (radius, values), one, half = ANTIALIASED[method], np.float32(1), np.float32(0.5)
    scale = one / (np.float32(new_length) / np.float32(length))  # as TensorFlow rounds it
    stretch = max(scale, one)
    reach = np.float32(radius) * stretch
    center = (np.arange(new_length, dtype=np.float32) + half) * scale
    first = np.clip(np.ceil(center - reach - half).astype(np.int64), 0, length - 1)
    last = np.clip(np.floor(center + reach - half).astype(np.int64), 0, length - 1)
    weights = np.zeros((new_length, min(2 * int(np.ceil(reach)) + 1, length)), np.float32)
    for i in range(weights.shape[1]):
        distance = np.abs((first + i).astype(np.float32) + half - center) * (one / stretch)
        weights[:, i] = np.where(first + i <= last, values(distance), 0)
    total = functools.reduce(np.add, weights.T)  # one after the other
    return first.astype(np.uint32), weights * (one / total)[:, None]


@_compiled(IMAGE, INDICES, TAPS, TOTAL)
@no_type_check
def _add_rows(image, starts, weights, out):
    """Add the weighted rows of the image, from the start of each row of the output, to this row."""
    for y in range(out.shape[0]):
        total = out[y].reshape(-1)
        for tap in range(min(weights.shape[1], image.shape[0] - np.int64(starts[y]))):
            weight, pixels = weights[y, tap], image[np.int64(starts[y]) + tap].reshape(-1)
            for i in range(total.size):
                total[i] += np.float32(pixels[i]) * weight


@_compiled(FLOATS, INDICES, TAPS, TOTAL)
@no_type_check
def _add_columns(rows, starts, weights, out):
    """Add the weighted columns of `rows`, from the start of each column of the output, to this column."""
    channels = np.uint32(out.shape[2])
    for y in range(out.shape[0]):
        pixels, total = rows[y].reshape(-1), out[y].reshape(-1)
        for x in range(np.uint32(out.shape[1])):
            for tap in range(np.uint32(min(weights.shape[1], rows.shape[1] - np.int64(starts[x])))):
                weight, at = weights[x, tap], channels * (starts[x] + tap)
                for channel in range(channels):
                    total[channels * x + channel] += pixels[at + channel] * weight


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
    _move(image, np.ascontiguousarray(sources), np.uint8(outside), out)
    return out


@_compiled(IMAGE, SOURCES, "uint8", OUT)
@no_type_check
def _move(image, sources, outside, out):
    """Write the source of each pixel, or `outside` if its index is not in the image."""
    values, indices, result = image.reshape(-1), sources.reshape(-1), out.reshape(-1)
    pixels = np.uint32(indices.size)
    for i in range(indices.size):
        index = indices[i]
        for channel in range(3):
            result[3 * i + channel] = values[3 * np.int64(index) + channel] if index < pixels else outside


def sharpen(image: np.ndarray, factor: float) -> Pixels:
    """Interpolate between a smoothed image (factor 0) and the image (factor 1), or extrapolate.

    The smoothed image is the mean over 3 × 3 pixels in which the center counts five times; the outermost pixels are
    not smoothed. The terms are added in float32 row by row, as in TensorFlow's own convolution. TensorFlow with oneDNN
    rounds differently: about 4 in 1,000 smoothed values differ by 1.
    """
    image = _image(image, "sharpen")
    out = image.copy()
    _sharpen(image, np.float32(factor), out)
    return out


@_compiled(IMAGE, "float32", OUT)
@no_type_check
def _sharpen(image, factor, out):
    """Interpolate each value that is not at the border from the weighted mean of 3 × 3 values, added row by row."""
    once, five = np.float32(1) / np.float32(13), np.float32(5) / np.float32(13)
    size = max(3 * image.shape[1] - 6, 0)  # values of a row without the border
    mean = np.empty(size, np.float32)
    for y in range(1, image.shape[0] - 1):
        mean[:] = 0
        for neighbor in range(3):
            row = image[y - 1 + neighbor].reshape(-1)
            left, middle, right = row[:-6], row[3:-3], row[6:]  # slices, because offsets could be negative indices
            center = five if neighbor == 1 else once
            for i in range(size):
                partial = mean[i] + np.float32(left[i]) * once
                mean[i] = partial + np.float32(middle[i]) * center + np.float32(right[i]) * once
        row, result = image[y].reshape(-1)[3:-3], out[y].reshape(-1)[3:-3]
        for i in range(size):
            smooth = np.float32(np.int32(mean[i]))
            mixed = (np.float32(row[i]) - smooth) * factor + smooth
            result[i] = np.uint8(np.int32(min(max(mixed, np.float32(0)), np.float32(255))))


def _image(image: np.ndarray, name: str) -> Pixels:
    """Return an image as a contiguous array. Raises InputError unless it is uint8 RGB with at least one pixel."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise InputError(f"{name}: expected 3 channels of uint8, got shape {image.shape} of {image.dtype}")
    if not 0 < image.size < MOST_VALUES:
        raise InputError(f"{name}: expected 1 to 2**32 / 3 pixels, got shape {image.shape}")
    return np.ascontiguousarray(image)
