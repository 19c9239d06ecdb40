"""Preprocessing ops. Each function takes the literals of a preprocessing string and returns the op itself:
a function from an example (a dict) and that example's generator to the changed example.

Where big_vision has an op of that name, its arguments, defaults and pixels are the same but for `onehot`, whose keys
default to the recipes', and for `exif`, which is new. Images are uint8 arrays of height × width × channels until
`value_range` makes them float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from input_pipeline.errors import InputError, nearest
from input_pipeline.images import decode as decoding
from input_pipeline.preprocess.randaug import randaug as augment

__all__ = [
    "central_crop", "decode", "decode_jpeg_and_inception_crop", "flip_lr", "inception_crop", "keep", "onehot",
    "pad", "randaug", "random_crop", "resize", "resize_pillow", "resize_small", "value_range",
]  # fmt: skip

Example = dict[str, Any]
Op = Callable[[Example, np.random.Generator], Example]


def _on_image(change: Callable[[Any, np.random.Generator], np.ndarray]) -> Op:
    """The op that changes `image` and leaves the rest of an example as it is."""

    def op(example: Example, rng: np.random.Generator) -> Example:
        return {**example, "image": change(example["image"], rng)}

    return op


def decode(channels: int = 3, precise: bool = False, exif: bool = False) -> Op:
    """Decodes `image` from the bytes of a JPEG, PNG, WebP … file to 1 (grey) or 3 (RGB) channels.

    `precise` decodes JPEGs with Pillow, which needs no TensorFlow, instead of TensorFlow's faster default; `exif`
    turns images upright. `docs/data.md` says what becomes of every odd kind of file.
    """
    if channels not in (1, 3):
        raise InputError(f"decode(channels={channels}): expected 1 or 3")
    return _on_image(lambda data, rng: decoding.decode(_encoded(data), channels, precise=precise, exif=exif))


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
    """`decode|inception_crop(…)` in one, which decodes no more of a JPEG than the crop; other formats work too."""
    place, fit = _inception(size, (area_min, area_max), (ratio_min, ratio_max), method, antialias)

    def change(data: Any, rng: np.random.Generator) -> np.ndarray:
        if decoding.is_jpeg(_encoded(data)):
            return fit(decoding.decode_crop(data, place(decoding.jpeg_size(data), rng), exif=exif))
        image = decoding.decode(data, exif=exif)
        return fit(_cut(image, place(image.shape[:2], rng)))

    return _on_image(change)


def inception_crop(
    size: int | Sequence[int] | None = None,
    area_min: float = 5,
    area_max: float = 100,
    method: str = "bilinear",
    antialias: bool = False,
) -> Op:
    """Cuts a window of random place, `area_min` to `area_max` percent of the image and aspect ratio 0.75 to 1.33
    (Szegedy et al., 2015), and resizes it to `size` where that is given."""
    place, fit = _inception(size, (area_min, area_max), (0.75, 1.33), method, antialias)
    return _on_image(lambda image, rng: fit(_cut(image, place(image.shape[:2], rng))))


def resize(size: int | Sequence[int], method: str = "bilinear", antialias: bool = False) -> Op:
    """Resizes to `size` (height and width, or both in one) with `tf.image.resize`, aspect ratio ignored."""
    target = _size("resize", size)
    _check_method("resize", method)
    return _on_image(lambda image, rng: decoding.resize(image, target, method, antialias))


def resize_small(smaller_size: int, method: str = "area", antialias: bool = False) -> Op:
    """Resizes so that the smaller side has `smaller_size` pixels, aspect ratio kept."""
    _size("resize_small", smaller_size)
    _check_method("resize_small", method)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        factor = np.float32(smaller_size) / np.float32(min(image.shape[:2]))
        height, width = (int(np.round(np.float32(side) * factor)) for side in image.shape[:2])
        return decoding.resize(image, (height, width), method, antialias)

    return _on_image(change)


def resize_pillow(size: int | Sequence[int]) -> Op:
    """Resizes to `size` with Pillow's antialiased bilinear filter, which needs no TensorFlow."""
    height, width = _size("resize_pillow", size)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        planes = [
            np.asarray(Image.fromarray(image[..., c]).resize((width, height), Image.Resampling.BILINEAR))
            for c in range(image.shape[-1])
        ]
        return np.stack(planes, axis=-1)

    return _on_image(change)


def central_crop(crop_size: int | Sequence[int] | None = None) -> Op:
    """Cuts a window of `crop_size` from the middle; by default the largest square."""
    size = None if crop_size is None else _size("central_crop", crop_size)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        height, width = size or (min(image.shape[:2]),) * 2
        top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
        return _cut(image, (top, left, height, width), "central_crop")

    return _on_image(change)


def random_crop(crop_size: int | Sequence[int]) -> Op:
    """Cuts a uniformly placed window of `crop_size`."""
    height, width = _size("random_crop", crop_size)

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        top, left = (int(rng.integers(max(0, room) + 1)) for room in (image.shape[0] - height, image.shape[1] - width))
        return _cut(image, (top, left, height, width), "random_crop")

    return _on_image(change)


def pad(border: int, value: int = 0) -> Op:
    """Adds `border` pixels of `value` on every side."""
    if not (0 <= border <= 10_000 and 0 <= value <= 255):
        raise InputError(f"pad({border}, {value}): expected a border of 0 to 10,000 pixels of value 0 to 255")
    widths = ((border, border), (border, border), (0, 0))
    return _on_image(lambda image, rng: np.pad(image, widths, constant_values=value))


def flip_lr() -> Op:
    """Mirrors left and right with probability one half."""

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if rng.random() >= 0.5:
            return image
        flipped = np.empty_like(image)
        for channel in range(image.shape[2]):  # a reversed view would be read pixel by pixel, several times slower
            flipped[..., channel] = image[:, ::-1, channel]
        return flipped

    return _on_image(change)


def randaug(num_layers: int = 2, magnitude: float = 10) -> Op:
    """RandAugment (Cubuk et al., 2019): `num_layers` of 16 ops at `magnitude`; see
    `input_pipeline.preprocess.randaug`.
    """
    if num_layers < 0 or not 0 <= magnitude <= 30:
        raise InputError(f"randaug({num_layers}, {magnitude}): expected 0 or more layers of magnitude 0 to 30")
    return _on_image(lambda image, rng: augment(image, rng, num_layers, magnitude))


def value_range(
    vmin: float = -1, vmax: float = 1, in_min: float = 0, in_max: float = 255, clip_values: bool = False
) -> Op:
    """Maps pixel values from [in_min, in_max] to [vmin, vmax], as float32; `clip_values` keeps to that range."""
    if in_min >= in_max:
        raise InputError(f"value_range: in_min={in_min} should be below in_max={in_max}")

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        scaled = np.array(image, np.float32, order="C")
        scaled -= np.float32(in_min)
        scaled /= np.float32(in_max - in_min)
        scaled *= np.float32(vmax - vmin)
        scaled += np.float32(vmin)
        return np.clip(scaled, vmin, vmax, out=scaled) if clip_values else scaled

    return _on_image(change)


def onehot(depth: int, key: str = "label", key_result: str = "labels") -> Op:
    """Float32 indicator of length `depth` from one label, or from several (multi-hot)."""
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
    """Drops everything but `keys`."""

    def op(example: Example, rng: np.random.Generator) -> Example:
        return {key: example[key] for key in keys}

    return op


def _encoded(data: Any) -> bytes:
    """The bytes of an image file. Raises InputError for what is decoded already."""
    if not isinstance(data, bytes):
        raise InputError(f"decode takes the bytes of an image file, not {type(data).__name__}: it is decoded already")
    return data


def _size(op: str, size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) from one number or two. Raises InputError for a size that no image can have."""
    both = (size, size) if isinstance(size, int) else tuple(size)
    if len(both) != 2 or not all(1 <= side <= 100_000 for side in both):
        raise InputError(f"{op}: a size of {size} pixels; expected one number or (height, width), 1 or more")
    return both[0], both[1]


def _check_method(op: str, method: str) -> None:
    if method not in decoding.METHODS:
        raise InputError(f"{op}: unknown method {method!r}; {nearest(method, decoding.METHODS)}")


def _inception(
    size: Any, percent: tuple[float, float], ratio: tuple[float, float], method: str, antialias: bool
) -> tuple[Callable[[Any, np.random.Generator], decoding.Window], Callable[[np.ndarray], np.ndarray]]:
    """The two steps of an Inception crop: drawing the window for an image's size, and resizing what was cut."""
    if not (0 < percent[0] <= percent[1] <= 100 and 0 < ratio[0] <= ratio[1]):
        raise InputError(f"inception crop: percent of area {percent} and aspect ratios {ratio}; expected min <= max")
    _check_method("inception crop", method)
    target = None if size is None else _size("inception crop", size)
    area = (percent[0] / 100, percent[1] / 100)

    def place(shape: tuple[int, int], rng: np.random.Generator) -> decoding.Window:
        return decoding.sample_window(shape, area, ratio, rng)

    def fit(crop: np.ndarray) -> np.ndarray:
        return crop if target is None else decoding.resize(crop, target, method, antialias)

    return place, fit


def _cut(image: np.ndarray, window: decoding.Window, op: str = "crop") -> np.ndarray:
    """The pixels of a window. Raises InputError where the image is smaller."""
    top, left, height, width = window
    if image.shape[0] < height or image.shape[1] < width:
        raise InputError(f"{op}{height, width}: the image is only {image.shape[0]}x{image.shape[1]}")
    return image[top : top + height, left : left + width]
