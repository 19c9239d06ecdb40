"""Picture of training images, after all augmentations, with their labels."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import input_pipeline
from dcvit.errors import ConfigError
from dcvit.models.packed_images import PackedImages
from dcvit.training.setup import Setup
from dcvit.training.step import step_keys

COLUMNS, IMAGES = 4, 16
SIDE, GAP, LINE = 160, 8, 16  # pixels: a width up to which images are enlarged, space between them, a line of text


def draw_inputs(setup: Setup) -> tuple[Image.Image, str]:
    """Return the first images of a run's first step as the model gets them, and a line about the picture.

    Below each image are the largest labels, two at most. Raises ConfigError for images of different sizes.
    """
    with contextlib.closing(setup.data.batches(0)) as batches:
        batch = next(batches)
    prepared = jax.jit(setup.task.prepare)(batch, step_keys(setup.config.seed, 0)[0])
    if isinstance(prepared["image"], PackedImages):
        raise ConfigError("--picture is for images of one size, not for the op patches")
    images, labels = (np.asarray(prepared[key][:IMAGES]) for key in ("image", "labels"))
    found = input_pipeline.defer_value_range(setup.config.input.pp)[1]
    low, high = map(float, found[:2]) if found else (float(images.min()), float(images.max()))
    pixels = np.rint(255 * np.clip((images - low) / max(high - low, 1e-9), 0, 1)).astype(np.uint8)
    about = "" if images.shape[-1] in (1, 3) else f"channel 0 of {images.shape[-1]}; "
    names, floor = setup.data.source.class_names or (), setup.config.label_smoothing / labels.shape[-1]
    tiles = [_tile(image, _caption(label, names, floor)) for image, label in zip(pixels, labels, strict=True)]
    width, height = (length + GAP for length in tiles[0].size)
    sheet = Image.new("RGB", (width * min(COLUMNS, len(tiles)), height * -(-len(tiles) // COLUMNS)), "white")
    for i, tile in enumerate(tiles):
        sheet.paste(tile, (i % COLUMNS * width, i // COLUMNS * height))
    count = f"{len(tiles)} of {setup.data.batch_size} images of the first step"
    return sheet, f"{count}; {about}black is {low:.4g}, white {high:.4g}"


def _tile(pixels: np.ndarray, caption: str) -> Image.Image:
    """Return an image of uint8 pixels, enlarged by a whole factor, with a caption below it."""
    height, width = (length * max(1, SIDE // pixels.shape[1]) for length in pixels.shape[:2])
    tile = Image.new("RGB", (width, height + 2 * LINE), "white")
    image = Image.fromarray(pixels if pixels.shape[-1] == 3 else pixels[..., 0])
    tile.paste(image.resize((width, height), Image.Resampling.NEAREST))
    ImageDraw.Draw(tile).text((0, height), caption, "black", ImageFont.load_default(LINE - 4))
    return tile


def _caption(labels: np.ndarray, names: Sequence[str], floor: float) -> str:
    """Return the two largest labels above `floor` in a line each: the class, and its weight unless that is 1."""
    largest = [int(c) for c in np.argsort(-labels, kind="stable")[:2] if labels[c] > floor + 0.005]
    words = [names[c] if c < len(names) else f"class {c}" for c in largest]
    lines = [word if labels[c] > 0.995 else f"{labels[c]:.2f} {word}" for c, word in zip(largest, words, strict=True)]
    return "\n".join(lines) or ("unknown" if (labels < 0).any() else "no class")
