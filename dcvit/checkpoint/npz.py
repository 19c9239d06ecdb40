"""Reading `.npz` archives of other people: arrays and nothing else, whatever the file holds.

An archive is a zip of `.npy` files (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html), each a
header, which is a Python literal, and the bytes of one array. Nothing is unpickled, executed or written to disk, and
nothing is allocated before the zip's directory, the header and the memory left agree that it should be.
"""

import io
import math
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dcvit.errors import first_line
from input_pipeline import memory

MAGIC = b"\x93NUMPY"
LENGTHS = {(1, 0): 2, (2, 0): 4}  # bytes of a header's length, by the format's version
LONGEST_HEADER = 10_000  # bytes, numpy's own limit: longer ones may stop Python's parser
METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # what numpy writes
ENCRYPTED = 0x1  # a flag of a zip's member
CHUNK = 1 << 20  # bytes read at a time


class NpzError(ValueError):
    """An archive that is damaged, or holds what it should not; the message names the file and its member."""


def read(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a `.npz` file by their names, as `numpy.load` with `allow_pickle=False` has them.

    A dtype that numpy does not know, such as bfloat16, comes back as the bytes it was written as: void, `V2`.

    Raises:
      NpzError: no such archive; a member that is no array, or of Python objects, encrypted, damaged or of another size
        than announced; names that are not those of a tree; more than there is memory for.
    """
    try:
        with Path(path).open("rb") as file, zipfile.ZipFile(file) as archive:
            members = _members(archive)
            _check_memory(members)
            return {name: _array(archive, name, info) for name, info in members.items()}
    except NpzError as e:
        raise NpzError(f"{path}: {e}") from None
    except OSError as e:
        raise NpzError(f"cannot read {path}: {e.strerror or first_line(e)}") from None
    except Exception as e:  # what zipfile raises for damaged directories is of many kinds
        raise NpzError(f"{path} is no .npz archive, or damaged: {first_line(e)}") from None


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The members of an archive by the names of their arrays, which are paths in a tree."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.orig_filename.removesuffix(".npy")  # `filename` ends where there is a NUL
        if "\\" in name or "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise NpzError(f"member {info.orig_filename!r} is no name of an array")
        if name in members:
            raise NpzError(f"member {name!r} is there twice")
        if info.flag_bits & ENCRYPTED:
            raise NpzError(f"member {name!r} is encrypted")
        if info.compress_type not in METHODS:
            raise NpzError(f"member {name!r} is packed by a method that numpy does not use")
        members[name] = info
    for name in members:
        parts = name.split("/")
        for above in ("/".join(parts[:depth]) for depth in range(1, len(parts))):
            if above in members:
                raise NpzError(f"member {above!r} is an array and the folder of {name!r}")
    return members


def _check_memory(members: dict[str, zipfile.ZipInfo]) -> None:
    """Raises NpzError where all arrays together do not fit the memory left."""
    announced, left = sum(info.file_size for info in members.values()), memory.available()
    if left is not None and announced > left:
        largest = max(members, key=lambda name: members[name].file_size)
        raise NpzError(
            f"announces {announced / 1e9:.1f} GB of arrays, the largest {largest!r}; memory left: {left / 1e9:.1f} GB"
        )


def _array(archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> np.ndarray:
    """The array of one member, unpacked straight into its place."""
    announced = info.file_size
    info.file_size += 1  # zipfile cuts what is beyond: with one more, it is seen, by its checksum or here
    try:
        with archive.open(info) as stream:
            shape, columns_first, dtype, header = _header(stream.read)
            if header + math.prod(shape) * dtype.itemsize != announced:
                raise NpzError(f"the header says {dtype} of {shape}, the archive {announced:,} bytes")
            flat = np.empty(math.prod(shape), dtype)
            array = flat.reshape(shape[::-1]).T if columns_first else flat.reshape(shape)
            place = flat.view(np.uint8)
            while len(place):
                read = stream.read(min(CHUNK, len(place)))
                if not read:
                    raise NpzError("cut off")
                place[: len(read)] = np.frombuffer(read, np.uint8)
                place = place[len(read) :]
            if stream.read(1):  # at its end zipfile compares the checksum
                raise NpzError(f"unpacks to more than the {announced:,} bytes announced")
    except OSError:
        raise
    except NpzError as e:
        raise NpzError(f"member {name!r}: {e}") from None
    except Exception as e:
        raise NpzError(f"member {name!r} is damaged: {first_line(e)}") from None
    return array


def _header(read: Callable[[int], bytes]) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """(shape, whether the first index runs fastest, dtype, bytes read) of a `.npy` file, from its beginning."""
    start = read(len(MAGIC) + 2)
    if start[: len(MAGIC)] != MAGIC:
        raise NpzError("no array: it does not begin as a .npy file does")
    version = (start[-2], start[-1])
    if len(start) != len(MAGIC) + 2 or version not in LENGTHS:
        raise NpzError("of an unknown version of .npy")
    length = read(LENGTHS[version])
    size = int.from_bytes(length, "little")
    if size > LONGEST_HEADER:
        raise NpzError(f"a header of {size:,} bytes; at most {LONGEST_HEADER:,} are read")
    text = io.BytesIO(length + read(size))
    parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, columns_first, dtype = parse(text)
    except Exception as e:  # Python's own parser and numpy's of dtypes raise many kinds
        raise NpzError(f"its header is damaged: {first_line(e)}") from None
    if dtype.hasobject:
        raise NpzError("an array of Python objects, which would have to be unpickled")
    if min(shape, default=0) < 0 or not dtype.itemsize:
        raise NpzError(f"the header says {dtype} of {shape}, which is no array")
    return shape, columns_first, dtype, len(start) + len(length) + size
