"""Images in Parquet files as the Hugging Face Hub stores them: DATA_DIR/[data/]SPLIT-00000-of-00294.parquet.

A row group is the smallest unit that can be read, because its pages are compressed and, in most files, one page holds
all of its images. Training therefore shuffles within a window of row groups (`input_pipeline.shuffle.permutation`),
so that each row group is read once in an epoch, and the row groups in use stay in memory.
"""

import functools
import json
import logging
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from input_pipeline import memory
from input_pipeline import source as base
from input_pipeline.errors import InputError, MissingDataError, ReadingError, check_split
from input_pipeline.files import FileState, OpenedFiles, check_unchanged, expand, named_errors
from input_pipeline.optional import require
from input_pipeline.parquet_files import open_parquet, place, read_batches
from input_pipeline.shuffle import Blocks

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

logger = logging.getLogger(__name__)

SHARD_NUMBER = re.compile(r"-(\d{5}-of-(\d{5}))(-[0-9a-f]{16})?$")  # older files have a hash, too
ROW_BYTES = 160  # memory for each row besides the bytes of its image
RESERVE = 1.25  # memory for row groups, in windows; with less, several hosts would read row groups repeatedly


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows of a Parquet file that are read together; `nbytes` is the memory that they are expected to need."""

    path: str
    state: FileState
    number: int
    first_row: int
    rows: int
    nbytes: int


class File(NamedTuple):
    """A Parquet file: its columns' types, class names, row groups, and whether the first group has one label only."""

    path: str
    types: tuple["pa.DataType", "pa.DataType"]
    class_names: tuple[str, ...] | None
    groups: list[RowGroup]
    has_one_class: bool


class Columns(NamedTuple):
    """The images and labels of a row group."""

    images: list[bytes | None]
    labels: "pa.Array"


class Source(base.Source):
    """Images of one split. An example is `image` (the bytes of the image file) and `label` (int).

    The label is -1 if it is unknown: null, or -1 in the file.

    Class names are those of the metadata that the library `datasets` stores in a file. Parquet files usually contain
    no checksums; where they do, they are verified.
    """

    def __init__(
        self, data_dir: str, split: str = "train", image: str = "image", label: str = "label", window: int = 10_000
    ):
        """
        Args:
          data_dir: folder of the files, or a folder whose subfolder `data` contains them.
          split: the part of the names before the number, such as "train" or "validation".
          image: name of the column of images, either binary or a struct with the field `bytes`.
          label: name of the column of labels, integers.
          window: number of images among which training shuffles. They are kept in memory.

        Raises:
          MissingDataError: the folder does not exist or has no Parquet files.
          InputError: the split is unknown, a shard is missing or damaged, a column is missing or of another type, the
            files differ in their columns, or the window needs more memory than is available.
        """
        require("pyarrow.parquet")  # before any other error
        if window < 1:
            raise InputError(f"window={window} should be 1 or more")
        paths = _shards(data_dir, split)
        self.opened = OpenedFiles(paths, Path(paths[0]).parent)
        with ThreadPoolExecutor(16) as threads:
            states = map(self.opened.state, range(len(paths)))
            files = list(threads.map(lambda path, state: _open(path, state, image, label), paths, states))
        for file in files:
            if (file.types, file.class_names) != (files[0].types, files[0].class_names):
                raise InputError(
                    f"{file.path} and {files[0].path} differ in the types or class names of {image!r} and {label!r}"
                )
        self.files, self.columns, self.window, self.class_names = files, (image, label), window, files[0].class_names
        self.groups = [group for file in files for group in file.groups]
        self.ends = np.cumsum([group.rows for group in self.groups])
        classes = "unnamed classes" if self.class_names is None else f"{len(self.class_names):,} classes"
        logger.info("%s, %s: %s images of %s in Parquet files", expand(data_dir), split, f"{len(self):,}", classes)
        self.cached = _RowGroups(self._limit(data_dir), lambda group: _read(group, image, label))

    @functools.cached_property
    def blocks(self) -> Blocks:  # type: ignore[override]  # an attribute of others
        """The row groups as blocks to shuffle; a warning is logged if their rows are sorted by class."""
        if sum(file.has_one_class for file in self.files) > len(self.files) / 2 and self.window < len(self):
            logger.warning(
                "%s and other files are sorted by class, so training batches have few classes at a time; write them in "
                "random order, or set a larger window than %s", self.files[0].path, f"{self.window:,}"
            )  # fmt: skip
        return Blocks(np.array([group.rows for group in self.groups], np.int64), self.window)

    @functools.cached_property
    def labels(self) -> np.ndarray:  # type: ignore[override]
        """The labels of all rows, int32, and -1 for null ones; the columns of labels are read when they are needed."""
        found = []
        for file in self.files:
            with open_parquet(file.path) as opened:
                for group in file.groups:
                    check_unchanged(group.path, group.state)
                    labels = _labels(opened, group.number, self.columns[1])
                    found.append(labels.cast("int64").fill_null(-1).to_numpy().astype(np.int32))
        return np.concatenate(found)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.groups else 0

    def __getitem__(self, index: int) -> base.Example:
        group, row = self._locate(index)
        columns = self.cached.get(group)
        image, label = columns.images[row], columns.labels[row].as_py()
        if image is None:
            raise InputError("the image is null")
        label = -1 if label is None else label
        if self.class_names is not None and not -1 <= label < len(self.class_names):
            classes = f"{len(self.class_names)} classes, from 0, or -1 for unknown"
            raise InputError(f"{self.columns[1]}={label} is not one of the {classes}")
        return {"image": image, "label": label}

    def describe(self, index: int) -> str:
        """Return the file and row of an example."""
        group, row = self._locate(index)
        return f"{group.path}, row {group.first_row + row}"

    def nbytes(self) -> int:
        """Return the memory in bytes that all images and labels are expected to need, without compression."""
        return sum(group.nbytes for group in self.groups)

    def _limit(self, data_dir: str) -> int:
        """Return the memory in bytes for the row groups of a window. InputError if it is not available."""
        if not self.groups:
            return 0
        in_window = int(RESERVE * self.window * self.nbytes() / len(self))
        limit = min(self.nbytes(), in_window + 4 * max(group.nbytes for group in self.groups))
        available = memory.available()
        if available is not None and limit > available:
            raise InputError(
                f"window={self.window} of {data_dir} would keep {limit / 1e9:.1f} GB of row groups in memory, but only "
                f"{available / 1e9:.1f} GB are available; set a smaller window"
            )
        return limit

    def _locate(self, index: int) -> tuple[RowGroup, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        if number == len(self.groups):
            raise IndexError(index)
        group = self.groups[number]
        return group, index - (int(self.ends[number]) - group.rows)


class _RowGroups:
    """The row groups that a source keeps in memory, up to a limit in bytes. Several threads may read.

    A row group is dropped after as many reads as it has rows, or when it was not used for the longest time.
    """

    def __init__(self, limit: int, read: Callable[[RowGroup], Columns]) -> None:
        self.limit, self.read, self.nbytes = limit, read, 0
        self.entries: OrderedDict[RowGroup, Future[Columns]] = OrderedDict()
        self.reads: Counter[RowGroup] = Counter()
        self.lock = threading.Lock()

    def get(self, group: RowGroup) -> Columns:
        """Return the images and labels of a row group; the first thread that needs it reads it from its file."""
        with self.lock:
            missing = group not in self.entries
            if missing:
                self.entries[group] = Future()
                self.nbytes += group.nbytes
            future = self.entries[group]
            self.entries.move_to_end(group)
            self.reads[group] += 1
            if self.reads[group] == group.rows:
                self._drop(group)
            while self.nbytes > self.limit and len(self.entries) > 1:
                self._drop(next(iter(self.entries)))
        if missing:
            try:
                future.set_result(self.read(group))
            except BaseException as e:
                future.set_exception(e)
                if not isinstance(e, InputError) or isinstance(e, ReadingError):  # damage is there at the next read too
                    with self.lock:
                        self._drop(group)
        return future.result()

    def _drop(self, group: RowGroup) -> None:
        """Release a row group; threads that already have it keep it."""
        if self.entries.pop(group, None) is not None:
            self.nbytes -= group.nbytes
        self.reads.pop(group, None)


def _shards(data_dir: str, split: str) -> list[str]:
    """Return the files of a split in the order of their numbers. Raises InputError if one is missing."""
    root = expand(data_dir)
    splits = _splits(root)
    if not splits:
        raise MissingDataError(f"no folder {root}, or no Parquet files (*.parquet) in it and its folder `data`")
    check_split(str(root), split, splits)
    chosen = splits[split]
    numbers = [SHARD_NUMBER.search(file.stem) for file in chosen]
    count = int(numbers[0][2]) if numbers[0] else 1
    found = [number[1] if number else "" for number in numbers]
    expected = [f"{i:05}-of-{count:05}" for i in range(count)] if numbers[0] else [""]
    if found != expected:
        missing = sorted({*expected} - {*found})
        reason = f"; the file {split}-{missing[0]}.parquet is missing, download it" if missing else ""
        raise InputError(f"{root}: split {split!r} has {len(found)} files, but {count} by {chosen[0].name}{reason}")
    return [str(file) for file in chosen]


def _splits(root: Path) -> dict[str, list[Path]]:
    """Return the sorted files of each split in a folder or, if it has none, in its folder `data`."""
    splits: dict[str, list[Path]] = {}
    for folder in (root, root / "data"):
        with named_errors(folder):
            inside = sorted(folder.iterdir()) if folder.is_dir() and not splits else []
        for file in inside:
            if file.suffix == ".parquet" and not file.name.startswith("."):
                splits.setdefault(SHARD_NUMBER.sub("", file.stem), []).append(file)
    return splits


def options_of_folder(options: Mapping[str, object]) -> dict[str, object] | None:
    """Convert the options of kind "folder" to kind "parquet"; return None if the folder does not hold Parquet files.

    A folder that holds other folders than `data` is one of image files. If there are no files of a split "val", the
    option split="val" becomes "validation" or "test"; split=None becomes "train".

    Raises:
      InputError: `val_fraction` is set.
    """
    root, found = expand(str(options.get("data_dir", ""))), dict(options)
    splits = _splits(root)
    if not splits or any(entry.is_dir() and entry.name != "data" for entry in root.glob("[!.]*")):
        return None
    if found.pop("val_fraction", None) is not None:
        raise InputError(
            f"{root} holds Parquet files, of which val_fraction selects no rows: set `part` of the training data and "
            f"of the evaluator, and split={min(splits, key=lambda name: name != 'train')!r}"
        )
    if found.get("split", "") is None:
        found["split"] = "train"
    if found.get("split") == "val":
        found["split"] = next((split for split in ("val", "validation", "test") if split in splits), "val")
    return found


def _open(path: str, state: FileState, image: str, label: str) -> File:
    """Return the description of a Parquet file, from its footer and the labels of its first row group."""
    pa = require("pyarrow")
    with open_parquet(path) as opened:
        schema, metadata = opened.schema_arrow, opened.metadata
        for name in (image, label):
            place(path, name, schema.names)
        types = images, labels = schema.field(image).type, schema.field(label).type
        encoded = images.field("bytes").type if pa.types.is_struct(images) and "bytes" in images.names else images
        if not pa.types.is_binary(encoded) and not pa.types.is_large_binary(encoded):
            raise InputError(f"{path}: the column {image!r} should contain the bytes of image files, not {images}")
        if not pa.types.is_integer(labels):
            raise InputError(f"{path}: the column {label!r} should contain integers, not {labels}")
        first = _labels(opened, 0, label).to_pylist() if metadata.num_row_groups else []
    groups, start = [], 0
    for number in range(metadata.num_row_groups):
        part = metadata.row_group(number)
        if part.num_rows:
            nbytes = part.total_byte_size + ROW_BYTES * part.num_rows
            groups.append(RowGroup(path, state, number, start, part.num_rows, nbytes))
        start += part.num_rows
    class_names = _class_names(path, schema.metadata or {}, label)
    return File(path, types, class_names, groups, len(first) > 1 and len({*first}) == 1)


def _class_names(path: str, metadata: Mapping[bytes, bytes], label: str) -> tuple[str, ...] | None:
    """Return the names of the classes from the metadata of the library `datasets`, or None if there are none."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        names = features.get(label, {}).get("names")
    except (ValueError, AttributeError):
        raise InputError(f"{path}: the metadata `huggingface` of its schema is damaged") from None
    return None if names is None else tuple(names)


def _labels(opened: "ParquetFile", number: int, label: str) -> "pa.Array":
    """Return the labels of row group `number`."""
    return opened.read_row_group(number, columns=[label], use_threads=False)[label].combine_chunks()


def _read(group: RowGroup, image: str, label: str) -> Columns:
    """Return the images and labels of a row group. Raises InputError if it is damaged, or the file was changed."""
    check_unchanged(group.path, group.state)
    images: list[bytes | None] = []
    with open_parquet(group.path, f"row group {group.number}") as opened:
        is_struct = opened.schema_arrow.field(image).type.num_fields
        for batch in read_batches(opened, group.number, [f"{image}.bytes" if is_struct else image]):
            column = batch.column(image)
            images += (column.flatten()[0] if is_struct else column).to_pylist()
        return Columns(images, _labels(opened, group.number, label))
