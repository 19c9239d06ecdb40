"""Megatron's .bin/.idx pairs of tokens: file names, index, and the description that dcvit writes next to them.

PREFIX.bin is one stream of tokens. PREFIX.idx divides it into sequences and contains, in this order: magic, version
(u64), dtype code (u8), number of sequences (u64), length of the document index (u64), lengths of the sequences (int32),
their offsets in bytes (int64), document index (int64). PREFIX.json is not part of Megatron's format.
"""

import json
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypedDict, cast

import numpy as np

from input_pipeline.errors import InputError, MissingDataError, first_line
from input_pipeline.files import expand

MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
CHUNK = 1 << 18  # lengths or offsets that are in memory at a time
CHECKED = 1 << 14  # numbers at each end of an array that are checked


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
    """Return what PREFIX.idx says about PREFIX.bin; check its first and last numbers, and the size of PREFIX.bin.

    PREFIX.bin is not read, and most of PREFIX.idx only if its sequences have equal lengths.

    Raises:
      InputError: a file is not readable or damaged, or the files are not a pair.
    """
    path, data = f"{prefix}.idx", f"{prefix}.bin"
    try:
        size, tokens_size = Path(path).stat().st_size, Path(data).stat().st_size
        with Path(path).open("rb") as file:
            code, sequences = _read_header(file, path, size)
        if not sequences or not tokens_size:
            raise InputError(f"{path} holds no sequences, or {data} no tokens")
        numbers = np.memmap(path, np.uint8, "r", HEADER.size)
    except (OSError, ValueError) as e:  # ValueError: the file became shorter
        raise InputError(f"cannot read {getattr(e, 'filename', None) or path}: {first_line(e)}") from None
    sizes, starts, documents = np.split(numbers, [4 * sequences, 12 * sequences])
    dtype, length = np.dtype(DTYPES[code]), _equal_length(sizes.view("<i4"))
    end = _checked_end(sizes.view("<i4"), starts.view("<i8"), path, dtype.itemsize)
    _check_documents(documents.view("<i8"), path, sequences)
    if end != tokens_size:
        raise InputError(f"{data} has {tokens_size:,} bytes, {path} needs {end:,}: cut off, or not of one pair")
    if tokens_size % dtype.itemsize:
        raise InputError(f"{data} has {tokens_size:,} bytes, which is not a multiple of {dtype.itemsize} bytes a token")
    if length is not None and length * sequences * dtype.itemsize != tokens_size:
        raise InputError(f"{path}: its {sequences:,} sequences of {length} tokens are not contiguous in {data}")
    return MegatronIndex(dtype, sequences, length)


def _read_header(file: BinaryIO, path: str, size: int) -> tuple[int, int]:
    """Return dtype code and number of sequences of an index of `size` bytes. Raises InputError if they are invalid."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size or header[:9] != MAGIC:
        raise InputError(f"{path} is not a Megatron index: it does not begin with {MAGIC.decode()!r}")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != VERSION:
        raise InputError(f"{path}: version {version}, expected {VERSION}")
    if code not in DTYPES:
        kind = "floats" if code in (6, 7) else "unknown"
        raise InputError(f"{path}: dtype code {code} ({kind}), expected one of {', '.join(map(str, DTYPES))}")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size != expected:
        raise InputError(f"{path} has {size:,} bytes, its header needs {expected:,}: cut off or damaged")
    return code, sequences


def _checked_end(all_sizes: np.ndarray, all_starts: np.ndarray, path: str, width: int) -> int:
    """Return the end of the last sequence in bytes. Raises InputError if sequences do not follow each other from 0 on.

    Only the first and the last CHECKED sequences are checked. `width` is the number of bytes of a token.
    """
    end = 0
    for at in sorted({0, max(0, len(all_sizes) - CHECKED)}):
        sizes, starts = all_sizes[at : at + CHECKED], all_starts[at : at + CHECKED]
        ends = starts + sizes.astype("<i8") * width
        expected = np.concatenate([starts[:1] if at else [0], ends[:-1]])
        wrong = (sizes < 0) | (starts < 0) | (starts != expected)
        if wrong.any():
            i = int(wrong.argmax())
            raise InputError(
                f"{path} is damaged: sequence {at + i:,} has {sizes[i]:,} tokens from byte {starts[i]:,}, "
                f"expected from byte {expected[i]:,}"
            )
        end = int(ends[-1])
    return end


def _check_documents(documents: np.ndarray, path: str, sequences: int) -> None:
    """Raise InputError if the numbers of `documents`, the document index, do not ascend from 0 to `sequences` at most.

    Only its first and its last CHECKED numbers are checked.
    """
    for at in sorted({0, max(0, len(documents) - CHECKED)}):
        numbers = documents[at : at + CHECKED]
        wrong = (numbers > sequences) | (np.diff(numbers, prepend=numbers[:1]) < 0)
        if not at:
            wrong[:1] |= numbers[:1] != 0
        if wrong.any():
            i = int(wrong.argmax())
            raise InputError(f"{path} is damaged: document {at + i:,} begins with sequence {numbers[i]:,}")


def _equal_length(sizes: np.ndarray) -> int | None:
    """Return the length that all sequences have, or None if there is only one sequence or the lengths differ."""
    parts = (sizes[at : at + CHUNK] for at in range(0, len(sizes), CHUNK))
    return int(sizes[0]) if len(sizes) > 1 and all((part == sizes[0]).all() for part in parts) else None
