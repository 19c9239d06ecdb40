"""preprocessor_config.json of Hugging Face transformers as preprocessing strings, and the reverse.

https://huggingface.co/docs/transformers/main_classes/image_processor. A property that is absent from a file, or null,
has the default of the processor's class.
"""

from __future__ import annotations

import logging
import math
import re

from dcvit.errors import CheckpointError
from dcvit.weights import preprocessing
from dcvit.weights.preprocessing import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from dcvit.weights.tensors import PROCESSOR, Json

METHODS = ("nearest", "lanczos", "bilinear", "bicubic")  # by Pillow's number of the method, from 0
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CLIP: Json = {
    "size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224, "resample": 3, "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}  # fmt: skip
# Defaults by the name of the class before "ImageProcessor".
DEFAULTS: dict[str, Json] = {
    "ViT": {"size": {"height": 224, "width": 224}, "resample": 2},
    "DeiT": {"size": {"height": 256, "width": 256}, "do_center_crop": True, "crop_size": 224, "resample": 3},
    "Siglip": {"size": {"height": 224, "width": 224}, "resample": 3},
    "DINOv3ViT": {
        "size": {"height": 224, "width": 224}, "resample": 2, "image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD,
    },
    "Bit": CLIP,
    "CLIP": CLIP,
}  # fmt: skip
SQUARE = ("ViT", "DeiT", "DINOv3ViT")  # classes for which one number is height and width, not the smaller side
NAME = re.compile(r"(\w+?)(?:ImageProcessor(?:Fast|Pil)?|FeatureExtractor)")
log = logging.getLogger(__name__)


def read(config: Json, kind: str, image_size: tuple[int, int], channels: int) -> str:
    """Return the preprocessing of a model, for images of the size of its position embeddings.

    For a processor with another size (DINOv2: 224 pixels, embeddings 518), transformers would interpolate embeddings.

    Args:
      config: the content of config.json, with that of preprocessor_config.json, if it exists, under the file's name.
      kind: the processor's class in transformers for the model, of `DEFAULTS`.
      image_size: height and width.
      channels: 3, or 1 for gray images; for others the result is empty.

    Raises:
      CheckpointError: preprocessor_config.json has values of other types than transformers writes.
    """
    found = config.get(PROCESSOR) or {}
    if channels not in (1, 3):
        log.info("images of %d channels have no preprocessing", channels)
        return ""
    try:
        named = NAME.fullmatch(str(found.get("image_processor_type") or found.get("feature_extractor_type")))
        name = named[1] if named and named[1] in DEFAULTS else kind
        complete = {**DEFAULTS[name], **{key: value for key, value in found.items() if value is not None}}
        if isinstance(number := complete["size"], int):
            complete["size"] = dict.fromkeys(("height", "width") if name in SQUARE else ("shortest_edge",), number)
        pp = preprocessing.to_pp(_preprocessing(complete, image_size, channels))
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"{PROCESSOR} is not as transformers writes it: {str(found)[:100]}") from None
    if not found:
        log.info("no %s; assumed that of transformers' %sImageProcessor: %s", PROCESSOR, kind, pp)
    return pp


def write(pp: str) -> Json:
    """Return the content of preprocessor_config.json for a preprocessing string.

    Raises:
      CheckpointError: the string has steps that a processor lacks, or no size or range of values.
    """
    found = preprocessing.from_pp(pp)
    crop = dict(zip(("height", "width"), found.size, strict=True))
    name, size = "ViT", crop
    if found.squash:
        name, size = "DeiT", dict(zip(("height", "width"), found.squash, strict=True))
    elif found.resize:
        name, size = "CLIP", {"shortest_edge": found.resize}
    cropped: Json = {"do_center_crop": True, "crop_size": crop} if size != crop else {"do_center_crop": False}
    return {
        "image_processor_type": f"{name}ImageProcessor", "do_convert_rgb": found.channels == 3,
        "do_resize": True, "size": size, **cropped, "resample": METHODS.index(found.method),
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": list(found.mean),
        "image_std": list(found.std),
    }  # fmt: skip


def _preprocessing(found: Json, image_size: tuple[int, int], channels: int) -> Preprocessing:
    """Return the preprocessing from `found`, all properties of a processor with their values."""
    if not found.get("do_resize", True) or found.get("rescale_offset"):
        raise CheckpointError(f"{PROCESSOR}: do_resize=false and rescale_offset are not supported")
    crop = _size(found.get("crop_size"))
    mean, std = _normalization(found)
    resize = squash = None
    if crop and found.get("do_center_crop"):
        height, width = _size(found["size"]) or crop
        if height < crop[0] or width < crop[1]:
            raise CheckpointError(f"{PROCESSOR}: a crop of {crop} pixels from {height, width} is not supported")
        scale = min(image_size) / min(crop)
        if "height" in found["size"]:
            squash = (round(height * scale), round(width * scale))
        else:
            resize = round(min(height, width) * scale)
    return Preprocessing(image_size, resize, METHODS[found["resample"]], mean, std, channels, squash)


def _normalization(found: Json) -> tuple[list[float], list[float]]:
    """Return each channel's mean and standard deviation for pixels in [0, 1], for any `rescale_factor`."""
    scale = 255 * (float(found.get("rescale_factor", 1 / 255)) if found.get("do_rescale", True) else 1.0)
    if math.isclose(scale, 1, rel_tol=1e-6):
        scale = 1.0
    mean, std = found.get("image_mean", HALF), found.get("image_std", HALF)
    if not found.get("do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return [float(m) / scale for m in mean], [float(s) / scale for s in std]


def _size(found: object) -> tuple[int, int] | None:
    """Return height and width from `size` in any form that transformers has; None if there are none."""
    if found is None:
        return None
    sides: Json = found if isinstance(found, dict) else {"shortest_edge": found}
    height, width = (int(sides[key if key in sides else "shortest_edge"]) for key in ("height", "width"))
    return height, width
