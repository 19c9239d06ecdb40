"""RandAugment (Cubuk et al., 2019, https://arxiv.org/abs/1909.13719) in numpy.

Ops, magnitudes and pixels equal those of big_vision's TensorFlow code, including its peculiarities: magnitudes above 10
are allowed, and numbers that exceed the range of uint8 wrap around or are clipped as in TensorFlow (see `solarize` and
`posterize`). Images are uint8 arrays of shape (height, width, 3) and are never changed in place. Pixels that an op
moves in from outside the image are gray, with value 128.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from input_pipeline.errors import ReadingError
from input_pipeline.images import kernels
from input_pipeline.images.kernels import sharpen as sharpness
from input_pipeline.optional import Late

if TYPE_CHECKING:
    from PIL import Image, ImageOps
else:
    Image, ImageOps = Late("PIL.Image"), Late("PIL.ImageOps")

GREY = 128
LEVELS = np.arange(256, dtype=np.uint8)
CACHED_PIXELS = 2**20  # the geometry of larger images is not cached, so that the cache stays below 128 MiB

Pixels = UInt8[np.ndarray, "height width 3"]


def randaug(image: np.ndarray, rng: np.random.Generator, num_layers: int, magnitude: float) -> np.ndarray:
    """Apply random ops to an image.

    Args:
      image: uint8 of shape (height, width, 3).
      rng: random number generator.
      num_layers: number of ops, each drawn uniformly from `OPS`.
      magnitude: strength of each op, usually 5 to 30; 10 in big_vision.

    Raises:
      ReadingError: the image has another shape or dtype.
    """
    rgb(image, "randaug")
    ops = tuple(OPS.values())
    for _ in range(num_layers):
        image = ops[rng.integers(len(ops))](image, magnitude, rng)
    return image


def rgb(image: np.ndarray, op: str) -> Pixels:
    """Return the image. Raises ReadingError, which names the op, if it is not uint8 of shape (height, width, 3)."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ReadingError(f"{op}: expected 3 channels of uint8, got shape {image.shape} of {image.dtype}")
    return image


def autocontrast(image: Pixels) -> Pixels:
    """Stretch each channel linearly so that its values span 0 to 255; a constant channel does not change."""
    result = image.copy()
    for channel, (low, high) in enumerate(zip(image.min(0).min(0), image.max(0).max(0), strict=True)):
        if low < high:
            scale = np.float32(255) / (np.float32(high) - np.float32(low))
            table = np.clip(LEVELS * scale + -np.float32(low) * scale, 0, 255).astype(np.uint8)
            result[..., channel] = np.take(table, image[..., channel])
    return result


def equalize(image: Pixels) -> Pixels:
    """Make the cumulative histogram of each channel approximately linear, with Pillow."""
    return np.asarray(ImageOps.equalize(Image.fromarray(image)))


def invert(image: Pixels) -> Pixels:
    """Replace each value v by 255 - v."""
    return np.uint8(255) - image


def posterize(image: Pixels, bits: int) -> Pixels:
    """Keep the upper `bits` bits of each value, 1 to 8.

    TensorFlow converts the shift 8 - bits to uint8 and clips it to 7. Therefore 0 bits, and more than 8 bits, keep one
    bit.
    """
    return image & np.uint8(0xFF << min((8 - bits) % 256, 7) & 0xFF)


def solarize(image: Pixels, threshold: int) -> Pixels:
    """Invert the values that are not below `threshold`.

    TensorFlow converts the threshold to uint8. Therefore 256, the threshold at magnitude 10, becomes 0 and inverts the
    whole image.
    """
    return _lookup(image, np.where(threshold % 256 > LEVELS, LEVELS, 255 - LEVELS))


def solarize_add(image: Pixels, addition: int) -> Pixels:
    """Add `addition` to the values below 128 and clip the sums to 0 … 255."""
    added = np.clip(LEVELS.astype(np.int64) + addition, 0, 255).astype(np.uint8)
    return _lookup(image, np.where(LEVELS < 128, added, LEVELS))


def contrast(image: Pixels, factor: float) -> Pixels:
    """Interpolate between a constant (factor 0) and the image (factor 1), or extrapolate.

    The constant should be the mean gray value. big_vision computes the mean of the histogram's 256 counts instead:
    min(255, height · width // 256), which is 196 for 224 × 224 pixels.
    """
    constant = min(image.shape[0] * image.shape[1] // 256, 255)
    return _lookup(image, _blend(np.float32(constant), LEVELS, factor))


def brightness(image: Pixels, factor: float) -> Pixels:
    """Interpolate between black (factor 0) and the image (factor 1), or extrapolate."""
    return _lookup(image, _blend(np.float32(0), LEVELS, factor))


def color(image: Pixels, factor: float) -> Pixels:
    """Interpolate between the gray image (factor 0) and the image (factor 1), or extrapolate.

    Gray equals `tf.image.rgb_to_grayscale`, 0.2989 R + 0.587 G + 0.114 B in float32, for all 2²⁴ colors.
    """
    weights = map(np.float32, (0.2989, 0.587, 0.114))
    red, green, blue = (image[..., c] * np.float32(1 / 255) * weight for c, weight in enumerate(weights))
    gray = np.trunc((red + green + blue) * np.float32(255.5))
    return _blend(gray[..., None], image, factor)


def rotate(image: Pixels, degrees: float) -> Pixels:
    """Rotate about the center, counterclockwise for positive `degrees`."""
    radians = float(np.float32(degrees) * np.float32(math.pi / 180))
    cos, sin = np.float32(math.cos(radians)), np.float32(math.sin(radians))
    bottom, right = (np.float32(side - 1) for side in image.shape[:2])
    x = (right - (cos * right - sin * bottom)) / 2
    y = (bottom - (sin * right + cos * bottom)) / 2
    return _transform(image, *map(float, (cos, -sin, x, sin, cos, y)))


def shear_x(image: Pixels, level: float) -> Pixels:
    """Move row y to the left by level · y pixels."""
    return _transform(image, 1, level, 0, 0, 1, 0)


def shear_y(image: Pixels, level: float) -> Pixels:
    """Move column x up by level · x pixels."""
    return _transform(image, 1, 0, 0, level, 1, 0)


def translate_x(image: Pixels, pixels: float) -> Pixels:
    """Move the image to the left by `pixels`."""
    return _transform(image, 1, 0, pixels, 0, 1, 0)


def translate_y(image: Pixels, pixels: float) -> Pixels:
    """Move the image up by `pixels`."""
    return _transform(image, 1, 0, 0, 0, 1, pixels)


def cutout(image: Pixels, half: int, row: int, column: int) -> Pixels:
    """Make a square gray (DeVries & Taylor, 2017), as far as it is inside the image.

    The square has 2 · half pixels a side, and its center is at `row` and `column`.
    """
    image = image.copy()
    image[max(0, row - half) : row + half, max(0, column - half) : column + half] = GREY
    return image


def _random_cutout(image: np.ndarray, half: int, rng: np.random.Generator) -> np.ndarray:
    """Apply `cutout` at a uniformly random position."""
    row, column = (int(rng.integers(side)) for side in image.shape[:2])
    return cutout(image, half, row, column)


def signed(value: float, rng: np.random.Generator) -> float:
    """Return the value or its negative, each with probability one half."""
    return value if rng.random() < 0.5 else -value


def _factor(magnitude: float) -> float:
    """Return the factor of an interpolation; magnitude 5 gives 1, the unchanged image."""
    return magnitude / 10 * 1.8 + 0.1


OPS: dict[str, Callable[[np.ndarray, float, np.random.Generator], np.ndarray]] = {
    "AutoContrast": lambda image, magnitude, rng: autocontrast(image),
    "Equalize": lambda image, magnitude, rng: equalize(image),
    "Invert": lambda image, magnitude, rng: invert(image),
    "Rotate": lambda image, magnitude, rng: rotate(image, signed(magnitude / 10 * 30, rng)),
    "Posterize": lambda image, magnitude, rng: posterize(image, int(magnitude / 10 * 4)),
    "Solarize": lambda image, magnitude, rng: solarize(image, int(magnitude / 10 * 256)),
    "Color": lambda image, magnitude, rng: color(image, _factor(magnitude)),
    "Contrast": lambda image, magnitude, rng: contrast(image, _factor(magnitude)),
    "Brightness": lambda image, magnitude, rng: brightness(image, _factor(magnitude)),
    "Sharpness": lambda image, magnitude, rng: sharpness(image, _factor(magnitude)),
    "ShearX": lambda image, magnitude, rng: shear_x(image, signed(magnitude / 10 * 0.3, rng)),
    "ShearY": lambda image, magnitude, rng: shear_y(image, signed(magnitude / 10 * 0.3, rng)),
    "TranslateX": lambda image, magnitude, rng: translate_x(image, signed(magnitude / 10 * 100, rng)),
    "TranslateY": lambda image, magnitude, rng: translate_y(image, signed(magnitude / 10 * 100, rng)),
    "Cutout": lambda image, magnitude, rng: _random_cutout(image, int(magnitude / 10 * 40), rng),
    "SolarizeAdd": lambda image, magnitude, rng: solarize_add(image, int(magnitude / 10 * 110)),
}


def _lookup(image: Pixels, table: np.ndarray) -> Pixels:
    """Replace each value v by table[v]."""
    return np.take(table, image)


def _blend(start: np.ndarray | np.float32, end: np.ndarray, factor: float) -> np.ndarray:
    """Return start + factor · (end - start), computed in float32, clipped to 0 … 255 and truncated to integers."""
    mixed = end - start
    mixed *= np.float32(factor)
    mixed += start
    return np.clip(mixed, 0, 255, out=mixed).astype(np.uint8)


def _transform(image: np.ndarray, *coefficients: float) -> np.ndarray:
    """Return an image after an affine transform.

    Pixel (x, y) of the result is the pixel of the image nearest to (a0 x + a1 y + a2, b0 x + b1 y + b2), or gray if
    that position is outside the image. The coefficients are a0, a1, a2, b0, b1, b2.
    """
    height, width = image.shape[:2]
    sources = _cached_sources if height * width <= CACHED_PIXELS else _sources
    return kernels.move(image, sources(height, width, coefficients), GREY)


def _sources(height: int, width: int, coefficients: tuple[float, ...]) -> np.ndarray:
    """Return the index in the image of each pixel of `_transform`'s result, or height · width for positions outside.

    The arithmetic is that of TensorFlow's ImageProjectiveTransformV3: float32, and halves are rounded away from zero.
    """
    y, x = np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)
    across, down = (
        (np.float32(a) * x + np.float32(b) * y + np.float32(c)).astype(np.float64)  # adding 0.5 must be exact
        for a, b, c in (coefficients[:3], coefficients[3:])
    )
    inside = (across > -0.5) & (across < width - 0.5) & (down > -0.5) & (down < height - 0.5)
    index = np.floor(down + 0.5) * width + np.floor(across + 0.5)
    sources = np.where(inside, index, height * width).astype(np.uint32)
    sources.setflags(write=False)
    return sources


_cached_sources = functools.lru_cache(maxsize=16)(_sources)  # one image size at one magnitude needs 10 entries
