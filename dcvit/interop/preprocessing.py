"""Preprocessing of other libraries as preprocessing strings: size, crop, and mean and standard deviation."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.interop.links import Arrays, Link
from dcvit.interop.tensors import PROCESSOR, Json

HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Methods of interpolation by their names in timm, and those of `dcvit`'s ops.
METHODS = {"bicubic": "bicubic", "bilinear": "bilinear", "lanczos": "lanczos3", "nearest": "nearest"}
NUMBERS = ("nearest", "lanczos", "bilinear", "bicubic")  # by Pillow's number of the method, from 0


class Preprocessing(NamedTuple):
    """Preprocessing of an image file.

    Fields:
      size: height and width of the images that the model takes.
      resize: length of the smaller side before the center is cropped; None resizes to `size`, without cropping.
      squash: height and width to which an image is resized instead, whatever its shape, before the center is cropped.
        `resize` is then what a library without it may do.
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
    """Return a preprocessing string. Interpolation antialiases, as Pillow's does.

    Raises:
      ValueError: a standard deviation is not positive, or a mean or standard deviation is not finite.
    """
    if min(preprocessing.std) <= 0 or not all(map(math.isfinite, (*preprocessing.mean, *preprocessing.std))):
        raise ValueError(f"mean {preprocessing.mean} and standard deviation {preprocessing.std}")
    method = METHODS[preprocessing.method]
    size = preprocessing.size[0] if len(set(preprocessing.size)) == 1 else list(preprocessing.size)
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
    """Return what a preprocessing string says about an image, for the config of another library.

    Raises:
      CheckpointError: it has no size, or no `value_range`; see `mean_and_std`.
    """
    resize = re.search(r"resize_small\((\d+)", pp)
    methods = [name for name, ours in METHODS.items() if f'"{ours}"' in pp or f"'{ours}'" in pp]
    channels = 1 if re.match(r"decode\w*\(1\b", pp) else 3
    mean, std = (values[:channels] for values in mean_and_std(pp))
    squash = re.search(r"\bresize\(\s*\[(\d+), (\d+)\].*\|central_crop\(", pp)
    squashed = (int(squash[1]), int(squash[2])) if squash else None
    smaller = int(resize[1]) if resize else min(squashed) if squashed else None
    return Preprocessing(size_of(pp), smaller, (methods or ["bilinear"])[0], mean, std, channels, squashed)


def mean_and_std(pp: str) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel that `value_range` of a preprocessing string applies.

    Raises:
      CheckpointError: the string has no `value_range`, or one with other arguments than the ends of both ranges.
    """
    found = re.search(r"value_range(\(.*?\))(\||$)", pp)
    try:
        given = ast.literal_eval(found[1]) if found else ()
        ends = (*given, *(0, 255)[max(0, len(given) - 2) :])
        vmin, vmax, low, high = (np.ravel(end).astype(float) for end in ends)
        scale = np.broadcast_to((high - low) / (vmax - vmin) / 255, 3)
        return (low / 255 - vmin * scale).tolist(), scale.tolist()
    except (ValueError, SyntaxError, TypeError):
        raise CheckpointError(f"pp={pp!r} should have a value_range of one or three channels") from None


def size_of(pp: str) -> tuple[int, int]:
    """Return the height and width that a preprocessing string resizes or crops images to.

    Raises:
      CheckpointError: it has no such op.
    """
    found = re.findall(r"(?:crop|resize|resize_pillow)\(\s*(\d+|[\[(]\s*\d+\s*,\s*\d+\s*[\])])", pp)
    if not found:
        raise CheckpointError(f"pp={pp!r} has no size of images, such as central_crop(224)")
    size = ast.literal_eval(found[-1])
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def of_processor(config: Json, default: Preprocessing) -> str:
    """Return the preprocessing of a model of Hugging Face, for images of the size of its position embeddings.

    Transformers would interpolate the embeddings for another size; DINOv2's have 518 pixels, its processor 224.

    Args:
      config: the content of config.json, which holds that of preprocessor_config.json, if it exists, by that name.
      default: that of the family.

    Raises:
      CheckpointError: preprocessor_config.json has values of other types than transformers writes.
    """
    found = config.get(PROCESSOR)
    if not found:
        return to_pp(default)
    try:
        if not _flag(found, "do_resize") or found.get("rescale_offset"):
            raise CheckpointError(f"{PROCESSOR}: do_resize=false and rescale_offset are not supported")
        size, crop = found.get("size"), _size(found.get("crop_size"))
        number = found.get("resample", NUMBERS.index(default.method))
        if number not in range(len(NUMBERS)):
            raise CheckpointError(f"{PROCESSOR}: resample={number!r:.100}; expected 0 to {len(NUMBERS) - 1}")
        mean, std = _normalization(found, default)
        resize = squash = None
        if crop and _flag(found, "do_center_crop"):
            height, width = _size(size) or (default.resize or min(crop),) * 2
            scale = min(default.size) / min(crop)
            resize = round(min(height, width) * scale)
            if isinstance(size, dict) and "height" in size:  # for any shape of image, as DeiT's processor does
                resize, squash = None, (round(height * scale), round(width * scale))
        return to_pp(Preprocessing(default.size, resize, NUMBERS[number], mean, std, default.channels, squash))
    except (AttributeError, TypeError, ValueError, KeyError, ArithmeticError) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"{PROCESSOR} is not as transformers writes it: {str(found)[:100]}") from None


def _flag(found: Json, key: str) -> bool:
    """Return a boolean, by default true. Raises TypeError for another value."""
    value = found.get(key)
    if not isinstance(value, bool | None):
        raise TypeError(key)
    return value is not False


def _normalization(found: Json, default: Preprocessing) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel for pixels in [0, 1], of a processor with any factor."""
    factor = found.get("rescale_factor")
    scale = 255 * (float(1 / 255 if factor is None else factor) if _flag(found, "do_rescale") else 1.0)
    if math.isclose(scale, 1, rel_tol=1e-6):
        scale = 1.0
    mean, std = found.get("image_mean", default.mean), found.get("image_std", default.std)
    if not _flag(found, "do_normalize"):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return [float(m) / scale for m in mean], [float(s) / scale for s in std]


def _size(found: object) -> tuple[int, int] | None:
    """Return a height and width in any of the forms of transformers; None if there is none."""
    if found is None:
        return None
    if isinstance(found, int):
        return found, found
    if not isinstance(found, dict):
        raise ValueError("neither a number nor an object")
    if "shortest_edge" in found:
        return int(found["shortest_edge"]), int(found["shortest_edge"])
    return int(found["height"]), int(found["width"])


def resized(size: int, crop_pct: float) -> int:
    """Return the length of the smaller side before the center is cropped, for the fraction that the crop keeps."""
    return math.floor(size / crop_pct)


def fold(links: Sequence[Link], pp: str) -> tuple[list[Link], str]:
    """Fold mean and standard deviation into the weights of the first layer.

    For inputs v in [-1, 1] instead of (p - mean) / std of pixels p in [0, 1]:
    W' = W / (2·std) and b' = b + Σ W·(0.5 - mean) / std.

    Args:
      links: the links of a model.
      pp: its preprocessing string.

    Returns:
      The links, those of the first layer joined to one, and the preprocessing string with `value_range(-1, 1)`.
    """
    mean, std = (np.asarray(values, np.float64)[None, None, :, None] for values in mean_and_std(pp))
    by_ours = {link.ours: link for link in links}
    kernel, bias = by_ours[("embedding/kernel",)], by_ours[("embedding/bias",)]

    def to_ours(weight: np.ndarray, offset: np.ndarray) -> Arrays:
        (w,), (b,) = kernel.to_ours(weight), bias.to_ours(offset)
        w = w.astype(np.float64)
        added = (w * (0.5 - mean) / std).sum((0, 1, 2))
        return (w / (2 * std)).astype(np.float32), (b + added).astype(np.float32)

    def to_theirs(w: np.ndarray, b: np.ndarray) -> Arrays:
        w = w.astype(np.float64) * (2 * std)
        b = (b - (w * (0.5 - mean) / std).sum((0, 1, 2))).astype(np.float32)
        return *kernel.to_theirs(w.astype(np.float32)), *bias.to_theirs(b)

    stem = Link(
        kernel.theirs + bias.theirs, kernel.ours + bias.ours, to_ours, to_theirs, kernel.shapes + bias.shapes
    )  # fmt: skip
    others = [link for link in links if link not in (kernel, bias)]
    return [stem, *others], re.sub(r"value_range\(.*?\)(?=\||$)", "value_range(-1, 1)", pp)
