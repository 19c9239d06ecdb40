"""Megatron's .bin/.idx pairs of tokens: file names, index, and the description that dcvit writes next to them.

PREFIX.bin is one stream of tokens. PREFIX.idx divides it into sequences and contains, in this order: magic, version
(u64), dtype code (u8), number of sequences (u64), length of the document index (u64), lengths of the sequences (int32),
their offsets in bytes (int64), document index (int64). PREFIX.json is not part of Megatron's format.
"""

import json
import os
import struct
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

import numpy as np

from input_pipeline.errors import InputError, MissingDataError, first_line
from input_pipeline.files import expand

CHECKED_AT_ONCE = 1 << 20  # sequences
MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats


class Description(TypedDict, total=False):
    """The content of PREFIX.json: the vocabulary, and the numbers of bytes, documents and tokens."""

    vocab_size: int
    end_of_text: int | None
    tokenizer: str | None  # path of the tokenizer.json; None if the tokens are bytes
    bytes: int  # size of the text
    documents: int
    tokens: int


class MegatronIndex(NamedTuple):
    """Properties of a .bin file that its .idx file gives: dtype of the tokens, number and length of the sequences."""

    dtype: np.dtype
    sequences: int
    length: int | None  # length of every sequence, if there are several and all have the same length


def find_prefix(path: str) -> str:
    """Return the path that the .bin and the .idx file of a pair have in common, without suffix.

    Args:
      path: path of the .bin or the .idx file, their common prefix, or a folder with one pair.

    Raises:
      MissingDataError: one of the two files does not exist.
      InputError: the path is a URL.
    """
    if "://" in path:
        raise InputError(f"{path}: only local files are supported")
    expanded = str(expand(path))
    if Path(expanded).is_dir():
        inside = sorted(Path(expanded).glob("*.bin"))
        if len(inside) != 1:
            names = ", ".join(file.name for file in inside[:6]) or "none"
            raise MissingDataError(f"{path} is a folder: expected one .bin file in it, found {names}")
        expanded = str(inside[0])
    prefix = expanded.removesuffix(".bin").removesuffix(".idx")
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            raise MissingDataError(f"no file {prefix}{suffix}: expected {prefix}.bin and {prefix}.idx")
    return prefix


def read_description(prefix: str) -> Description:
    """Return the content of PREFIX.json, or an empty dict if the file does not exist.

    Raises:
      InputError: the file is not readable or invalid.
    """
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return {}
    try:
        description = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f"cannot read {path}: {first_line(e)}") from None
    numbers = ("vocab_size", "end_of_text", "documents")
    if not isinstance(description, dict) or any(not isinstance(description.get(key), int | None) for key in numbers):
        raise InputError(f"{path}: expected a JSON object with numbers for {', '.join(numbers)}")
    return cast(Description, description)


def read_index(prefix: str) -> MegatronIndex:
    """Return what PREFIX.idx says about PREFIX.bin, whose size must be that of the sequences; PREFIX.bin is not read.

    Raises:
      InputError: a file is not readable or damaged, or the files are not a pair.
    """
    path, data = f"{prefix}.idx", f"{prefix}.bin"
    try:
        tokens_size = Path(data).stat().st_size
        code, sequences = _read_header(path)
        if not sequences or not tokens_size:
            raise InputError(f"{path} holds no sequences, or {data} no tokens")
        sizes = np.memmap(path, "<i4", "r", HEADER.size, sequences)
        starts = np.memmap(path, "<i8", "r", HEADER.size + 4 * sequences, sequences)
    except (OSError, ValueError) as e:  # ValueError: the file became shorter
        raise InputError(f"cannot read {getattr(e, 'filename', None) or path}: {first_line(e)}") from None
    dtype = np.dtype(DTYPES[code])
    end = 0
    for first in range(0, sequences, CHECKED_AT_ONCE):
        part = sizes[first : first + CHECKED_AT_ONCE].astype(np.int64) * dtype.itemsize
        ends = end + np.cumsum(part)
        if part.min() < 0 or (starts[first : first + CHECKED_AT_ONCE] != ends - part).any():
            raise InputError(f"{path} is damaged: its sequences do not follow each other from byte 0 on")
        end = int(ends[-1])
    if end != tokens_size:
        raise InputError(f"{data} has {tokens_size:,} bytes, {path} needs {end:,}: cut off, or not of one pair")
    are_equal = sequences > 1 and bool((sizes == sizes[0]).all())
    return MegatronIndex(dtype, sequences, int(sizes[0]) if are_equal else None)


def _read_header(path: str) -> tuple[int, int]:
    """Return dtype code and number of sequences of an index. Raises InputError if they are invalid."""
    with Path(path).open("rb") as file:
        header, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
    if len(header) < HEADER.size or header[:9] != MAGIC:
        raise InputError(f"{path} is not a Megatron index: it does not begin with {MAGIC.decode()!r}")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
        raise InputError(f"{path}: version {version}, dtype code {code}; expected {VERSION} and one of {[*DTYPES]}")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size != expected:
        raise InputError(f"{path} has {size:,} bytes, its header needs {expected:,}: cut off or damaged")
    return code, sequences
