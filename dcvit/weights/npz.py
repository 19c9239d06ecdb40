"""Reader of `.npz` archives, one array at a time.

An archive is a zip of `.npy` files (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html). Nothing is
unpickled, executed or written to disk.
"""

import contextlib
import functools
import zipfile
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from dcvit.errors import CheckpointError, first_line
from dcvit.parallel.trees import Tensor

HEADERS = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}  # by version


def open_arrays(path: str | Path) -> dict[str, Tensor]:
    """Open the arrays of a `.npz` file by name; only the directory of the archive and the headers are read.

    numpy does not know bfloat16 and stores its bytes with the void dtype `V2`, which is read as bfloat16.

    Raises:
      CheckpointError: the file is not an archive, or a member is not an array. One that has Python objects or is
        damaged raises this error when the array is read.
    """
    with _errors_of(path), zipfile.ZipFile(path) as archive:
        return {
            _name(info): Tensor(_shape(path, archive, info), functools.partial(_read, path, info))
            for info in archive.infolist()
        }


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Read all arrays of a `.npz` file by name. Raises CheckpointError: see `open_arrays`."""
    return {name: array.read() for name, array in open_arrays(path).items()}


def _name(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def _shape(path: str | Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[int, ...]:
    """Return the shape of an array, from the header of its member of the archive."""
    with _errors_of(f"{path}: member {_name(info)!r}", "array"), archive.open(info) as stream:
        major, _ = np.lib.format.read_magic(stream)
        shape: tuple[int, ...] = HEADERS[major](stream)[0]
        return shape


def _read(path: str | Path, info: zipfile.ZipInfo) -> np.ndarray:
    what = f"{path}: member {_name(info)!r}"
    with _errors_of(what, "array"), zipfile.ZipFile(path) as archive, archive.open(info) as stream:
        array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):  # at the end of the data zipfile compares the checksum
            raise ValueError(f"its header announces {array.dtype} of {array.shape}, but it has more bytes")
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


@contextlib.contextmanager
def _errors_of(what: str | Path, kind: str = ".npz archive") -> Iterator[None]:
    """Context manager that turns errors of an archive or an array into a CheckpointError that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as e:
        raise CheckpointError(f"cannot read {what}: {e.strerror or first_line(e)}") from None
    except Exception as e:  # zipfile and numpy raise many types of exceptions for damaged content
        raise CheckpointError(f"{what} is not an {kind}, or is damaged: {first_line(e)}") from None
