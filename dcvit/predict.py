"""Prediction: `python -m dcvit.predict --workdir DIR FILE … FOLDER … [--topk 5] [--format table|csv|json]`.

Classifies image files, and all image files in folders, with a trained model. A file that cannot be read
is named on stderr, the others are still predicted, and the exit status is 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcvit import cli
from dcvit.checkpoint.checkpointer import load_params
from dcvit.checkpoint.files import Folder
from dcvit.errors import ConfigError
from dcvit.evaluate import add_options
from dcvit.training import setup
from dcvit.training.trained import TrainedModel, open_trained
from input_pipeline import InputError, Preprocess

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
BATCH = 64


def find_images(paths: Sequence[Path]) -> list[Path]:
    """The given files, and the image files inside given folders, sorted.

    Raises:
      InputError: nothing at a path, or no image at all.
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


def read_images(files: Sequence[Path], pp: str, failed: list[str]) -> Iterator[tuple[list[Path], np.ndarray]]:
    """Batches of (files, preprocessed images); what cannot be read goes to `failed`, one line each."""
    preprocess = Preprocess(pp)
    names: list[Path] = []
    images: list[np.ndarray] = []
    shape: tuple[int, ...] | None = None
    for file in files:
        try:
            image = preprocess({"image": file.read_bytes()}, np.random.default_rng(0))["image"]
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


def predict(
    trained: TrainedModel, files: Sequence[Path], class_names: Sequence[str], topk: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of file, rank, label and probability, and a line for each file that could not be read.

    Probabilities are a softmax over the classes, or a sigmoid each where the model trained with sigmoid_xent.
    """
    if not trained.pp_predict:
        raise ConfigError("config.pp_predict is empty: it says how an image file becomes the model's input")
    checkpoint = trained.checkpoint
    params = load_params(checkpoint)
    predictor = setup.predictor(trained.model)
    logits = jax.jit(lambda params, images: predictor(params, images)[0])
    normalise = jax.nn.sigmoid if trained.is_multilabel else jax.nn.softmax
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for names, images in read_images(files, trained.pp_predict, failed):
        if not rows:
            what = f"{checkpoint}, with images of {images.shape[1:]} from config.pp_predict,"
            example = jax.ShapeDtypeStruct((1, *images.shape[1:]), np.float32)
            trained.check_params(params, example, what)
        padded = np.pad(images, [(0, BATCH - len(images)), (0, 0), (0, 0), (0, 0)])
        scores = np.asarray(normalise(logits(params, jnp.asarray(padded))))
        for name, score in zip(names, scores, strict=False):
            for rank, best in enumerate(np.argsort(-score, kind="stable")[:topk], start=1):
                label, share = class_names[best], round(float(score[best]), 6)
                rows.append({"file": str(name), "rank": rank, "label": label, "probability": share})
    return rows, failed


def read_class_names(workdir: Folder | None, num_classes: int) -> list[str]:
    """The names that a run saved with its workdir, or the classes' numbers."""
    path = workdir / "data.json" if workdir else None
    try:
        names = json.loads(path.read_text())["class_names"] if path and path.is_file() else None
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise ConfigError(f"cannot read class_names of {path}: {e}") from None
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{path} should hold a list of class names")
    if names is not None and len(names) != num_classes:
        raise ConfigError(f"{path} names {len(names)} classes, the config has {num_classes}")
    return names or [str(i) for i in range(num_classes)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = cli.Parser(prog="dcvit predict", description="Classify image files with a trained model.")
    parser.add_argument("images", nargs="*", type=cli.path, help="image files, and folders of them")
    parser.add_argument("--topk", type=int, default=5, help="how many classes to show for each image")
    add_options(parser)
    args, overrides = parser.parse(argv)
    if args.topk < 1:
        raise ConfigError(f"--topk {args.topk}: show at least one class")
    trained = open_trained(args.workdir, args.config, args.checkpoint, overrides)
    files = find_images(args.images)
    rows, failed = predict(trained, files, read_class_names(args.workdir, trained.num_outputs), args.topk)
    cli.show(rows if args.format != "table" else one_row_each(rows), args.format)
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failed else 0


def one_row_each(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For reading: one row for each file, the classes side by side with their probabilities."""
    wide: dict[str, dict[str, Any]] = {}
    for row in rows:
        file = wide.setdefault(row["file"], {"file": row["file"]})
        file[f"#{row['rank']}"] = f"{row['label']} ({row['probability']:.1%})"
    return list(wide.values())


if __name__ == "__main__":
    sys.exit(cli.run(main))
