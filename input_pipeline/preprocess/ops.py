"""Preprocessing ops: each function takes the arguments in a preprocessing string and returns the op.

An op is a function of an example (a dict) and the example's random number generator, and returns the changed example.
Images are arrays of shape (height, width, channels), uint8 unless `decode` has another dtype, until `value_range`
converts them to float32. The ops of this module change one value, by default `image`; see `Change`. Those that change
colors are in `augmentations`.

Ops with the name of a big_vision op have the same arguments, defaults and pixels, with three exceptions: the default
keys of `onehot`, its error about a label that is out of range, and the additional arguments `exif` and `dtype`.
"""

from collections.abc import Callable, Sequence

import numpy as np

from input_pipeline.errors import InputError, ReadingError, nearest
from input_pipeline.images import decode as decoding
from input_pipeline.images import stored
from input_pipeline.preprocess.augmentations import augmix, color_jitter, randaug, three_augment
from input_pipeline.preprocess.keys import Change, copy, drop, keep, onehot
from input_pipeline.preprocess.patches import patches

__all__ = [
    "augmix", "central_crop", "color_jitter", "copy", "decode", "decode_jpeg_and_inception_crop", "drop", "flip_lr",
    "inception_crop", "keep", "onehot", "pad", "patches", "randaug", "random_crop", "resize", "resize_long",
    "resize_pillow", "resize_small", "three_augment", "value_range", "vgg_value_range",
]  # fmt: skip

# Mean and standard deviation of ImageNet's channels in [0, 255], for models trained with them (Simonyan et al., 2015).
VGG_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
VGG_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)


def decode(channels: int = 3, precise: bool = False, exif: bool = False, dtype: str = "uint8") -> Change:
    """Decode `image` from the bytes of a JPEG, PNG, WebP, AVIF, BMP, GIF, TIFF or `.npy` file.

    As uint8 of 1 or 3 channels, every image is converted to gray or RGB, except a `.npy` file and a TIFF of several
    gray channels. Otherwise values are those of the file, which must have `channels`: see
    `input_pipeline.images.stored`.

    Args:
      channels: 1 for gray, 3 for RGB, or the number of channels of the files.
      precise: decode JPEGs with Pillow, whose cosine transform is more accurate and slower.
      exif: rotate and mirror images as their EXIF orientation says.
      dtype: "uint8", "uint16", "int16" or "float32".
    """
    if channels < 1:
        raise InputError(f"decode(channels={channels}): expected 1 or more")
    if dtype not in stored.DTYPES:
        raise InputError(f"decode(dtype={dtype!r}); {nearest(dtype, stored.DTYPES)}")
    converts = channels in (1, 3) and dtype == "uint8"

    def change(data: bytes, rng: np.random.Generator) -> np.ndarray:
        if converts and not stored.is_array(data) and not decoding.loses_channels(data):
            return decoding.decode(data, channels, precise=precise, exif=exif)
        return stored.decode(data, channels, dtype, exif=exif)

    return Change(change, encoded=True)


def decode_jpeg_and_inception_crop(
    size: int | Sequence[int] | None = None,
    area_min: float = 5,
    area_max: float = 100,
    ratio_min: float = 0.75,
    ratio_max: float = 1.33,
    method: str = "bilinear",
    antialias: bool = False,
    exif: bool = False,
) -> Change:
    """Decode a random crop of `image` and resize it, without decoding more of a JPEG than the crop needs.

    TensorFlow decodes the crop, as in big_vision. Equal to `decode|inception_crop(…)` for JPEGs without subsampled
    colors (4:4:4). Of others (4:2:0, 4:2:2), libjpeg interpolates colors without the pixels outside of the crop: in the
    columns at its left and right edge, by up to 16 levels on 0.1 % of the pixels of a photograph. Formats other than
    JPEG are decoded completely, except `.npy` files, which need `decode|inception_crop(…)`.

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

    def change(data: bytes, rng: np.random.Generator) -> np.ndarray:
        if decoding.is_jpeg(data):
            return fit(decoding.decode_crop(data, sample(decoding.jpeg_size(data), rng), exif=exif))
        if stored.is_array(data) or decoding.loses_channels(data):
            kinds = "no .npy file, and no TIFF of several gray channels"
            raise InputError(f"decode_jpeg_and_inception_crop reads {kinds}: use decode(channels)|inception_crop(size)")
        image = decoding.decode(data, exif=exif)
        return fit(_crop(image, sample((image.shape[0], image.shape[1]), rng)))

    return Change(change, encoded=True)


def inception_crop(
    size: int | Sequence[int] | None = None,
    area_min: float = 5,
    area_max: float = 100,
    method: str = "bilinear",
    antialias: bool = False,
) -> Change:
    """Cut a random window of aspect ratio 0.75 to 1.33 (Szegedy et al., 2015) and resize it.

    Args:
      size: height and width of the result, or one number for both; by default the crop is not resized.
      area_min: minimum area of the crop in percent of the image.
      area_max: maximum area of the crop in percent of the image.
      method: interpolation method, as for `resize`.
      antialias: antialias when the image becomes smaller.
    """
    sample, fit = _inception_crop(size, (area_min, area_max), (0.75, 1.33), method, antialias)
    return Change(lambda image, rng: fit(_crop(image, sample(image.shape[:2], rng))))


def resize(size: int | Sequence[int], method: str = "bilinear", antialias: bool = False) -> Change:
    """Resize to a fixed size with `tf.image.resize`, without keeping the aspect ratio.

    Args:
      size: height and width of the result, or one number for both.
      method: "bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian" or "mitchellcubic".
      antialias: antialias when the image becomes smaller.
    """
    target = _checked_size("resize", size)
    _check_method("resize", method)
    return Change(lambda image, rng: decoding.resize(image, target, method, antialias))


def resize_small(smaller_size: int, method: str = "area", antialias: bool = False) -> Change:
    """Resize so that the smaller side has a given length, and keep the aspect ratio.

    Args:
      smaller_size: length of the smaller side in pixels.
      method: interpolation method, as for `resize`.
      antialias: antialias when the image becomes smaller.
    """
    return _resize_side("resize_small", min, smaller_size, method, antialias)


def resize_long(longer_size: int, method: str = "area", antialias: bool = True) -> Change:
    """Resize so that the longer side has a given length, and keep the aspect ratio.

    Args:
      longer_size: length of the longer side in pixels.
      method: interpolation method, as for `resize`.
      antialias: antialias when the image becomes smaller.
    """
    return _resize_side("resize_long", max, longer_size, method, antialias)


def resize_pillow(size: int | Sequence[int]) -> Change:
    """Resize to a fixed size with Pillow's antialiased bilinear filter; TensorFlow need not be installed.

    Args:
      size: height and width of the result, or one number for both.
    """
    target = _checked_size("resize_pillow", size)
    return Change(lambda image, rng: decoding.resize_pillow(image, target))


def central_crop(crop_size: int | Sequence[int] | None = None) -> Change:
    """Cut a window from the center of the image.

    Args:
      crop_size: height and width of the window, or one number for both; by default the largest square.
    """
    size = None if crop_size is None else _checked_size("central_crop", crop_size)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        height, width = size or (min(image.shape[:2]),) * 2
        top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
        return _crop(image, (top, left, height, width), "central_crop")

    return Change(change)


def random_crop(crop_size: int | Sequence[int]) -> Change:
    """Cut a window at a uniformly random position.

    Args:
      crop_size: height and width of the window, or one number for both.
    """
    height, width = _checked_size("random_crop", crop_size)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        top, left = (int(rng.integers(max(0, room) + 1)) for room in (image.shape[0] - height, image.shape[1] - width))
        return _crop(image, (top, left, height, width), "random_crop")

    return Change(change)


def pad(border: int, value: int = 0) -> Change:
    """Add a border of constant pixels on every side.

    Args:
      border: width of the border in pixels.
      value: value of the border's pixels in every channel, 0 to 255, or another that the image's dtype holds.
    """
    if not (0 <= border <= 10_000 and -(1 << 15) <= value < 1 << 16):
        raise InputError(f"pad({border}, {value}): expected a border of 0 to 10,000 pixels, of a value of 16 bits")
    widths = ((border, border), (border, border), (0, 0))

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if image.dtype.kind in "ui" and not np.iinfo(image.dtype).min <= value <= np.iinfo(image.dtype).max:
            raise ReadingError(f"pad({border}, {value}): the image is {image.dtype}, which does not hold the value")
        return np.pad(image, widths, constant_values=value)

    return Change(change)


def flip_lr() -> Change:
    """Mirror the image left to right with probability one half."""

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if rng.random() >= 0.5:
            return image
        flipped = np.empty_like(image)
        for channel in range(image.shape[2]):  # copying a reversed view of all channels is several times slower
            flipped[..., channel] = image[:, ::-1, channel]
        return flipped

    return Change(change, keeps_size=True)


def value_range(
    vmin: float = -1,
    vmax: float = 1,
    in_min: float | Sequence[float] = 0,
    in_max: float | Sequence[float] = 255,
    clip_values: bool = False,
) -> Change:
    """Map pixel values linearly from [in_min, in_max] to [vmin, vmax] and convert them to float32.

    Args:
      vmin: result for `in_min`.
      vmax: result for `in_max`.
      in_min: lower end of the input range, one number or one for each channel.
      in_max: upper end of the input range, one number or one for each channel.
      clip_values: clip the result to [vmin, vmax].
    """
    low, high = np.asarray(in_min, np.float32), np.asarray(in_max, np.float32)
    if (low.ndim and high.ndim and low.shape != high.shape) or not np.all(low < high):
        raise InputError(f"value_range: in_min={in_min} should be below in_max={in_max}")
    if vmin == vmax or not np.isfinite([vmin, vmax]).all():
        raise InputError(f"value_range: {vmin=}, {vmax=}; expected two different finite numbers")
    span = np.asarray(high - low)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        scaled = _normalized("value_range", image, low, span)
        scaled *= np.float32(vmax - vmin)
        scaled += np.float32(vmin)
        return np.clip(scaled, vmin, vmax, out=scaled) if clip_values else scaled

    return Change(change, keeps_size=True)


def vgg_value_range(mean: Sequence[float] = VGG_MEAN, std: Sequence[float] = VGG_STD) -> Change:
    """Subtract the mean of each channel, divide by its standard deviation, and convert the image to float32.

    Args:
      mean: mean of each channel, of pixels as they are decoded.
      std: standard deviation of each channel.
    """
    if len(mean) != len(std) or not all(0 < each < np.inf for each in std):
        raise InputError(f"vgg_value_range: {mean=}, {std=}; expected one mean and one std above 0 for each channel")
    center, scale = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    return Change(lambda image, rng: _normalized("vgg_value_range", image, center, scale), keeps_size=True)


def _normalized(op: str, image: np.ndarray, center: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return (image - center) / scale in float32. Raises ReadingError if the image has another number of channels."""
    for each in (center, scale):
        if each.ndim and each.size != image.shape[-1]:
            raise ReadingError(f"{op}: {each.size} values for an image of {image.shape[-1]} channels")
    scaled = np.array(image, np.float32, order="C")
    scaled -= center
    scaled /= scale
    return scaled


def _resize_side(
    op: str, chosen: Callable[[tuple[int, ...]], int], length: int, method: str, antialias: bool
) -> Change:
    """Return the op that scales both sides by one factor, so that the side chosen by `min` or `max` gets `length`."""
    _checked_size(op, length)
    _check_method(op, method)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        factor = np.float32(length) / np.float32(chosen(image.shape[:2]))
        height, width = (max(1, int(np.round(np.float32(side) * factor))) for side in image.shape[:2])
        return decoding.resize(image, (height, width), method, antialias)

    return Change(change)


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
) -> tuple[Callable[[tuple[int, int], np.random.Generator], decoding.Window], Callable[[np.ndarray], np.ndarray]]:
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
