"""Benchmark of the input pipeline with generated JPEGs of ImageNet's size.

    python scripts/bench/input.py [--rounds 7] [--parquet]

The benchmark measures the speed of training batches relative to the JPEG decoder alone. The JPEGs have 500×375 pixels,
quality 90 and about 100 kB, and are stored as a dataset of tensorflow-datasets. With `--parquet`, they are also read
from Parquet files with row groups of 100 images and Snappy, as many data sets of the Hugging Face Hub have them.
"""

import argparse
import contextlib
import functools
import io
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

import input_pipeline as ip
from input_pipeline import shuffle
from input_pipeline.images import decode
from input_pipeline.optional import tensorflow

COMMON_PP = '|value_range(-1, 1)|onehot(1000)|keep("image", "labels")'
PP_WITHOUT_RANDAUG = "decode_jpeg_and_inception_crop(224)|flip_lr" + COMMON_PP
FULL_PP = "decode_jpeg_and_inception_crop(224)|flip_lr|randaug(2, 10)" + COMMON_PP
BATCH, BATCHES = 64, 16  # images in a batch, batches in a measurement
DECODER = "`decode_and_crop_jpeg` alone, on all cores"
CORES = len(os.sched_getaffinity(0))


def photo(seed: int, height: int = 375, width: int = 500) -> bytes:
    """Return a JPEG of noise with the 1/f spectrum of photographs, quality 90."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)) + 1 / 500
    gray, *colors = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(4, height, width))) / frequency, s=(height, width))
    pixels = np.stack([gray + color / 2 for color in colors], axis=-1)
    file = io.BytesIO()
    Image.fromarray(np.clip(120 + 50 * pixels / pixels.std(), 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def prepare(folder: str, count: int) -> ip.Source:
    """Write `count` photos as a prepared dataset and open it."""
    tensorflow()  # hides the start-up messages that importing tensorflow-datasets would print
    logging.getLogger("absl").setLevel(logging.ERROR)
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    image, label = tfds.features.Image(encoding_format="jpeg"), tfds.features.ClassLabel(num_classes=1000)
    with contextlib.redirect_stdout(io.StringIO()):  # tensorflow-datasets prints its progress
        tfds.dataset_builders.store_as_tfds_dataset(
            name="photos", version="1.0.0", data_dir=folder,
            features=tfds.features.FeaturesDict({"image": image, "label": label}),
            split_datasets={"train": [(i, {"image": photo(i), "label": i % 1000}) for i in range(count)]},
        )  # fmt: skip
    return ip.open_source("tfds", name="photos", split="train", data_dir=folder)


def write_parquet(source: ip.Source, folder: str) -> ip.Source:
    """Write the examples of a source as one Parquet file and open it with a window of half of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"image": image, "label": pa.int64()})
    with pq.ParquetWriter(f"{folder}/train-00000-of-00001.parquet", schema) as writer:
        for start in range(0, len(source), 100):
            examples = [source[i] for i in range(start, min(start + 100, len(source)))]
            rows = [{"image": {"bytes": e["image"], "path": None}, "label": e["label"]} for e in examples]
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return ip.open_source("parquet", data_dir=folder, window=len(source) // 2)


def decoder_speed(source: ip.Source, threads: int) -> float:
    """Return the images/s of the decoder alone for the crops of training, with a loop in each thread."""
    tf = tensorflow()
    work = []
    for epoch, index in (shuffle.example_at(at, len(source), 0) for at in range(BATCH * BATCHES)):
        data = source[index]["image"]
        rng = shuffle.example_rng(0, epoch, index)
        work.append((data, decode.sample_window(decode.jpeg_size(data), (0.05, 1), (0.75, 1.33), rng)))
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        for _ in pool.map(lambda job: tf.io.decode_and_crop_jpeg(job[0], job[1], channels=3), work):
            pass
        return len(work) / (time.perf_counter() - started)


def pipeline_speed(source: ip.Source, pp: str) -> float:
    """Return the images/s of the complete pipeline after the first batches."""
    batches = ip.train_batches(source, pp, BATCH, seed=0)
    for _ in range(4):
        next(batches)
    started = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    seconds = time.perf_counter() - started
    batches.close()
    return BATCH * BATCHES / seconds


def measure(source: ip.Source, rounds: int, parquet: ip.Source | None = None) -> dict[str, list[float]]:
    """Return the images/s of each row in each round, after a warm-up; `parquet` has the same examples as `source`."""
    measures: dict[str, Callable[[], float]] = {}
    measures[DECODER] = lambda: max(decoder_speed(source, CORES), decoder_speed(source, CORES + 1))
    for name, pp in {"training pp without randaug": PP_WITHOUT_RANDAUG, "training pp": FULL_PP}.items():
        on_host = ip.defer_value_range(pp)[0]
        measures[name] = functools.partial(pipeline_speed, source, on_host)
        if parquet is not None:
            measures[f"{name}, from Parquet files"] = functools.partial(pipeline_speed, parquet, on_host)
    found = [{name: speed() for name, speed in measures.items()} for _ in range(rounds + 1)]  # interleaved
    return {name: [speeds[name] for speeds in found[1:]] for name in measures}


def lines(speeds: dict[str, list[float]]) -> list[str]:
    """Return the lines of the report in Markdown, as docs/imagenet.md contains them."""
    rounds = len(speeds[DECODER])
    found = [
        f"Measured on {CORES} cores ({cpu()}); medians of {rounds} interleaved rounds, min–max:",
        "",
        "| 500×375 JPEGs to 224×224 | images/s | share of the decoder's |",
        "|---|---|---|",
    ]
    for name, values in speeds.items():
        shares = [value / most for value, most in zip(values, speeds[DECODER], strict=True)]
        of_ceiling = f"{statistics.median(shares):.0%} ({min(shares):.0%}–{max(shares):.0%})"
        rate = f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"
        found.append(f"| {name} | {rate} | {of_ceiling} |")
    return found


def main() -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each value")
    parser.add_argument("--images", type=int, default=256, help="images in the dataset")
    parser.add_argument("--parquet", action="store_true", help="measure Parquet files, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = prepare(folder, args.images)
        parquet = write_parquet(source, folder) if args.parquet else None
        print("\n".join(lines(measure(source, args.rounds, parquet))))


def cpu() -> str:
    """Return the name of the processor from Linux, or its architecture on other systems."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
