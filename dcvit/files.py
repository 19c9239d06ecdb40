"""The files of a run: in a folder of a disk, or objects of a store such as gs://, both like pathlib's."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TypeAlias

from etils import epath

Folder: TypeAlias = Path | epath.Path  # the second: a URL


def folder(text: str) -> Folder:
    """A path, with ~ expanded, or a URL. Raises ValueError for one of a store that is not known or not installed."""
    if "://" not in text:
        return Path(text).expanduser()
    try:
        return epath.Path(text)
    except (ValueError, ImportError) as e:
        raise ValueError(f"{text}: {e}") from None


def replace(path: Folder, text: str) -> None:
    """Writes a file so that a kill, or a full disk, leaves the old content or the new one.

    Raises:
      OSError: with the path, and with nothing left behind.
    """
    if not isinstance(path, Path):
        path.write_text(text)  # an object is there when it is whole
        return
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_text(text)
        fresh.replace(path)
    except OSError as e:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise OSError(e.errno, os.strerror(e.errno or 0), str(path)) from None


def remove(path: Folder) -> None:
    """Removes a folder and what it holds; one that is gone already is no error."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.rmtree(missing_ok=True)
