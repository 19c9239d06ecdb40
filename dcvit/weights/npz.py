"""Reader of `.npz` archives, one array at a time.

An archive is a zip of `.npy` files (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html). Nothing is
unpickled, executed or written to disk.
"""

import contextlib
import functools
import io
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from dcvit.errors import CheckpointError, first_line
from dcvit.parallel.trees import Tensor

HEADER_BYTES = 10_240  # of a member: magic string, version, length, and numpy's own limit of 10,000 for the header


def open_arrays(path: str | Path) -> dict[str, Tensor]:
    """Open the arrays of a `.npz` file by name; only the directory of the archive and the headers are read.

    numpy does not know bfloat16 and stores its bytes with the void dtype `V2`, which is read as bfloat16.

    Raises:
      CheckpointError: the file is not an archive; a member is not an array, has Python objects, or is damaged; or names
        are not paths in a tree. Damaged data raise this error when the array is read.
    """
    with _errors_of(path), Path(path).open("rb") as file, zipfile.ZipFile(file) as archive:
        members = _members(archive)
        return {
            name: Tensor(_shape(archive, name, info), functools.partial(_read, path, name, info))
            for name, info in members.items()
        }


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Read all arrays of a `.npz` file by name. Raises CheckpointError: see `open_arrays`."""
    return {name: array.read() for name, array in open_arrays(path).items()}


def _read(path: str | Path, name: str, info: zipfile.ZipInfo) -> np.ndarray:
    with _errors_of(path), Path(path).open("rb") as file, zipfile.ZipFile(file) as archive:
        array = _array(archive, name, info)
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


@contextlib.contextmanager
def _errors_of(path: str | Path) -> Iterator[None]:
    """Context manager that turns errors of a file into a CheckpointError with its path."""
    try:
        yield
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e}") from None
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or first_line(e)}") from None
    except Exception as e:  # zipfile raises many types of exceptions for damaged directories
        raise CheckpointError(f"{path} is not an .npz archive, or is damaged: {first_line(e)}") from None


@contextlib.contextmanager
def _errors_in(name: str) -> Iterator[None]:
    """Context manager that turns errors in the content of a member into a CheckpointError with its name."""
    try:
        yield
    except OSError:
        raise
    except CheckpointError as e:
        raise CheckpointError(f"member {name!r}: {e}") from None
    except Exception as e:
        raise CheckpointError(f"member {name!r} is damaged: {first_line(e)}") from None


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an archive by the names of their arrays, which are paths in a tree."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.orig_filename.removesuffix(".npy")  # `filename` is cut at a NUL byte
        if "\\" in name or "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise CheckpointError(f"member {info.orig_filename!r} is not a valid name of an array")
        if name in members:
            raise CheckpointError(f"member {name!r} occurs twice")
        members[name] = info
    for name in members:
        parts = name.split("/")
        for above in ("/".join(parts[:depth]) for depth in range(1, len(parts))):
            if above in members:
                raise CheckpointError(f"member {above!r} is both an array and the folder of {name!r}")
    return members


def _shape(archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> tuple[int, ...]:
    """Return the shape of the array `name`, from the header of its member of the archive."""
    with _errors_in(name), archive.open(info) as stream:
        return _check_header(stream.read(HEADER_BYTES), info.file_size)


def _array(archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> np.ndarray:
    """Read and return the array `name`, one member of the archive."""
    with _errors_in(name), archive.open(info) as stream:
        array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
        stream.read(1)  # at the end of the data zipfile compares the checksum
    return array


def _check_header(start: bytes, announced: int) -> tuple[int, ...]:
    """Check the header of a `.npy` file, and return the shape of its array.

    Args:
      start: the beginning of the file.
      announced: the size of the file in the directory of the archive.

    Raises:
      CheckpointError: it is not the header of an array of numbers or strings of the announced size.
    """
    file = io.BytesIO(start)
    try:
        version = np.lib.format.read_magic(file)
    except ValueError:
        raise CheckpointError("not an array: it does not begin as a .npy file does") from None
    if version not in ((1, 0), (2, 0)):
        raise CheckpointError(f"unknown version {version} of .npy")
    parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, _, dtype = parse(file)
    except Exception as e:  # Python's parser of literals and numpy's of dtypes raise many types of exceptions
        raise CheckpointError(f"its header is damaged: {first_line(e)}") from None
    if dtype.hasobject:
        raise CheckpointError("an array of Python objects, which would have to be unpickled")
    if min(shape, default=0) < 0 or not dtype.itemsize:
        raise CheckpointError(f"the header announces {dtype} of shape {shape}, which is not an array")
    if file.tell() + math.prod(shape) * dtype.itemsize != announced:
        raise CheckpointError(f"the header announces {dtype} of shape {shape}, the archive {announced:,} bytes")
    return shape
