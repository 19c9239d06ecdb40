"""The files of a run: in a folder of a disk, or objects of a store such as gs://, both like pathlib's."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import TypeAlias

from etils import epath

Folder: TypeAlias = Path | epath.Path  # the second: a URL


def folder(text: str) -> Folder:
    """A path, with ~ expanded, or a URL of Google Cloud Storage.

    Raises:
      ValueError: a URL of another store, or gcsfs is not installed.
    """
    if "://" not in text:
        return Path(text).expanduser()
    if not text.startswith("gs://"):
        raise ValueError(f"{text}: a folder, or a URL that begins with gs://")
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError(f'{text}: needs gcsfs, which is not installed: pip install "dcvit[gcs]"')
    import fsspec

    os.environ.setdefault("EPATH_USE_TF", "false")  # gcsfs, where TensorFlow's client is there, too
    for protocol in ("gs", "gcs"):  # lists as they are now: TensorStore writes beside gcsfs, and other processes do
        fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    return epath.Path(text)


def absolute(path: Folder) -> Folder:
    """A path from the root; a URL is one."""
    return path.absolute() if isinstance(path, Path) else path


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
        with fresh.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave an empty file under the name
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
