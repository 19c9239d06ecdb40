"""Files that a user names: `~` in paths, listing of folders, reading of whole files, and detection of changed files."""

from __future__ import annotations

import array
import contextlib
import functools
import hashlib
import itertools
import os
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from input_pipeline import stores
from input_pipeline.errors import InputError, ReadingError, first_line_with_type
from input_pipeline.optional import require

CHECK_SECONDS = 10  # between two requests for the state of a remote file
ENTRIES = 64  # hashes that identify the files of a source
PIECES, PIECE_BYTES = 1 << 12, 1 << 16  # of the content of all files together, 256 MiB


def expand(path: str | Path) -> Path:
    """Return a path with `~` and `~user` expanded.

    Raises:
      InputError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path}: there is no user {Path(path).parts[0].removeprefix('~')!r}") from None


@contextlib.contextmanager
def named_errors(path: str | Path, action: str = "read", error: type[InputError] = InputError) -> Iterator[None]:
    """Convert an OSError inside the context to an `error` of one line, "cannot ACTION PATH: REASON"."""
    try:
        yield
    except OSError as e:
        raise error(f"cannot {action} {path}: {e.strerror}") from None


@contextlib.contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Convert any error of a store's library inside the context to a ReadingError of one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as e:
        raise ReadingError(f"cannot read {url}: {first_line_with_type(e)}") from None


def files_below(folder: str | Path) -> Iterator[str]:
    """Yield the paths of the files in a folder and its subfolders, however deep; links to folders are not followed.

    Hidden files and hidden folders, whose names begin with a dot, are ignored.

    Raises:
      InputError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from None

    for inside, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            file = os.path.join(inside, name)  # noqa: PTH118 - there may be a million
            if not name.startswith(".") and os.path.isfile(file):  # noqa: PTH113 - a link to itself is no file
                yield file


class FileState(NamedTuple):
    """Properties of a file that differ after it was changed or replaced."""

    inode: int  # modulo 2⁶³; 0 for remote files
    size: int  # in bytes
    changed: int  # time of the last change in ns; of a remote file, a hash of its version
    replaced: int = 0  # time of the last change of its name or mode, too


def file_state(path: str) -> FileState:
    """Return the state of a file. Raises ReadingError if it is missing."""
    if "://" in path:
        with store_errors(path):
            found = stores.filesystem(path).info(path)
        version = hashlib.blake2b(str(found.get("ETag", found.get("generation"))).encode(), digest_size=7).digest()
        return FileState(0, int(found["size"]), int.from_bytes(version))
    with named_errors(path, error=ReadingError):
        return _local_state(os.stat(path))  # noqa: PTH116 - sources may have a million files


def _local_state(status: os.stat_result) -> FileState:
    return FileState(status.st_ino & ((1 << 63) - 1), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def check_unchanged(path: str, state: FileState, found: FileState | None = None) -> None:
    """Raise ReadingError if the state of a file is not `state` any more.

    A new inode or mode alone does not count: FUSE file systems may change the inode of an unchanged file. The state of
    a remote file, which takes a request, is found at most once in CHECK_SECONDS.

    Args:
      path: the file.
      state: the state that it should have.
      found: the state that it has, if it is known.
    """
    if found is None and "://" in path and _remote_state(path, int(time.monotonic() / CHECK_SECONDS)) == state:
        return
    found = found or file_state(path)
    is_other = found.inode != state.inode and found.replaced != state.replaced
    if is_other or (found.size, found.changed) != (state.size, state.changed):
        raise ReadingError(f"{path} was changed or replaced after it was opened")


@functools.lru_cache(maxsize=1 << 14)
def _remote_state(path: str, period: int) -> FileState:
    """Return the state of a remote file in a period of time."""
    return file_state(path)


class OpenedFiles:
    """The files of a data source, in order, and their states when it was opened."""

    def __init__(
        self, paths: Sequence[str], root: str | Path, whole: int = 0, states: Sequence[FileState] | None = None
    ):
        """
        Args:
          paths: the files.
          root: folder to which the names that identify the files are relative.
          whole: number of files at the start whose content is hashed completely, however many files there are.
          states: the states of the files, if they are known.

        Raises:
          ReadingError: a file is missing.
        """
        self.paths, self.root, self.whole = paths, f"{root}/", whole
        size = max(1, len(paths) // 64)
        parts = (paths[start : start + size] for start in range(0, len(paths), size))
        with ThreadPoolExecutor(16) as pool:  # remote files take long
            found = states or itertools.chain.from_iterable(pool.map(lambda part: [*map(file_state, part)], parts))
            # The numbers of each file: a million tuples need much more memory, and commands start faster without numpy.
            self.states = array.array("q", itertools.chain.from_iterable(found))

    def state(self, number: int) -> FileState:
        """Return the state that the file `number` had when it was opened."""
        fields = len(FileState._fields)
        return FileState(*self.states[fields * number : fields * (number + 1)])

    def read(self, number: int) -> bytes:
        """Return the content of a local file. Raises ReadingError if it cannot be read or was changed."""
        path = self.paths[number]
        with named_errors(path, error=ReadingError), open(path, "rb", buffering=0) as file:  # noqa: PTH123
            check_unchanged(path, self.state(number), _local_state(os.fstat(file.fileno())))
            return file.readall()

    def nbytes(self) -> int:
        """Return the size of all files in bytes."""
        return sum(self.states[1 :: len(FileState._fields)])

    def digests(self) -> dict[str, str]:
        """Return hashes of names, sizes and content, by groups of consecutive files; a copy of the files has the same.

        Up to PIECES · PIECE_BYTES of content are hashed completely. Of more content, pieces at regular distances and
        the end of each file are hashed. Of more than PIECES files, only some at regular distances are read. The content
        of remote files is not read.

        Raises:
          ReadingError: a file cannot be read, or was changed or replaced after it was opened.
        """
        count, whole = len(self.paths), self.nbytes() <= PIECES * PIECE_BYTES
        ends = [count * i // ENTRIES for i in range(ENTRIES + 1)] if count > ENTRIES else [*range(count + 1)]
        found = {}
        for start, end in itertools.pairwise(ends):
            digest = hashlib.blake2b(digest_size=16)
            for number in range(start, end):
                digest.update(f"{self.name(number)}\0{self.state(number).size}\0".encode(errors="surrogateescape"))
                if (number < self.whole or number % -(-count // PIECES) == 0) and "://" not in self.paths[number]:
                    self._add_content(digest, number, whole or number < self.whole)
            names = dict.fromkeys((self.name(start), self.name(end - 1)))
            found[" … ".join(names)] = digest.hexdigest()
        return found

    def name(self, number: int) -> str:
        """Return the path of a file relative to the root, which a copy of the files has, too."""
        return self.paths[number].removeprefix(self.root)

    def _add_content(self, digest: hashlib.blake2b, number: int, whole: bool) -> None:
        """Add pieces of file `number` to a hash, or all of it if `whole`; the last piece is the end of the file."""
        path, size = self.paths[number], self.state(number).size
        pieces = max(1, -(-size // PIECE_BYTES) if whole else PIECES // len(self.paths))
        check_unchanged(path, self.state(number))
        with named_errors(path, error=ReadingError), open(path, "rb") as file:  # noqa: PTH123
            for i in range(1, pieces + 1):
                file.seek(max(0, size * i // pieces - PIECE_BYTES))
                digest.update(file.read(PIECE_BYTES))


def record(data: bytes) -> bytes:
    """Return data as a record of a TFRecord file. Raises MissingLibraryError if google-crc32c is not installed."""
    length = struct.pack("<Q", len(data))
    return length + record_checksum(length) + data + record_checksum(data)


def record_checksum(data: bytes) -> bytes:
    """Return TFRecord's checksum: the CRC-32C, rotated right by 15 bits, plus a constant, as 4 bytes."""
    crc = require("google_crc32c").value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
