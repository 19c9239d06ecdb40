"""Benchmark of the input pipeline with generated JPEGs of ImageNet's size.

    python scripts/bench/input.py [--rounds 7] [--parquet] [--json input.json]

The benchmark measures the speed of training batches relative to the JPEG decoder alone, the time to the first batch of
a resumed run, and the memory of the process. The JPEGs have 500×375 pixels, quality 90 and about 100 kB, and are stored
as a dataset of tensorflow-datasets. With `--parquet`, they are also read from Parquet files with row groups of 100
images and Snappy, as many data sets of the Hugging Face Hub have them.
"""

import argparse
import contextlib
import functools
import io
import itertools
import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias, TypedDict

import numpy as np
from PIL import Image

import input_pipeline as ip
from input_pipeline import shuffle
from input_pipeline.images import decode
from input_pipeline.optional import tensorflow
from input_pipeline.source import Example

COMMON_PP = '|value_range(-1, 1)|onehot(1000)|keep("image", "labels")'
PP_WITHOUT_RANDAUG = "decode_jpeg_and_inception_crop(224)|flip_lr" + COMMON_PP
FULL_PP = "decode_jpeg_and_inception_crop(224)|flip_lr|randaug(2, 10)" + COMMON_PP
BATCH, BATCHES = 64, 16  # images in a batch, batches in a measurement
DECODER = "`decode_and_crop_jpeg` alone, on all cores"
IMAGENET_EXAMPLES = 1_281_167
CORES = len(os.sched_getaffinity(0))


Range: TypeAlias = dict[str, float]  # median, minimum and maximum of the rounds, as "median", "min" and "max"


class Result(TypedDict):
    """All measurements, as `--json` writes them."""

    machine: str
    rounds: int
    images_per_second: dict[str, Range]
    share_of_ceiling: dict[str, Range]
    first_batch_seconds: dict[str, Range]
    resident_megabytes: dict[str, float]


class RepeatedSource(ip.Source):
    """A source that repeats the examples of another source up to a given length."""

    def __init__(self, source: ip.Source, length: int):
        self.source, self.length = source, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        return self.source[index % len(self.source)]

    def describe(self, index: int) -> str:
        return self.source.describe(index % len(self.source))

    def nbytes(self) -> int:
        return self.source.nbytes() * self.length // len(self.source)


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


def first_batch_seconds(source: ip.Source, step: int) -> float:
    """Return the seconds until the batch of a step is ready, without cached permutations."""
    shuffle.permutation.cache_clear()
    started = time.perf_counter()
    batches = ip.train_batches(source, PP_WITHOUT_RANDAUG, BATCH, seed=0, start_step=step)
    next(batches)
    seconds = time.perf_counter() - started
    batches.close()
    return seconds


def resident_megabytes() -> float:
    """Return the resident memory of the process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def memory_growth(source: ip.Source, batches: int) -> Iterator[tuple[str, float]]:
    """Yield (number of batches, resident memory in MB) after each tenth of a stream."""
    stream = ip.train_batches(source, FULL_PP, 16, seed=0)
    for number, _ in enumerate(itertools.islice(stream, batches), start=1):
        if number % (batches // 10) == 0:
            yield str(number), resident_megabytes()
    stream.close()


def interleaved(rounds: int, measures: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run all measurements in turn in each round, after a warm-up round, and return the values of each."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds + 1):
        for name, measure in measures.items():
            value = measure()
            if number:
                found[name].append(value)
    return found


def summary(values: list[float]) -> Range:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def lines(result: Result) -> list[str]:
    """Return the lines of the report in Markdown, as docs/tutorials/imagenet.md contains them."""
    found = [
        f"Measured on {result['machine']}; medians of {result['rounds']} interleaved rounds, min–max:",
        "",
        "| 500×375 JPEGs to 224×224 | images/s | share of the decoder's |",
        "|---|---|---|",
    ]
    for name, v in result["images_per_second"].items():
        share = result["share_of_ceiling"][name]
        of_ceiling = f"{share['median']:.0%} ({share['min']:.0%}–{share['max']:.0%})"
        found.append(f"| {name} | {v['median']:,.0f} ({v['min']:,.0f}–{v['max']:,.0f}) | {of_ceiling} |")
    total = f"{IMAGENET_EXAMPLES:,}"
    early, late = (result["first_batch_seconds"][step]["median"] for step in ("1", "100000"))
    memory = list(result["resident_megabytes"].items())
    return [
        *found,
        "",
        f"A run that resumes among {total} examples has its first batch after {early:.3f} s at step 1 and after",
        f"{late:.3f} s at step 100,000. The process uses {memory[0][1]:.0f} MB after {int(memory[0][0]):,} batches and",
        f"{memory[-1][1]:.0f} MB after {int(memory[-1][0]):,}.",
    ]


def measure(source: ip.Source, rounds: int, batches: int, parquet: ip.Source | None = None) -> Result:
    """Run all measurements; `parquet` has the same examples as `source`."""
    on_host = {"training pp without randaug": PP_WITHOUT_RANDAUG, "training pp": FULL_PP}
    measures: dict[str, Callable[[], float]] = {}
    measures[DECODER] = lambda: max(decoder_speed(source, CORES), decoder_speed(source, CORES + 1))
    for name, pp in on_host.items():
        measures[name] = functools.partial(pipeline_speed, source, ip.defer_value_range(pp)[0])
    for name, pp in on_host.items():
        measures[f"{name}, value_range on the host too"] = functools.partial(pipeline_speed, source, pp)
        if parquet is not None:
            options = parquet, ip.defer_value_range(pp)[0]
            measures[f"{name}, from Parquet files"] = functools.partial(pipeline_speed, *options)
    speed = interleaved(rounds, measures)
    large = RepeatedSource(source, IMAGENET_EXAMPLES)
    start = interleaved(
        rounds, {str(step): functools.partial(first_batch_seconds, large, step) for step in (1, 100_000)}
    )
    shares = {k: [one / most for one, most in zip(v, speed[DECODER], strict=True)] for k, v in speed.items()}
    return {
        "machine": f"{CORES} cores ({cpu()})",
        "rounds": rounds,
        "images_per_second": {k: summary(v) for k, v in speed.items()},
        "share_of_ceiling": {k: summary(v) for k, v in shares.items()},
        "first_batch_seconds": {k: summary(v) for k, v in start.items()},
        "resident_megabytes": dict(memory_growth(source, batches)),
    }


def main() -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each value")
    parser.add_argument("--images", type=int, default=256, help="images in the dataset")
    parser.add_argument("--batches", type=int, default=2000, help="batches of 16 images for the memory measurement")
    parser.add_argument("--parquet", action="store_true", help="measure Parquet files, too")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = prepare(folder, args.images)
        parquet = write_parquet(source, folder) if args.parquet else None
        result = measure(source, args.rounds, args.batches, parquet)
    print("\n".join(lines(result)))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def cpu() -> str:
    """Return the name of the processor from Linux, or its architecture on other systems."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
