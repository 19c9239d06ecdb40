"""Preprocessing ops. Each function takes the literals of a preprocessing string and returns the op itself:
a function from an example (a dict) and that example's generator to the changed example.

Images are uint8 arrays of height × width × channels until `value_range` makes them float32.
"""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from input_pipeline.errors import InputError

__all__ = ["decode", "flip_lr", "keep", "onehot", "pad", "random_crop", "resize", "value_range"]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")  # what `decode` reads; no format that runs a program

Example = dict[str, Any]
Op = Callable[[Example, np.random.Generator], Example]


def decode(channels: int = 3) -> Op:
    """Decodes `image` from the bytes of a JPEG, PNG, WebP … file to 1 (grey) or 3 (RGB) channels.

    EXIF rotation is applied; 16-bit images keep their upper 8 bits; of an animation, the first frame. Images of
    32 bits a channel are refused: nothing says what their white is.
    """
    if channels not in (1, 3):
        raise InputError(f"decode(channels={channels}): expected 1 or 3")

    def op(example: Example, rng: np.random.Generator) -> Example:
        try:
            with Image.open(io.BytesIO(example["image"]), formats=FORMATS) as opened:
                image = ImageOps.exif_transpose(opened)
            if image.mode in ("I", "F"):
                raise InputError("32 bits a channel; expected 8 or 16")
            if image.mode.startswith("I;16"):
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
        except (InputError, KeyError):
            raise
        except Image.DecompressionBombError as e:
            raise InputError(str(e)) from None
        except Exception as e:  # decoders raise anything for a damaged file
            reason = "not an image" if isinstance(e, Image.UnidentifiedImageError) else f"broken image: {e}"
            raise InputError(reason) from None
        return {**example, "image": pixels.reshape(*pixels.shape[:2], channels)}

    return op


def resize(height: int, width: int | None = None) -> Op:
    """Resizes to height × width (a square by default), bilinear and antialiased, aspect ratio ignored."""
    _positive("resize", height, width)
    size = (width or height, height)

    def op(example: Example, rng: np.random.Generator) -> Example:
        image = example["image"]
        planes = [
            np.asarray(Image.fromarray(image[..., c]).resize(size, Image.Resampling.BILINEAR))
            for c in range(image.shape[-1])
        ]
        return {**example, "image": np.stack(planes, axis=-1)}

    return op


def pad(border: int, value: int = 0) -> Op:
    """Adds `border` pixels of `value` on every side."""
    if not (0 <= border <= 10_000 and 0 <= value <= 255):
        raise InputError(f"pad({border}, {value}): expected a border of 0 to 10,000 pixels of value 0 to 255")

    def op(example: Example, rng: np.random.Generator) -> Example:
        widths = ((border, border), (border, border), (0, 0))
        return {**example, "image": np.pad(example["image"], widths, constant_values=value)}

    return op


def random_crop(height: int, width: int | None = None) -> Op:
    """Cuts a uniformly placed height × width window (a square by default)."""
    _positive("random_crop", height, width)
    crop = (height, width or height)

    def op(example: Example, rng: np.random.Generator) -> Example:
        image = example["image"]
        if image.shape[0] < crop[0] or image.shape[1] < crop[1]:
            raise InputError(f"random_crop{crop}: the image is only {image.shape[0]}x{image.shape[1]}")
        top, left = (int(rng.integers(have - want + 1)) for have, want in zip(image.shape, crop, strict=False))
        return {**example, "image": image[top : top + crop[0], left : left + crop[1]]}

    return op


def flip_lr() -> Op:
    """Mirrors left and right with probability one half."""

    def op(example: Example, rng: np.random.Generator) -> Example:
        return {**example, "image": example["image"][:, ::-1]} if rng.random() < 0.5 else example

    return op


def value_range(vmin: float = -1, vmax: float = 1, in_min: float = 0, in_max: float = 255) -> Op:
    """Maps pixel values from [in_min, in_max] to [vmin, vmax], as float32."""
    if in_min >= in_max:
        raise InputError(f"value_range: in_min={in_min} should be below in_max={in_max}")

    def op(example: Example, rng: np.random.Generator) -> Example:
        unit = (example["image"].astype(np.float32) - np.float32(in_min)) / np.float32(in_max - in_min)
        return {**example, "image": np.float32(vmin) + unit * np.float32(vmax - vmin)}

    return op


def onehot(depth: int, key: str = "label", key_result: str = "labels") -> Op:
    """Float32 indicator of length `depth` from one label, or from several (multi-hot)."""

    def op(example: Example, rng: np.random.Generator) -> Example:
        labels = np.atleast_1d(example[key])
        if labels.size and not (labels.min() >= 0 and labels.max() < depth):
            raise InputError(f"onehot({depth}): {key}={example[key]} is out of range")
        hot = np.zeros(depth, np.float32)
        hot[labels] = 1
        return {**example, key_result: hot}

    return op


def keep(*keys: str) -> Op:
    """Drops everything but `keys`."""

    def op(example: Example, rng: np.random.Generator) -> Example:
        return {key: example[key] for key in keys}

    return op


def _positive(op: str, height: int, width: int | None) -> None:
    """Raises InputError for a size that no image can have."""
    if height < 1 or (width is not None and width < 1):
        raise InputError(f"{op}: {height}x{width or height} pixels; expected 1 or more")
