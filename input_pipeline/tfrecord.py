"""Random access to the records of TFRecord and ArrayRecord files.

An ArrayRecord file contains an index. A TFRecord file is a sequence of records, each of which consists of its length
(u64), the checksum of the length (u32), the data, and the checksum of the data (u32). The offsets of the records are
found by reading all lengths once. They are stored in an index next to the file, or in the user's cache folder if the
file's folder is not writable, and are computed again after the file changed.

TensorFlow reads TFRecord files only from the start, and its reader cannot seek to a record, so the format is parsed
here. The checksums are computed by google-crc32c.
"""

import bisect
import contextlib
import functools
import hashlib
import itertools
import logging
import os
import struct
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from input_pipeline import stores
from input_pipeline.errors import InputError, ReadingError, first_line
from input_pipeline.files import (
    FileState,
    OpenedFiles,
    check_unchanged,
    file_state,
    named_errors,
    record_checksum,
    store_errors,
)
from input_pipeline.optional import require
from input_pipeline.source import Source

logger = logging.getLogger(__name__)

HEADER, FOOTER = 12, 4  # bytes of the length and its checksum before the data, and of the checksum after it
OPEN_FILES = 128  # files of each format that are kept open; a process may usually open about a thousand
REMOTE_BLOCK = 1 << 20  # bytes per request while the records of a remote file are found
RANDOM_ACCESS = "readahead_buffer_size:0,max_parallelism:0"  # options of array_record's reader


class TFRecordFile:
    """The records of a TFRecord file, read by number from 0. Several threads may read at the same time.

    Raises:
      InputError: the file is missing, damaged, or cut off inside a record.
    """

    def __init__(self, path: str):
        self.path, self.state = path, file_state(path)
        self.offsets = _offsets(path, self.state)  # int64: the start of each record, and the end of the file

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, number: int) -> bytes:
        """Return the data of a record. Raises InputError if its checksum is wrong."""
        check_unchanged(self.path, self.state)
        start, end = int(self.offsets[number]) + HEADER, int(self.offsets[number + 1]) - FOOTER
        data = _read(self.path, self.state, start, end - start + FOOTER)
        data, checksum = data[:-FOOTER], data[-FOOTER:]
        if len(data) != end - start or checksum != record_checksum(data):
            check_unchanged(self.path, self.state, file_state(self.path))
            raise InputError(f"{self.path}: record {number} is damaged: its checksum is wrong")
        return data

    def nbytes(self, first: int, last: int) -> int:
        """Return the size in bytes of the records `first` to `last` - 1."""
        return int(self.offsets[last] - self.offsets[first])


class ArrayRecordFile:
    """The records of an ArrayRecord file, read by number from 0; see `TFRecordFile`."""

    def __init__(self, path: str):
        if "://" in path:
            raise InputError(f"{path}: ArrayRecord files are read from local folders only")
        self.path, self.state = path, file_state(path)
        self.length: int = _reader(path, self.state).num_records()

    def __len__(self) -> int:
        return self.length

    def read(self, number: int) -> bytes:
        """Return the data of a record. Raises InputError if it is damaged."""
        check_unchanged(self.path, self.state)
        try:
            (data,) = _reader(self.path, self.state).read([number])
        except (RuntimeError, ValueError, IndexError) as e:
            raise InputError(f"{self.path}: cannot read record {number}: {first_line(e)}") from None
        return bytes(data)

    def nbytes(self, first: int, last: int) -> int:
        """Return the size in bytes of the records `first` to `last` - 1, assuming that all have the same size."""
        return self.state.size * (last - first) // max(1, len(self))


RecordFile = TFRecordFile | ArrayRecordFile


class Shard(NamedTuple):
    """A file of records, of which `take` records after the first `skip` records are used."""

    file: RecordFile
    skip: int
    take: int


class Records(Source):
    """Base class of sources of records: those of several files, numbered from 0 in the order of the files."""

    def __init__(self, shards: Sequence[Shard], root: str | Path):
        """Open the records; `root` is the folder to which the names that identify the files are relative."""
        self.shards, files = shards, [shard.file for shard in shards]
        self.opened = OpenedFiles([file.path for file in files], root, states=[file.state for file in files])
        self.ends = list(itertools.accumulate(shard.take for shard in shards))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, index: int) -> bytes:
        """Return the data of a record. Raises InputError if it is damaged, IndexError if there are fewer records."""
        file, number = self._locate(index)
        return file.read(number)

    def describe(self, index: int) -> str:
        """Return the file of a record and its number there."""
        file, number = self._locate(index)
        return f"{file.path}, record {number}"

    def nbytes(self) -> int:
        """Return the size of all records in bytes."""
        return sum(file.nbytes(skip, skip + take) for file, skip, take in self.shards)

    def _locate(self, index: int) -> tuple[RecordFile, int]:
        part = bisect.bisect_right(self.ends, index)
        if part == len(self.shards):
            raise IndexError(index)
        file, skip, take = self.shards[part]
        return file, skip + index - (self.ends[part] - take)


def open_records(path: str) -> RecordFile:
    """Open a file of records; the format follows from tensorflow-datasets' naming convention."""
    return (ArrayRecordFile if ".array_record" in Path(path).name else TFRecordFile)(path)


def open_files(paths: Iterable[str]) -> list[RecordFile]:
    """Open files of records by several threads, because a TFRecord file without index is read to find its records."""
    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(open_records, paths))


@functools.lru_cache(maxsize=OPEN_FILES)
def _reader(path: str, state: FileState) -> Any:
    """Return the cached ArrayRecord reader of a file; `state` gives a changed file another reader."""
    reader = require("array_record.python.array_record_module").ArrayRecordReader(path, RANDOM_ACCESS)
    if not reader.ok():  # the constructor does not raise for a damaged file
        raise InputError(f"{path} is damaged or cut off: no ArrayRecord file")
    return reader


def _offsets(path: str, state: FileState) -> np.ndarray:
    """Return where each record of a TFRecord file starts, and the file's end; without a valid index, write one."""
    known = (state.size, state.changed)  # a copy has another inode
    index_paths = _index_paths(path)
    for index_path in index_paths:
        offsets = _load_index(index_path, known)
        if offsets is not None:
            return offsets
    _log_indexing()
    offsets = _find_records(path, state.size)
    for index_path in index_paths:
        temporary = index_path.with_name(f"{index_path.name}.{uuid.uuid4().hex}")  # renamed for concurrent readers
        try:
            index_path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(struct.pack("<2q", *known) + offsets.tobytes())
            temporary.replace(index_path)
            break
        except OSError:  # the folder is not writable; without an index, the next start reads the lengths again
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    return offsets


@functools.cache
def _log_indexing() -> None:
    """Log once per process that TFRecord files are searched for records, which may take minutes on a slow disk."""
    logger.info("finding the records of TFRecord files; their offsets are stored for the next start")


def _load_index(path: Path, state: tuple[int, int]) -> np.ndarray | None:
    """Return the offsets that an index stores, or None if it is missing, damaged or for another state of the file."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if content[:16] != struct.pack("<2q", *state) or len(content) % 8:
        return None
    offsets = np.frombuffer(content, "<i8", offset=16)
    return offsets if len(offsets) and offsets[-1] == state[0] else None


def _index_paths(path: str) -> list[Path]:
    """Return the possible paths of the index of a TFRecord file: beside it, then in the user's cache folder."""
    paths = [] if "://" in path else [Path(f"{path}.offsets")]
    with contextlib.suppress(RuntimeError):  # the user has no home folder
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcvit"
        paths.append(cache / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.offsets")
    return paths


def _find_records(path: str, size: int) -> np.ndarray:
    """Return the offsets of all records in a TFRecord file, and its end, found by following their lengths."""
    offsets = [0]
    with _open(path) as file:
        if "://" not in path and hasattr(os, "posix_fadvise"):  # avoid read-ahead: each record needs 12 bytes
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while offsets[-1] < size:
            file.seek(offsets[-1])
            header = file.read(HEADER)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == HEADER else size
            end = offsets[-1] + HEADER + length + FOOTER
            if end > size or header[8:] != record_checksum(header[:8]):
                raise InputError(f"{path} is damaged or cut off in record {len(offsets) - 1}")
            offsets.append(end)
    return np.array(offsets, "<i8")


def _read(path: str, state: FileState, start: int, length: int) -> bytes:
    """Return `length` bytes of a file from byte `start` on. Reading local files does not block other threads."""
    if "://" not in path:
        return _kept_open(path, state).read(start, length)
    with store_errors(path):
        data: bytes = stores.filesystem(path).cat_file(path, start=start, end=start + length)
        return data


class _LocalFile:
    """An open local file that threads read at any position. It is closed when no thread refers to it any more.

    The state of the file is only part of the key by which it is kept open.
    """

    def __init__(self, path: str, _: FileState):
        self.descriptor = -1
        with named_errors(path, error=ReadingError):
            self.descriptor = os.open(path, os.O_RDONLY)

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self.descriptor, length, start)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


_kept_open = functools.lru_cache(maxsize=OPEN_FILES)(_LocalFile)


@contextlib.contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading its records' lengths, a remote one in large pieces."""
    if "://" in path:
        with store_errors(path), stores.filesystem(path).open(path, "rb", block_size=REMOTE_BLOCK) as remote:
            yield remote
    else:
        with named_errors(path, error=ReadingError), open(path, "rb", buffering=0) as local:  # noqa: PTH123
            yield local
