"""Loops over the pixels of RGB images, compiled by numba; `input_pipeline.images.kernels` calls them.

Numba compiles the loops when this module is imported for the first time, which takes some seconds, and stores the
machine code beside this file or in the user's cache folder, if one can be written. The loops do not hold Python's lock
and do not check bounds. Floating-point operations are neither reordered nor fused.
"""

from collections.abc import Callable
from typing import no_type_check

import numpy as np
from numba import njit, types

IMAGE = types.Array(types.uint8, 3, "C", readonly=True)  # a writable array is accepted, too
TABLES = types.Array(types.uint8, 2, "C", readonly=True)
INDICES = types.Array(types.uint32, 1, "C", readonly=True)
SOURCES = types.Array(types.uint32, 2, "C", readonly=True)
WEIGHTS = types.Array(types.float32, 1, "C", readonly=True)
# The neighbors of each pixel of an output, and the weight of the second one.
AXIS = types.Tuple((INDICES, INDICES, WEIGHTS))  # type: ignore[no-untyped-call]
OUT = types.Array(types.uint8, 3, "C")
COUNTS = types.Array(types.int64, 2, "C")


def _compiled(*arguments: types.Type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that compiles a function with arguments of the given types, without a result."""

    def compile_(function: Callable[..., None]) -> Callable[..., None]:
        def compiled(cache: bool) -> Callable[..., None]:
            jit = njit(types.void(*arguments), cache=cache, nogil=True, error_model="numpy", boundscheck=False)
            return jit(function)

        try:
            return compiled(cache=True)
        except (RuntimeError, OSError, EOFError):  # no folder is writable, the disk is full, or a file is cut off
            return compiled(cache=False)

    return compile_


@_compiled(IMAGE, AXIS, AXIS, OUT)
@no_type_check  # numba does not compile a function that checks its arguments
def resize(image, columns, rows, out):
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


@_compiled(IMAGE, TABLES, OUT)
@no_type_check
def lookup(image, tables, out):
    """Write the value in each channel's table for each value of the image."""
    red, green, blue = tables[0], tables[1], tables[2]
    values, result = image.reshape(-1), out.reshape(-1)
    for i in range(0, values.size, 3):
        result[i] = red[values[i]]
        result[i + 1] = green[values[i + 1]]
        result[i + 2] = blue[values[i + 2]]


@_compiled(IMAGE, COUNTS)
@no_type_check
def count(image, counts):
    """Count the values of each channel."""
    red, green, blue = counts[0], counts[1], counts[2]
    values = image.reshape(-1)
    for i in range(0, values.size, 3):
        red[values[i]] += 1
        green[values[i + 1]] += 1
        blue[values[i + 2]] += 1


@_compiled(IMAGE, SOURCES, types.uint8, OUT)
@no_type_check
def move(image, sources, outside, out):
    """Write the source of each pixel, or `outside` if its index is not in the image."""
    values, indices, result = image.reshape(-1), sources.reshape(-1), out.reshape(-1)
    pixels = np.uint32(indices.size)
    for i in range(indices.size):
        index = indices[i]
        for channel in range(3):
            result[3 * i + channel] = values[3 * np.int64(index) + channel] if index < pixels else outside


@_compiled(IMAGE, types.float32, OUT)
@no_type_check
def color(image, factor, out):
    """Interpolate each channel from the pixel's gray value."""
    values, result = image.reshape(-1), out.reshape(-1)
    unit = np.float32(1 / 255)
    for i in range(0, values.size, 3):
        red = np.float32(values[i]) * unit * np.float32(0.2989)
        green = np.float32(values[i + 1]) * unit * np.float32(0.587)
        blue = np.float32(values[i + 2]) * unit * np.float32(0.114)
        gray = np.float32(np.int32((red + green + blue) * np.float32(255.5)))
        for channel in range(3):
            mixed = (np.float32(values[i + channel]) - gray) * factor + gray
            result[i + channel] = np.uint8(np.int32(min(max(mixed, np.float32(0)), np.float32(255))))


@_compiled(IMAGE, types.float32, OUT)
@no_type_check
def sharpen(image, factor, out):
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
