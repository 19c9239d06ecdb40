"""Search for damaged examples, and statistics of images: every example of a source is read and decoded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Num

from input_pipeline.errors import InputError, MissingLibraryError, first_line_with_type
from input_pipeline.images.decode import jpeg_warning
from input_pipeline.loader import thread_count
from input_pipeline.preprocess.builder import Preprocess, checking, decoding, encoded_key
from input_pipeline.source import Source, open_source

CLASSES = "{num_classes}"
PIECE, PIECES = 32, 4  # examples that a thread reads at a time, and how often until the progress is shown


class Channel(NamedTuple):
    """Statistics of all pixels of one channel; `std` is that of the population, with the divisor n."""

    mean: float
    std: float
    min: float
    max: float


class Statistics:
    """Accumulator of the statistics of images.

    All sums are float64. Two sets of n and m pixels, with a difference d of their means, are merged as by Chan et al.
    (1983), so that nothing cancels: their sums S of squared distances from the mean become S_n + S_m + d²·n·m/(n + m).
    """

    def __init__(self) -> None:
        """Start without images."""
        self.count = 0
        self.means = self.squares = self.least = self.most = np.zeros(0)  # of each channel; `squares` are the S above

    def add(self, image: Num[np.ndarray, "height width channels"]) -> None:
        """Add the pixels of an image. Raises InputError if it has other channels than those before."""
        pixels = image.reshape(-1, image.shape[-1])
        other = Statistics()
        other.count = len(pixels)
        other.means = np.array([channel.mean(dtype=np.float64) for channel in pixels.T])
        other.squares = np.array([channel.var(dtype=np.float64) for channel in pixels.T]) * len(pixels)
        other.least, other.most = pixels.min(axis=0), pixels.max(axis=0)
        self.update(other)

    def update(self, other: Statistics) -> None:
        """Add the images of another accumulator. Raises InputError if they have other channels."""
        if not other.count:
            return
        if not self.count:
            self.count, self.means, self.squares = other.count, other.means, other.squares
            self.least, self.most = other.least, other.most
            return
        if len(other.means) != len(self.means):
            raise InputError(f"the image has {len(other.means)} channels, others {len(self.means)}")
        total, apart = self.count + other.count, other.means - self.means
        self.means = self.means + apart * (other.count / total)
        self.squares = self.squares + other.squares + apart**2 * (self.count * other.count / total)
        self.least, self.most = np.minimum(self.least, other.least), np.maximum(self.most, other.most)
        self.count = total

    def channels(self) -> list[Channel]:
        """Return the statistics of each channel; empty without images."""
        stds = np.sqrt(self.squares / max(1, self.count))
        return [Channel(*map(float, found)) for found in zip(self.means, stds, self.least, self.most, strict=True)]


def value_range(channels: Sequence[Channel]) -> str:
    """Return the op `vgg_value_range` with mean and standard deviation, or 1 where that is 0, to seven digits."""
    means = tuple(float(f"{channel.mean:.7g}") for channel in channels)
    stds = tuple(float(f"{channel.std or 1:.7g}") for channel in channels)
    return f"vgg_value_range({means}, {stds})"


class Damage(NamedTuple):
    """A damaged example: its location, such as "file:line", and the reason, the text of the error."""

    location: str
    reason: str


class Report(NamedTuple):
    """The result for one source.

    Fields:
      checked: the number of examples that were read.
      damaged: the damaged ones.
      channels: the statistics of each channel of the images that are not damaged, if they were asked for.
    """

    checked: int
    damaged: list[Damage]
    channels: Sequence[Channel] = ()


def check_data(
    data: Mapping[str, object], pp: str, on_progress: Callable[[int, int], None], statistics: bool = False
) -> Report:
    """Read every example of a data source, decode it completely if `pp` decodes images, and check its labels.

    Text is read when its source is opened, which fails at the first damaged line.

    Args:
      data: the arguments of `open_source`.
      pp: the preprocessing string; "{num_classes}" stands for the number of the data's class names.
      on_progress: called with the number of examples checked so far, and the number of all.
      statistics: also compute the statistics of the images as they are decoded, over all pixels.

    Raises:
      MissingDataError: the data does not exist.
      InputError: an option is invalid, or the source cannot be opened.
      ReadingError: an optional library is not installed.
    """
    Preprocess(pp.replace(CLASSES, "1"))
    source = open_source(**data)  # type: ignore[arg-type]  # open_source checks the options
    if CLASSES in pp and not source.class_names:  # training asks for a number
        decode = Preprocess(decoding(pp.replace(CLASSES, "1")))
    else:
        decode = Preprocess(checking(pp.replace(CLASSES, str(len(source.class_names or ())))))
    if statistics and not decoding(pp.replace(CLASSES, "1")) and not isinstance(source[0].get("image"), np.ndarray):
        raise InputError(f"the statistics of images need an op that decodes them, found the preprocessing {pp!r}")
    damaged, measured, key = list[Damage](), Statistics(), encoded_key(pp.replace(CLASSES, "1"))
    rows = range(len(source))
    size = PIECE * PIECES * thread_count()
    with ThreadPoolExecutor(thread_count(), thread_name_prefix="check") as pool:
        try:
            for part in (rows[start : start + size] for start in range(0, len(rows), size)):
                pieces = [part[start : start + PIECE] for start in range(0, len(part), PIECE)]
                for lines, images in pool.map(lambda rows: _read(source, rows, decode, key, statistics), pieces):
                    damaged += lines
                    measured.update(images)
                on_progress(part.stop, len(source))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return Report(len(source), damaged, measured.channels())


def _read(
    source: Source, rows: range, decode: Preprocess, key: str | None, measure: bool
) -> tuple[list[Damage], Statistics]:
    """Return the examples with the indices `rows` that cannot be read, are not accepted by `decode`, or are damaged.

    `key` names the encoded images. The second result has the statistics of the other examples' images, if `measure`.
    """
    found, statistics = [], Statistics()
    for row in rows:
        try:
            stored = source[row]
            example = decode(stored, np.random.default_rng(0))
            image = stored.get(key) if key else None
            if isinstance(image, bytes) and (warning := jpeg_warning(image)):
                found.append(Damage(source.describe(row), f"decoded, but {warning}"))
            elif measure:
                statistics.add(example["image"])
        except (MemoryError, MissingLibraryError):  # concern every example
            raise
        except Exception as e:
            found.append(Damage(source.describe(row), str(e) if isinstance(e, InputError) else first_line_with_type(e)))
    return found, statistics
