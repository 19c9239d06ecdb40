"""Classification of image files with a trained model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from dcvit.checkpoint.files import Folder
from dcvit.errors import ConfigError, InputError
from input_pipeline import Preprocess
from input_pipeline.files import read_regular

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
BATCH = 64  # images that are classified at once


class Prediction(NamedTuple):
    """One of the classes with the highest scores for an image.

    Fields:
      file: the path of the image.
      rank: 1 for the class with the highest score.
      label: the name of the class.
      probability: its probability.
    """

    file: str
    rank: int
    label: str
    probability: float


def find_images(paths: Sequence[Path]) -> list[Path]:
    """Return the given files, and the image files below the given folders in sorted order.

    Raises:
      InputError: there is no image file.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        else:
            found.append(path)
    if not found:
        raise InputError(f"no image files ({', '.join(SUFFIXES)}) in {', '.join(map(str, paths)) or 'an empty list'}")
    return found


def read_class_names(workdir: Folder | None, num_classes: int) -> list[str]:
    """Return the class names in a workdir's data.json, or the numbers of the classes if it has none.

    Raises:
      ConfigError: data.json is damaged or has another number of classes.
    """
    path = workdir / "data.json" if workdir else None
    try:
        names = json.loads(path.read_text())["class_names"] if path and path.is_file() else None
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise ConfigError(f"cannot read class_names of {path}: {e}") from None
    if names is None:
        return [str(i) for i in range(num_classes)]
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"class_names in {path} should be a list of class names")
    if len(names) != num_classes:
        raise ConfigError(f"{path} names {len(names)} classes, the config has {num_classes}")
    return names


def classify(
    model: nn.Module,
    params: Mapping[str, Any],
    files: Sequence[Path],
    *,
    pp: str,
    class_names: Sequence[str],
    topk: int,
    multilabel: bool,
    check_input: Callable[[tuple[int, ...]], None],
) -> tuple[list[Prediction], list[str]]:
    """Classify image files.

    Args:
      model: the classifier.
      params: its parameters.
      files: the image files.
      pp: the preprocessing of an encoded image, see `input_pipeline.Preprocess`.
      class_names: a name for each of the model's outputs.
      topk: the number of predictions per image.
      multilabel: probabilities are sigmoids of the logits, instead of their softmax.
      check_input: called with the shape of a preprocessed image, before the first batch.

    Returns:
      The `topk` predictions of each readable image, and one line of text for each file that cannot be read.

    Raises:
      ConfigError: `pp` is empty or does not return float images.
    """
    if not pp:
        raise ConfigError("config.pp_predict is empty: give the preprocessing of an image file")
    scores = _scorer(model, multilabel)
    predictions: list[Prediction] = []
    failed: list[str] = []
    for names, images in read_images(files, pp, failed):
        if not predictions:
            check_input(images.shape[1:])
        padded = np.pad(images, [(0, BATCH - len(images)), (0, 0), (0, 0), (0, 0)])
        for name, score in zip(names, np.asarray(scores(params, jnp.asarray(padded))), strict=False):
            for rank, best in enumerate(np.argsort(-score, kind="stable")[:topk], start=1):
                probability = round(float(score[best]), 6)
                predictions.append(Prediction(str(name), rank, class_names[best], probability))
    return predictions, failed


def one_row_per_file(predictions: Sequence[Prediction]) -> list[dict[str, object]]:
    """Return one row for each file, with the classes and their probabilities as columns."""
    rows: dict[str, dict[str, object]] = {}
    for prediction in predictions:
        row = rows.setdefault(prediction.file, {"file": prediction.file})
        row[f"#{prediction.rank}"] = f"{prediction.label} ({prediction.probability:.1%})"
    return list(rows.values())


def read_images(
    files: Sequence[Path], pp: str, failed: list[str]
) -> Iterator[tuple[list[Path], Float32[np.ndarray, "N height width channels"]]]:
    """Yield batches of up to `BATCH` files with their preprocessed images.

    Args:
      files: the image files.
      pp: the preprocessing.
      failed: the function appends one line for each file that cannot be read or has another shape than the first.

    Raises:
      ConfigError: `pp` does not return float images.
    """
    preprocess = Preprocess(pp)
    names: list[Path] = []
    images: list[np.ndarray] = []
    shape: tuple[int, ...] | None = None
    for file in files:
        try:
            image = preprocess({"image": read_regular(file)}, np.random.default_rng(0))["image"]
        except (InputError, OSError) as e:
            failed.append(f"{file}: {e.strerror if isinstance(e, OSError) else e}")
            continue
        if image.ndim != 3 or image.dtype != np.float32:
            raise ConfigError(f"config.pp_predict yields {image.dtype} of {image.shape}; expected decode … value_range")
        shape = shape or image.shape
        if image.shape != shape:
            failed.append(f"{file}: {image.shape} after preprocessing, others {shape}; add resize to config.pp_predict")
            continue
        names.append(file)
        images.append(image)
        if len(names) == BATCH:
            yield names, np.stack(images)
            names, images = [], []
    if names:
        yield names, np.stack(images)


def _scorer(
    model: nn.Module, multilabel: bool
) -> Callable[[Mapping[str, Any], Float[Array, "B height width channels"]], Float[Array, "B C"]]:
    """Return the function (params, images) -> probabilities."""

    @jax.jit
    def logits(params: Mapping[str, Any], images: Float[Array, "B height width channels"]) -> Array:
        found: Array = model.apply({"params": params}, images, train=False)[0]
        return found

    normalize = jax.nn.sigmoid if multilabel else jax.nn.softmax
    return lambda params, images: normalize(logits(params, images))
