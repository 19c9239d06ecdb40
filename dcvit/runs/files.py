"""Paths of a run's files, in a local folder or in an object store (gs://, s3://), with the interface of pathlib."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path
from typing import TypeAlias

from etils import epath

from dcvit.errors import ConfigError
from dcvit.versions import use_fsspec_in_etils
from input_pipeline import stores
from input_pipeline.errors import first_line
from input_pipeline.files import expand

Folder: TypeAlias = Path | epath.Path  # a local path, or a URL of an object store
BUCKET = re.compile(r"[\w.-]+", re.ASCII)
# Parts of URLs whose characters mean themselves for fsspec, which expands * and [, etils, Orbax and TensorStore.
URL_PART = re.compile(r"(?!\.\.?$)[\w .,=+@()-]*[\w.,=+@()-]", re.ASCII)


def folder(text: str) -> Folder:
    """Return the folder of a path, in which ~ is expanded, or of a URL of an object store.

    Raises:
      ValueError: the path is empty, the URL is of another store or has a character that a library would interpret, its
        library is not installed, or its bucket cannot be read.
    """
    if not text:
        raise ValueError("the path of the folder is empty")
    if "://" not in text:
        return expand(text)
    scheme, _, place = text.partition("://")
    bucket, *parts = place.rstrip("/").split("/")
    if scheme in stores.LIBRARIES and not BUCKET.fullmatch(bucket):  # not repeated: it may hold a password
        raise ValueError(f"expected {scheme}://BUCKET/FOLDER, with a bucket of letters, digits, dots and hyphens")
    for part in parts:
        if not URL_PART.fullmatch(part):
            what = repr(part) if part else "an empty part"
            raise ValueError(f"{text}: {what} in a URL should be of letters, digits, inner spaces and any of -_.,=+@()")
    stores.check_readable(text)
    use_fsspec_in_etils()
    return epath.Path(text)


def check_name(path: Folder) -> None:
    """Raise ConfigError for a local folder to which Orbax must not write: it takes paths for patterns of glob."""
    if isinstance(path, Path) and (found := set("*?[\\") & set(str(path.absolute()))):
        raise ConfigError(f"{path}: a run cannot be saved to a path with {' or '.join(sorted(found))}")


def kvstore(url: str) -> dict[str, object]:
    """Return TensorStore's specification of a folder at s3://, with the endpoint and the region that s3fs uses.

    TensorStore itself reads the credentials of AWS, but not AWS_ENDPOINT_URL.
    """
    bucket, _, path = url.removeprefix("s3://").partition("/")
    spec: dict[str, object] = {"driver": "s3", "bucket": bucket, "path": f"{path}/"}
    client = stores.filesystem(url).s3.meta  # botocore's, which knows the variables and the profiles
    if not re.fullmatch(
        r"https://s3(\.[a-z0-9-]+)?\.amazonaws\.com", client.endpoint_url
    ):  # another one than by default
        region = client.region_name if client.region_name != "aws-global" else None
        spec |= {"endpoint": client.endpoint_url, "aws_region": region or "us-east-1"}
    if os.environ.get("AWS_ACCESS_KEY_ID"):  # the default prints an error for each other place without credentials
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def absolute(path: Folder) -> Folder:
    """Return an absolute path; a URL is returned unchanged."""
    return path.absolute() if isinstance(path, Path) else path


def replace(path: Folder, text: str) -> None:
    """Write a file atomically: a kill or a full disk leaves either the old or the new content.

    Raises:
      OSError: the file could not be written; the message names it, and no temporary file is left.
    """
    if not isinstance(path, Path):
        try:
            path.write_text(text, encoding="utf-8")  # a store creates an object when it is complete
        except Exception as e:  # libraries for stores have error types of their own
            raise OSError(f"cannot write {path}: {first_line(e)}") from e
        return
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.unlink(missing_ok=True)  # of a killed process; a link would lead to another file, and a pipe would block
        with fresh.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure could leave an empty file
        rename(fresh, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise OSError(e.errno, os.strerror(e.errno or 0), str(path)) from None


def rename(path: Path, target: Path) -> None:
    """Rename a local file or folder, or replace a file, and return when the new name would survive a power failure."""
    path.replace(target)
    sync_names(target.parent)


def sync_names(folder: Path) -> None:
    """Flush the names in a local folder to the disk; flushing a file does not include its name."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that flush no folder
            raise
    finally:
        os.close(number)


def file_identity(file: Path | int) -> tuple[int, int] | None:
    """Return the device and the inode of a path or an open file; None if there is no such file."""
    try:
        found = os.stat(file)  # noqa: PTH116 - also of an open file
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove(path: Folder) -> None:
    """Remove a folder with its content; a missing folder is not an error."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.rmtree(missing_ok=True)
