"""Preprocessing ops: each function takes the arguments in a preprocessing string and returns the op.

An op is a function of an example (a dict) and the example's random number generator, and returns the changed example.
Images are uint8 arrays of shape (height, width, channels) until `value_range` converts them to float32.

Ops with the name of a big_vision op have the same arguments, defaults and pixels, with two exceptions: the default keys
of `onehot`, and the additional argument `exif`.
"""

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from input_pipeline.errors import InputError, nearest
from input_pipeline.images import decode as decoding
from input_pipeline.images.limits import jpeg_size
from input_pipeline.preprocess.randaug import randaug as augment
from input_pipeline.source import Example

__all__ = [
    "central_crop", "decode", "decode_jpeg_and_inception_crop", "flip_lr", "inception_crop", "keep", "onehot",
    "pad", "randaug", "random_crop", "resize", "resize_pillow", "resize_small", "value_range",
]  # fmt: skip

Op = Callable[[Example, np.random.Generator], Example]
MAX_LAYERS = 100  # of randaug


def decode(channels: int = 3, precise: bool = False, exif: bool = False) -> Op:
    """Decode `image` from the bytes of a JPEG, PNG, WebP, BMP, GIF or TIFF file.

    Args:
      channels: 1 for gray or 3 for RGB.
      precise: decode JPEGs with Pillow instead of TensorFlow; slower, but TensorFlow need not be installed.
      exif: rotate and mirror images as their EXIF orientation says.
    """
    if channels not in (1, 3):
        raise InputError(f"decode(channels={channels}): expected 1 or 3")
    return _image_op(lambda data, rng: decoding.decode(_encoded(data), channels, precise=precise, exif=exif))


def decode_jpeg_and_inception_crop(
    size: int | Sequence[int] | None = None,
    area_min: float = 5,
    area_max: float = 100,
    ratio_min: float = 0.75,
    ratio_max: float = 1.33,
    method: str = "bilinear",
    antialias: bool = False,
    exif: bool = False,
) -> Op:
    """Decode a random crop of `image` and resize it, without decoding more of a JPEG than the crop needs.

    Equivalent to `decode|inception_crop(…)`. Formats other than JPEG are decoded completely.

    Args:
      size: height and width of the result, or one number for both; by default the crop is not resized.
      area_min: minimum area of the crop in percent of the image.
      area_max: maximum area of the crop in percent of the image.
      ratio_min: minimum width / height of the crop.
      ratio_max: maximum width / height of the crop.
      method: interpolation method, as for `resize`.
      antialias: antialias when the image becomes smaller.
      exif: rotate and mirror images as their EXIF orientation says.
    """
    sample, fit = _inception_crop(size, (area_min, area_max), (ratio_min, ratio_max), method, antialias)

    def change(data: object, rng: np.random.Generator) -> np.ndarray:
        encoded = _encoded(data)
        if decoding.is_jpeg(encoded):
            return fit(decoding.decode_crop(encoded, sample(jpeg_size(encoded), rng), exif=exif))
        image = decoding.decode(encoded, exif=exif)
        return fit(_crop(image, sample((image.shape[0], image.shape[1]), rng)))

    return _image_op(change)


def inception_crop(
    size: int | Sequence[int] | None = None,
    area_min: float = 5,
    area_max: float = 100,
    method: str = "bilinear",
    antialias: bool = False,
) -> Op:
    """Cut a random window of aspect ratio 0.75 to 1.33 (Szegedy et al., 2015) and resize it.

    Args:
      size: height and width of the result, or one number for both; by default the crop is not resized.
      area_min: minimum area of the crop in percent of the image.
      area_max: maximum area of the crop in percent of the image.
      method: interpolation method, as for `resize`.
      antialias: antialias when the image becomes smaller.
    """
    sample, fit = _inception_crop(size, (area_min, area_max), (0.75, 1.33), method, antialias)
    return _image_op(lambda image, rng: fit(_crop(image, sample(image.shape[:2], rng))))


def resize(size: int | Sequence[int], method: str = "bilinear", antialias: bool = False) -> Op:
    """Resize to a fixed size with `tf.image.resize`, without keeping the aspect ratio.

    Args:
      size: height and width of the result, or one number for both.
      method: "bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian" or "mitchellcubic".
      antialias: antialias when the image becomes smaller.
    """
    target = _checked_size("resize", size)
    _check_method("resize", method)
    return _image_op(lambda image, rng: decoding.resize(image, target, method, antialias))


def resize_small(smaller_size: int, method: str = "area", antialias: bool = False) -> Op:
    """Resize so that the smaller side has a given length, and keep the aspect ratio.

    Args:
      smaller_size: length of the smaller side in pixels.
      method: interpolation method, as for `resize`.
      antialias: antialias when the image becomes smaller.
    """
    _checked_size("resize_small", smaller_size)
    _check_method("resize_small", method)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        factor = np.float32(smaller_size) / np.float32(min(image.shape[:2]))
        height, width = (int(np.round(np.float32(side) * factor)) for side in image.shape[:2])
        return decoding.resize(image, (height, width), method, antialias)

    return _image_op(change)


def resize_pillow(size: int | Sequence[int]) -> Op:
    """Resize to a fixed size with Pillow's antialiased bilinear filter; TensorFlow need not be installed.

    Args:
      size: height and width of the result, or one number for both.
    """
    height, width = _checked_size("resize_pillow", size)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        channels = [
            np.asarray(Image.fromarray(image[..., c]).resize((width, height), Image.Resampling.BILINEAR))
            for c in range(image.shape[-1])
        ]
        return np.stack(channels, axis=-1)

    return _image_op(change)


def central_crop(crop_size: int | Sequence[int] | None = None) -> Op:
    """Cut a window from the center of the image.

    Args:
      crop_size: height and width of the window, or one number for both; by default the largest square.
    """
    size = None if crop_size is None else _checked_size("central_crop", crop_size)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        height, width = size or (min(image.shape[:2]),) * 2
        top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
        return _crop(image, (top, left, height, width), "central_crop")

    return _image_op(change)


def random_crop(crop_size: int | Sequence[int]) -> Op:
    """Cut a window at a uniformly random position.

    Args:
      crop_size: height and width of the window, or one number for both.
    """
    height, width = _checked_size("random_crop", crop_size)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        top, left = (int(rng.integers(max(0, room) + 1)) for room in (image.shape[0] - height, image.shape[1] - width))
        return _crop(image, (top, left, height, width), "random_crop")

    return _image_op(change)


def pad(border: int, value: int = 0) -> Op:
    """Add a border of constant pixels on every side.

    Args:
      border: width of the border in pixels.
      value: value of the border's pixels in every channel, 0 to 255.
    """
    if not (0 <= border <= 10_000 and 0 <= value <= 255):
        raise InputError(f"pad({border}, {value}): expected a border of 0 to 10,000 pixels of value 0 to 255")
    widths = ((border, border), (border, border), (0, 0))
    return _image_op(lambda image, rng: np.pad(image, widths, constant_values=value))


def flip_lr() -> Op:
    """Mirror the image left to right with probability one half."""

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if rng.random() >= 0.5:
            return image
        flipped = np.empty_like(image)
        for channel in range(image.shape[2]):  # copying a reversed view of all channels is several times slower
            flipped[..., channel] = image[:, ::-1, channel]
        return flipped

    return _image_op(change)


def randaug(num_layers: int = 2, magnitude: float = 10) -> Op:
    """Apply RandAugment (Cubuk et al., 2019): a sequence of random ops.

    Args:
      num_layers: number of ops, each drawn uniformly from the 16 ops of `input_pipeline.preprocess.randaug`.
      magnitude: strength of each op, 0 to 30.
    """
    if not 0 <= num_layers <= MAX_LAYERS or not 0 <= magnitude <= 30:
        raise InputError(f"randaug({num_layers}, {magnitude}): expected 0 to {MAX_LAYERS} layers of magnitude 0 to 30")
    return _image_op(lambda image, rng: augment(image, rng, num_layers, magnitude))


def value_range(
    vmin: float = -1, vmax: float = 1, in_min: float = 0, in_max: float = 255, clip_values: bool = False
) -> Op:
    """Map pixel values linearly from [in_min, in_max] to [vmin, vmax] and convert them to float32.

    Args:
      vmin: result for `in_min`.
      vmax: result for `in_max`.
      in_min: lower end of the input range.
      in_max: upper end of the input range.
      clip_values: clip the result to [vmin, vmax].
    """
    if in_min >= in_max:
        raise InputError(f"value_range: in_min={in_min} should be below in_max={in_max}")

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        scaled = np.array(image, np.float32, order="C")
        scaled -= np.float32(in_min)
        scaled /= np.float32(in_max - in_min)
        scaled *= np.float32(vmax - vmin)
        scaled += np.float32(vmin)
        return np.clip(scaled, vmin, vmax, out=scaled) if clip_values else scaled

    return _image_op(change)


def onehot(depth: int, key: str = "label", key_result: str = "labels") -> Op:
    """Convert one or several integer labels to a float32 vector with 1 at each label and 0 elsewhere.

    Args:
      depth: length of the vector, the number of classes.
      key: key of the label or labels.
      key_result: key of the result.
    """
    if depth < 1:
        raise InputError(f"onehot({depth}): expected 1 class or more")

    def op(example: Example, rng: np.random.Generator) -> Example:
        hot, labels = np.zeros(depth, np.float32), np.atleast_1d(example[key])
        if labels.size:
            if labels.ndim > 1 or labels.dtype.kind not in "iu":
                raise InputError(f"onehot({depth}): {key} should be an integer or several, found {labels.dtype}")
            if labels.min() < 0 or labels.max() >= depth:
                raise InputError(f"onehot({depth}): {key}={str(example[key])[:40]} is out of range")
            hot[labels] = 1
        return {**example, key_result: hot}

    return op


def keep(*keys: str) -> Op:
    """Drop everything except some keys.

    Args:
      *keys: the keys to keep.
    """

    def op(example: Example, rng: np.random.Generator) -> Example:
        return {key: example[key] for key in keys}

    return op


def _image_op(change: Callable[..., np.ndarray]) -> Op:
    """Return the op that applies `change(image, rng)` to `image` and keeps the other keys of an example."""

    def op(example: Example, rng: np.random.Generator) -> Example:
        return {**example, "image": change(example["image"], rng)}

    return op


def _encoded(data: object) -> bytes:
    """Return the bytes of an image file. Raises InputError if the image is already decoded."""
    if not isinstance(data, bytes):
        raise InputError(f"decode takes the bytes of an image file, not {type(data).__name__}: it is decoded already")
    return data


def _checked_size(op: str, size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) from one number or two. Raises InputError if a side is not 1 to 100,000."""
    both = (size, size) if isinstance(size, int) else tuple(size)
    if len(both) != 2 or not all(1 <= side <= 100_000 for side in both):
        raise InputError(f"{op}: a size of {size} pixels; expected one number or (height, width), 1 or more")
    return both[0], both[1]


def _check_method(op: str, method: str) -> None:
    """Raise InputError if an interpolation method is unknown."""
    if method not in decoding.METHODS:
        raise InputError(f"{op}: unknown method {method!r}; {nearest(method, decoding.METHODS)}")


def _inception_crop(
    size: int | Sequence[int] | None,
    percent: tuple[float, float],
    ratio: tuple[float, float],
    method: str,
    antialias: bool,
) -> tuple[
    Callable[[tuple[int, int], np.random.Generator], decoding.Window],
    Callable[[np.ndarray], np.ndarray],
]:
    """Return the two steps of an Inception crop: sampling a window for an image size, and resizing the crop."""
    if not (0 < percent[0] <= percent[1] <= 100 and 0 < ratio[0] <= ratio[1]):
        raise InputError(f"inception crop: percent of area {percent} and aspect ratios {ratio}; expected min <= max")
    _check_method("inception crop", method)
    target = None if size is None else _checked_size("inception crop", size)
    area = (percent[0] / 100, percent[1] / 100)

    def sample(shape: tuple[int, int], rng: np.random.Generator) -> decoding.Window:
        return decoding.sample_window(shape, area, ratio, rng)

    def fit(crop: np.ndarray) -> np.ndarray:
        return crop if target is None else decoding.resize(crop, target, method, antialias)

    return sample, fit


def _crop(image: np.ndarray, window: decoding.Window, op: str = "crop") -> np.ndarray:
    """Return the pixels of a window. Raises InputError if the image is smaller than the window."""
    top, left, height, width = window
    if image.shape[0] < height or image.shape[1] < width:
        raise InputError(f"{op}{height, width}: the image is only {image.shape[0]}x{image.shape[1]}")
    return image[top : top + height, left : left + width]
