"""A dataset as large as ImageNet-1k's training set, in the same shards, made of a few thousand generated JPEGs."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from input_pipeline.optional import tensorflow

NAME, VERSION, CLASSES = "imagenet2012", "5.1.0", 1000
RECORDS, SHARDS = 1_281_167, 1024  # as tensorflow-datasets prepares them
# Height and width of the JPEGs, and their share. Most of ImageNet's images have 500 pixels on their longer side; the
# shares of the others are assumed.
SIZES = {(375, 500): 0.55, (333, 500): 0.15, (500, 375): 0.15, (500, 500): 0.05, (200, 250): 0.06, (1200, 1600): 0.04}


def shard_lengths() -> list[int]:
    """Return the number of records of each shard."""
    return [RECORDS * (i + 1) // SHARDS - RECORDS * i // SHARDS for i in range(SHARDS)]


def labels() -> np.ndarray:
    """Return the label of every record, int64 of shape (RECORDS,)."""
    return np.concatenate([_labels(length) for length in shard_lengths()])


def _labels(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(CLASSES, size=length)


def photo(seed: int, height: int = 375, width: int = 500) -> bytes:
    """Return a JPEG of noise with the 1/f spectrum of photographs, quality 90."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)) + 1 / 500
    gray, *colors = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(4, height, width))) / frequency, s=(height, width))
    pixels = np.stack([gray + color / 2 for color in colors], axis=-1)
    file = io.BytesIO()
    Image.fromarray(np.clip(120 + 50 * pixels / pixels.std(), 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def prepare(root: Path) -> Path:
    """Write the training set as a dataset of tensorflow-datasets unless it exists, and return its folder.

    Shards of equal length are links to one file, so that the folder needs the disk of two shards.
    """
    folder = root / NAME / VERSION
    if (folder / "dataset_info.json").is_file():
        return folder
    tensorflow()  # hides the start-up messages that importing tensorflow-datasets would print
    logging.getLogger("absl").setLevel(logging.ERROR)
    import tensorflow_datasets as tfds

    names = tfds.core.tfds_path("datasets/imagenet2012/labels.txt")
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(names_file=names),
            "file_name": tfds.features.Text(),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    lengths, first = shard_lengths(), {}
    for number, length in enumerate(lengths):
        path = folder / f"{NAME}-train.tfrecord-{number:05}-of-{SHARDS:05}"
        path.unlink(missing_ok=True)
        if length in first:
            os.link(first[length], path)
            continue
        first[length] = path
        _write(features.serialize_example, path, length)
    sizes = {length: path.stat().st_size for length, path in first.items()}
    split = tfds.core.SplitInfo(name="train", shard_lengths=lengths, num_bytes=sum(sizes[n] for n in lengths))
    tfds.folder_dataset.write_metadata(data_dir=folder, features=features, split_infos=[split], version=VERSION)
    return folder


def _write(serialize: Callable[[dict[str, object]], bytes], path: Path, length: int) -> None:
    """Write one shard, whose JPEGs and labels follow from its length."""
    kinds = np.random.default_rng(length).choice(len(SIZES), size=length, p=list(SIZES.values()))
    sides = [list(SIZES)[kind] for kind in kinds]
    with ThreadPoolExecutor(os.cpu_count()) as threads, tensorflow().io.TFRecordWriter(str(path)) as file:
        images = threads.map(lambda i: photo(length * length + i, *sides[i]), range(length))
        for i, (image, label) in enumerate(zip(images, _labels(length), strict=True)):
            file.write(serialize({"image": image, "label": int(label), "file_name": f"{length}_{i}.JPEG"}))
