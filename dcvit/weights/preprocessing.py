"""Conversion between preprocessing strings and other libraries' settings: size, crop, mean, standard deviation."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dcvit.errors import CheckpointError, InputError
from input_pipeline.preprocess.builder import Step, calls, decoded_as, decoding, parsed
from input_pipeline.preprocess.keys import Change

HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of DINOv2 by its authors
# Methods of interpolation by their names in timm, and those of `dcvit`'s ops.
METHODS = {"bicubic": "bicubic", "bilinear": "bilinear", "lanczos": "lanczos3", "nearest": "nearest"}
DECODERS, RANGES = ("decode", "decode_jpeg_and_inception_crop"), ("value_range", "vgg_value_range")
NO_STEP = ("keep", "drop", "onehot")  # ops that do not change the image
RANGE = re.compile(r"\b(?:vgg_)?value_range\b(?:\(.*?\))?(?=\s*(?:\||$))")
SIZES = ("size", "smaller_size", "longer_size", "crop_size", "border")  # arguments of ops, in pixels
SMALLEST = 1e-4 / 255  # standard deviation; normalized pixels of smaller ones would not be accurate
GEOMETRIES = (["resize"], ["resize_pillow"], ["resize_small", "central_crop"], ["resize", "central_crop"],
              ["resize_pillow", "central_crop"])  # fmt: skip


class Preprocessing(NamedTuple):
    """Preprocessing of an image file.

    Fields:
      size: height and width of the images that the model takes.
      resize: length of the smaller side before the center is cropped; None resizes to `size`, without cropping.
      squash: height and width to which an image of any shape is resized instead, before the center is cropped.
        `resize` is then the substitute for libraries without this step.
      method: interpolation, of `METHODS`.
      mean, std: of each channel, for pixels in [0, 1].
      channels: 3, or 1 for gray images.
    """

    size: tuple[int, int]
    resize: int | None = None
    method: str = "bilinear"
    mean: Sequence[float] = HALF
    std: Sequence[float] = HALF
    channels: int = 3
    squash: tuple[int, int] | None = None


def to_pp(preprocessing: Preprocessing) -> str:
    """Return the preprocessing string of a `Preprocessing`. Interpolation antialiases, as Pillow's does.

    Raises:
      ValueError: a channel has no mean or standard deviation, one is not finite, or a standard deviation not positive.
    """
    both = (*preprocessing.mean, *preprocessing.std)
    too_few = min(len(preprocessing.mean), len(preprocessing.std)) < preprocessing.channels
    if too_few or min(preprocessing.std) < SMALLEST or not all(map(math.isfinite, both)):
        raise ValueError(f"mean {preprocessing.mean} and standard deviation {preprocessing.std}")
    method = METHODS[preprocessing.method]
    size = square(preprocessing.size)
    if preprocessing.squash:
        resize = f'resize({list(preprocessing.squash)}, "{method}", True)|central_crop({size})'
    elif preprocessing.resize is None:
        resize = f'resize({size}, "{method}", True)'
    else:
        resize = f'resize_small({preprocessing.resize}, "{method}", True)|central_crop({size})'
    channels = preprocessing.channels
    decode = "decode" if channels == 3 else f"decode({channels})"
    return f"{decode}|{resize}|{_value_range(preprocessing.mean[:channels], preprocessing.std[:channels])}"


def _value_range(mean: Sequence[float], std: Sequence[float]) -> str:
    """Return the op that maps pixels p in [0, 255] to (p / 255 - mean) / std."""
    if set(mean) == set(std) == {0.5}:
        return "value_range(-1, 1)"
    ends = ([255 * m for m in mean], [255 * (m + s) for m, s in zip(mean, std, strict=True)])
    low, high = ([float(f"{value:.12g}") for value in values] for values in ends)
    return f"value_range(0, 1, {low}, {high})"


def from_pp(pp: str) -> Preprocessing:
    """Parse a preprocessing string to a `Preprocessing`, for the config of another library.

    Other libraries resize with antialiasing; methods of interpolation that they lack become "bilinear".

    Raises:
      CheckpointError: it has no size, steps that other libraries lack, or no `value_range`; see `mean_and_std`.
    """
    steps = [step for step in _steps(pp) if step.op not in NO_STEP]
    geometry = [step.op for step in steps if step.op not in (*DECODERS, *RANGES)]
    if geometry not in GEOMETRIES:
        known = ", ".join("|".join(each) for each in GEOMETRIES)
        raise CheckpointError(f"pp={pp!r} resizes and crops as other libraries cannot; they have {known}")
    first = next(step.arguments for step in steps if step.op in geometry)
    channels = channels_of(pp)
    mean, std = (values[:channels] for values in mean_and_std(pp))
    squash = _pair(first["size"]) if len(geometry) == 2 and "size" in first else None
    names = {ours: theirs for theirs, ours in METHODS.items()}
    method = names.get(first.get("method", ""), "bilinear")
    smaller = min(squash) if squash else first.get("smaller_size")
    return Preprocessing(size_of(pp), smaller, method, mean, std, channels, squash)


def check(pp: str) -> None:
    """Raise CheckpointError if a preprocessing string of a file is invalid, such as by a size of 0."""
    _all_steps(pp)


def training(pp: str) -> dict[str, str]:
    """Return {"pp": preprocessing of training, without labels} from `pp` of prediction; {} without a fixed size."""
    try:
        crop = f"inception_crop({square(size_of(pp))})"
    except CheckpointError:
        return {}
    value_range = RANGE.search(pp)
    return {"pp": "|".join([decoding(pp), crop, "flip_lr", *([value_range[0]] if value_range else [])])}


def at_size(pp: str, size: tuple[int, int]) -> str:
    """Return a preprocessing string for images of another height and width.

    All lengths in the string are scaled, so that crops keep their part of the image. Without any, images are resized.

    Raises:
      CheckpointError: the string is invalid, or its images have no fixed size.
    """
    steps = _all_steps(pp)
    texts = [ast.unparse(call) for call in calls(pp)]
    if not any(step.arguments.get(name) for step in steps for name in SIZES):
        at = next((i + 1 for i, step in enumerate(steps) if step.op in DECODERS), 0)
        texts.insert(at, f"resize_pillow(size={list(size)})")
    else:
        scales = [new / old for new, old in zip(size, size_of(pp), strict=True)]
        for i, step in enumerate(steps):
            scaled = {k: _scaled(k, v, scales) for k, v in step.arguments.items() if k in SIZES and v}
            if scaled:
                shown = {k: v for k, v in (step.arguments | scaled).items() if v != "image"}
                texts[i] = f"{step.op}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"
    found = "|".join(texts)
    if size_of(found) != size:
        raise CheckpointError(f"pp={pp!r} cannot yield images of {size[0]}x{size[1]}")
    return found


def _scaled(name: str, value: int | Sequence[int], scales: Sequence[float]) -> int | list[int]:
    """Return an op's length or (height, width) times `scales`; a single length, unless a size, uses the larger one."""
    if isinstance(value, int) and (name not in ("size", "crop_size") or scales[0] == scales[1]):
        return round(value * max(scales))
    return [round(side * scale) for side, scale in zip(np.broadcast_to(value, 2).tolist(), scales, strict=True)]


def mean_and_std(pp: str) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel that a preprocessing string applies to pixels in [0, 1].

    Raises:
      CheckpointError: it clips, has not exactly one `value_range` or `vgg_value_range`, of one or three channels, or
        images are not those of other libraries, gray or RGB of 8 bits.
    """
    found = [step for step in _steps(pp) if step.op in RANGES]
    channels, dtype = decoded_as(pp)
    if channels not in (1, 3) or dtype != "uint8":
        raise CheckpointError(
            f"pp={pp!r:.200} decodes {channels} channels of {dtype}; other libraries read 1 or 3 of uint8"
        )
    try:
        ((_, op, given, _),) = found
        names = ("mean", "std") if op == "vgg_value_range" else ("in_min", "in_max")
        low, high = (np.broadcast_to(np.ravel(given[name]).astype(float), 3) for name in names)
        if op == "vgg_value_range":
            return (low / 255).tolist(), (high / 255).tolist()
        vmin, vmax = given["vmin"], given["vmax"]
        if vmin == vmax or (given["clip_values"] and (low.max() > 0 or high.min() < 255)):
            raise ValueError
        scale = (high - low) / (vmax - vmin) / 255
        return (low / 255 - vmin * scale).tolist(), scale.tolist()
    except ValueError:
        raise CheckpointError(f"pp={pp!r} should have one value_range of one or three channels") from None


def channels_of(pp: str) -> int:
    """Return the number of channels of the images that a preprocessing string decodes; 3 if it decodes none."""
    return decoded_as(pp)[0]


def size_of(pp: str) -> tuple[int, int]:
    """Return the height and width of the images that a preprocessing string yields.

    Raises:
      CheckpointError: the size depends on the image file.
    """
    size: tuple[int, int] | None = None
    for _, op, given, function in _steps(pp):
        if fixed := given.get("size", given.get("crop_size")):
            size = _pair(fixed)
        elif op == "pad" and size:
            size = size[0] + 2 * given["border"], size[1] + 2 * given["border"]
        elif op == "central_crop" and size:
            size = min(size), min(size)
        elif op not in NO_STEP and not (isinstance(function, Change) and function.keeps_size):
            size = None
    if size is None:
        raise CheckpointError(f"pp={pp!r} has no size of images, such as central_crop(224)")
    return size


def _steps(pp: str) -> list[Step]:
    """Return the ops of a preprocessing string that change the image. Raises CheckpointError if it is invalid."""
    return [step for step in _all_steps(pp) if step.arguments.get("outkey", "image") == "image"]


def _all_steps(pp: str) -> list[Step]:
    """Return all ops of a preprocessing string. Raises CheckpointError if it is invalid."""
    try:
        return parsed(pp)
    except InputError as e:
        raise CheckpointError(f"pp={pp!r}: {e}") from None


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Return a height and width from a size, in which one number stands for both."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def square(size: Sequence[int]) -> int | list[int]:
    """Return a height and width as preprocessing strings and config files have them: one number if they are equal."""
    return size[0] if len(set(size)) == 1 else list(size)


def resized(size: int, crop_pct: float) -> int:
    """Return the length of the smaller side before a center crop to `size` that keeps the fraction `crop_pct`."""
    return math.floor(size / crop_pct)
