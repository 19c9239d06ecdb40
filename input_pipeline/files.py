"""Paths and files that a user names: `~` in paths, and files that are read completely."""

from __future__ import annotations

import stat
from pathlib import Path

from input_pipeline.errors import InputError

MAX_BYTES = 1 << 30  # of a file that is read completely


def expand(path: str | Path) -> Path:
    """Return a path with `~` and `~user` expanded.

    Raises:
      InputError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path}: there is no user {Path(path).parts[0].removeprefix('~')!r}") from None


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
