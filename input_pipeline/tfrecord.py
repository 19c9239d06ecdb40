"""Random access to the records of TFRecord and ArrayRecord files.

ArrayRecord has an index of its own. A TFRecord file is a chain of records, each `length` (u64), its checksum
(u32), the bytes, their checksum (u32); where each begins is found by walking the chain once. The offsets are
kept beside the file, or in the cache folder where that cannot be written, and made anew when the file changed.
"""

import contextlib
import functools
import hashlib
import io
import os
import struct
import sys
import uuid
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from input_pipeline.errors import InputError, ReadingError, first_line, require

HEADER, FOOTER = 12, 4  # bytes of length and checksum before a record, of checksum after it
MOST_BYTES = 1 << 31  # of a record: no message of protobuf's is longer
OPEN_FILES = 128  # files of each format that are held open; a process may have some thousand at most
RANDOM_ACCESS = "readahead_buffer_size:0,max_parallelism:0"  # options of array_record's reader


class TFRecordFile:
    """The records of one TFRecord file by number. Reading is safe from several threads.

    Raises:
      InputError: the file is missing, damaged, or cut inside a record.
    """

    def __init__(self, path: str):
        self.path = path
        self.offsets = _offsets(path)  # int64: where each record begins, and where the file ends

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, number: int) -> bytes:
        """The bytes of one record."""
        start, end = int(self.offsets[number]) + HEADER, int(self.offsets[number + 1]) - FOOTER
        data = _read(self.path, start, end - start + FOOTER)
        data, checksum = data[:-FOOTER], data[-FOOTER:]
        if len(data) != end - start or checksum != _checksum(data):
            raise InputError(f"{self.path}: record {number} is damaged: its checksum does not fit")
        return data

    def nbytes(self, first: int, last: int) -> int:
        """Bytes of the records from `first` to before `last`."""
        return int(self.offsets[last] - self.offsets[first])


class ArrayRecordFile:
    """The records of one ArrayRecord file by number; see `TFRecordFile`."""

    def __init__(self, path: str):
        self.path = path
        self.length = _reader(path, *_stat(path)).num_records()

    def __len__(self) -> int:
        return self.length

    def read(self, number: int) -> bytes:
        """The bytes of one record."""
        try:
            data: bytes = _reader(self.path, *_stat(self.path)).read([number])[0]
        except (RuntimeError, ValueError, IndexError) as e:
            raise InputError(f"{self.path}: cannot read record {number}: {first_line(e)}") from None
        return data

    def nbytes(self, first: int, last: int) -> int:
        """Bytes of the records from `first` to before `last`, taken as of equal size."""
        return _stat(self.path)[0] * (last - first) // max(1, len(self))


RecordFile = TFRecordFile | ArrayRecordFile


def open_records(path: str) -> RecordFile:
    """The records of a file, whose name says what it is, as tensorflow-datasets names them."""
    return (ArrayRecordFile if ".array_record" in Path(path).name else TFRecordFile)(path)


@functools.lru_cache(maxsize=OPEN_FILES)
def _reader(path: str, size: int, changed: int) -> Any:
    """An open ArrayRecord reader of a file in one state."""
    reader = require("array_record.python.array_record_module").ArrayRecordReader(path, RANDOM_ACCESS)
    if not reader.ok():  # the reader of a damaged file says so only when it is asked
        raise InputError(f"{path} is damaged or cut off: no ArrayRecord file")
    return reader


def _offsets(path: str) -> np.ndarray:
    """The offsets of a TFRecord file: from its index where there is a valid one, or walked and kept."""
    state = _stat(path)
    places = _index_places(path)
    for place in places:
        index = _load_index(place, state)
        if index is not None:
            return index
    _announce()
    offsets = _walk(path, state[0])
    for place in places:
        fresh = place.with_name(f"{place.name}.{uuid.uuid4().hex}")  # renamed into place, for others read it too
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(struct.pack("<2q", *state) + offsets.tobytes())
            fresh.replace(place)
            break
        except OSError:  # a folder that cannot be written; at worst the walk is done again next time
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
    return offsets


@functools.cache
def _announce() -> None:
    """Says, once, what may take minutes on a slow disk."""
    print("finding where the records of TFRecord files begin; kept for the next time", file=sys.stderr)


def _load_index(place: Path, state: tuple[int, int]) -> np.ndarray | None:
    """The offsets kept in an index, or None where there are none, or of another state of the file."""
    try:
        content = place.read_bytes()
    except OSError:
        return None
    if content[:16] != struct.pack("<2q", *state) or len(content) % 8:
        return None
    offsets = np.frombuffer(content, "<i8", offset=16)
    lengths = np.diff(offsets) - (HEADER + FOOTER)  # differences that overflow come out negative
    valid = len(offsets) and offsets[0] == 0 and offsets[-1] == state[0]
    return offsets if valid and bool(np.all((lengths >= 0) & (lengths <= MOST_BYTES))) else None


def _index_places(path: str) -> list[Path]:
    """Where the index of a file may lie, in order of preference."""
    places = [] if "://" in path else [Path(f"{path}.offsets")]
    with contextlib.suppress(RuntimeError):  # a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcvit"
        places.append(cache / f"{hashlib.sha256(path.encode()).hexdigest()[:32]}.offsets")
    return places


def _walk(path: str, size: int) -> np.ndarray:
    """The offsets of all records, from the chain of their lengths."""
    offsets = [0]
    with _open(path) as file:
        if "://" not in path and hasattr(os, "posix_fadvise"):  # twelve bytes of each record are needed, no more
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while offsets[-1] < size:
            file.seek(offsets[-1])
            header = file.read(HEADER)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == HEADER else size
            end = offsets[-1] + HEADER + length + FOOTER
            if end > size or header[8:] != _checksum(header[:8]):
                raise InputError(f"{path} is damaged or cut off in record {len(offsets) - 1}")
            if length > MOST_BYTES:
                raise InputError(f"{path}: record {len(offsets) - 1} has {length:,} bytes, more than {MOST_BYTES:,}")
            offsets.append(end)
    return np.array(offsets, "<i8")


def _checksum(data: bytes) -> bytes:
    """TFRecord's checksum: CRC-32C, turned by 15 bits and shifted by a constant, in 4 bytes."""
    crc = require("google_crc32c").value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _read(path: str, start: int, length: int) -> bytes:
    """Bytes of a file, in one call that other threads need not wait for where the file is local."""
    if "://" not in path:
        return _kept_open(path).read(start, length)
    with _open(path) as file:
        file.seek(start)
        return file.read(length)


class _LocalFile:
    """A file for reading by position, closed when the last thread that uses it lets go of it."""

    def __init__(self, path: str):
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as e:
            raise ReadingError(f"cannot read {path}: {e.strerror}") from None

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self.descriptor, length, start)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


_kept_open = functools.lru_cache(maxsize=OPEN_FILES)(_LocalFile)  # until others have taken its place


def _open(path: str) -> BinaryIO:
    """A file without read-ahead; remote ones through TensorFlow's file systems."""
    if "://" in path:
        from input_pipeline.images.decode import tensorflow

        return tensorflow().io.gfile.GFile(path, "rb")
    try:
        return io.FileIO(path)
    except OSError as e:
        raise ReadingError(f"cannot read {path}: {e.strerror}") from None


def _stat(path: str) -> tuple[int, int]:
    """(size in bytes, time of the last change in ns) of a file."""
    if "://" in path:
        from input_pipeline.images.decode import tensorflow

        found = tensorflow().io.gfile.stat(path)
        return int(found.length), int(found.mtime_nsec)
    try:
        stat = Path(path).stat()
    except OSError as e:
        raise ReadingError(f"cannot read {path}: {e.strerror}") from None
    return stat.st_size, stat.st_mtime_ns
