"""Paths, folders and files that a user names: `~` in paths, files in folders, and files that are read completely."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from input_pipeline.errors import InputError

MAX_SHOWN = 500  # characters of a path that is too long
MAX_BYTES = 1 << 30  # of a file that is read completely


def expand(path: str | Path) -> Path:
    """Return a path with `~` and `~user` expanded.

    Raises:
      InputError: there is no such user, or the path contains a NUL character.
    """
    if "\0" in str(path):
        raise InputError(f"the path {str(path)!r} contains a NUL character")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path}: there is no user {Path(path).parts[0].removeprefix('~')!r}") from None


@contextlib.contextmanager
def named_errors(path: str | Path, action: str = "read", error: type[InputError] = InputError) -> Iterator[None]:
    """Convert an OSError to an error of one line, "cannot ACTION PATH: REASON"."""
    try:
        yield
    except OSError as e:
        raise error(f"cannot {action} {path}: {e.strerror}") from None


def files_below(folder: str | Path, *, hidden: bool) -> Iterator[str]:
    """Yield the paths of the files in a folder and its subfolders, however deep; links to folders are not followed.

    Args:
      folder: the folder.
      hidden: also yield hidden files and those in hidden folders, whose names begin with a dot.

    Raises:
      InputError: a folder cannot be read, or its path is too long.
    """
    pending = [str(folder)]
    while pending:
        inside = pending.pop()
        try:
            with os.scandir(inside) as scanned:
                entries = [entry for entry in scanned if hidden or not entry.name.startswith(".")]
            pending += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            files = [
                entry.path
                for entry in entries
                if not entry.is_dir(follow_symlinks=False) and os.path.isfile(entry)  # noqa: PTH113 - a link to itself is no file
            ]
        except OSError as e:
            shown = inside if len(inside) <= MAX_SHOWN else f"{inside[:MAX_SHOWN]}…"
            raise InputError(f"cannot read {shown}: {e.strerror}") from None
        yield from files


def read_regular(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file; a pipe, which could block, is not opened.

    Raises:
      OSError: the file cannot be read.
      InputError: the path is a folder, pipe, socket or device, or the file is too large; the message has no path.
    """
    status = Path(path).stat()
    if not stat.S_ISREG(status.st_mode):
        raise InputError("not a regular file")
    if status.st_size > max_bytes:
        raise InputError(f"the file has {status.st_size:,} bytes, more than the limit of {max_bytes:,}")
    return Path(path).read_bytes()
