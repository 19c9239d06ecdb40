"""Row groups of Parquet files, decoded a few rows at a time and within limits of memory.

Sizes in a footer may be wrong, a page of a few bytes may decompress to 2 GB, and an encoding may repeat one value for
millions of rows. pyarrow allocates the size in a page's header, so the headers are checked before pages are read. The
positions of the pages are parsed from the footer here, because `pyarrow.parquet` ends the process if the metadata of a
column is damaged or encrypted.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from input_pipeline.errors import InputError, ReadingError, first_line
from input_pipeline.files import FileState, file_state
from input_pipeline.optional import require

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

MAX_DECODED, MAX_RATIO = 1 << 25, 8  # bytes, besides this many for each stored byte
MAX_FOOTER, FOOTER_PART = 1 << 22, 256  # bytes, or this part of a large file
MAX_NAMES = 1 << 21  # characters of the names of all columns, each with those of all groups of columns
BATCH_ROWS, BATCH_BYTES = 256, 1 << 22  # decoded at a time; a single row may have more
READ_BYTES = 1 << 20  # of a file at a time
HEADER_BYTES = (1 << 10, 1 << 16, 1 << 24)  # read for the header of a page; the last is pyarrow's limit
CONTENTS = {0: 5, 2: 7, 3: 8}  # field of a page's header with its number of values, by its type; 2 is a dictionary
PREFIXES = 7  # the encoding of values by the length of the prefix that they share with the one before

SHORT, LONG = 5, 6  # Thrift's numbers of its types of integers, of 32 and 64 bits

# Of a Thrift structure: an integer, bytes, a list, Fields, or None for a value of a type that is not needed.
Value = Any
Fields = dict[int, Value]


class OpenedParquet(NamedTuple):
    """An open Parquet file, the same file for reading bytes, and the Thrift fields of the row groups in its footer."""

    file: "ParquetFile"
    raw: BinaryIO
    groups: list[Fields]


class Pages(NamedTuple):
    """Sizes in bytes in a row group: `stored` of all selected pages, and `largest`, a bound of one decoded value."""

    stored: int
    largest: int


def most_decoded(stored: int) -> int:
    """Return how many bytes a page with `stored` compressed bytes may have at most after decompression."""
    return MAX_DECODED + MAX_RATIO * stored


@contextlib.contextmanager
def open_parquet(path: str, what: str = "") -> Iterator[OpenedParquet]:
    """Open a Parquet file for the context, and convert pyarrow's errors in it to errors about `what`, or the path.

    Raises:
      InputError: the file is damaged, or its footer is too large.
      ReadingError: the file cannot be read: an OSError with an errno. pyarrow's others are about damage.
    """
    options = {"page_checksum_verification": True, "pre_buffer": False, "buffer_size": READ_BYTES}
    try:
        with Path(path).open("rb") as raw:
            groups = _row_groups(path, file_state(path))
            with require("pyarrow.parquet").ParquetFile(path, **options) as file:
                yield OpenedParquet(file, raw, groups)
    except (InputError, MemoryError):
        raise
    except (require("pyarrow").ArrowException, LookupError, OSError, ValueError) as e:
        if isinstance(e, OSError) and e.errno:
            raise ReadingError(f"cannot read {path}: {e.strerror}") from None
        raise InputError(f"{what or path} cannot be read as Parquet: {first_line(e)}") from None


def check_pages(opened: OpenedParquet, number: int, columns: Sequence[str], what: str) -> Pages:
    """Check the headers of all pages of columns in a row group, and return the sizes of the pages.

    Args:
      opened: the file.
      number: the number of the row group.
      columns: names of columns without lists; those of fields are separated by dots.
      what: the subject of error messages.

    Raises:
      InputError: a header is damaged, or a page has more bytes than `most_decoded`.
    """
    found = Pages(0, 1)
    with _damage_named(what):
        for chunk in _chunks(opened, number, columns):
            if 8 in chunk or _integer(chunk[3], 5) != _integer(opened.groups[number], 3):
                raise ValueError("an encrypted column, or other numbers of values and rows")
            pages = _chunk_pages(opened.raw, chunk[3], what)
            found = Pages(found.stored + pages.stored, max(found.largest, pages.largest))
    return found


def read_batches(
    opened: OpenedParquet, number: int, columns: Sequence[str], pages: Pages
) -> Iterator["pa.RecordBatch"]:
    """Yield the rows of row group `number`, a few at a time; `pages` is the result of `check_pages`."""
    rows = min(BATCH_ROWS, max(1, BATCH_BYTES // pages.largest))
    yield from opened.file.iter_batches(rows, row_groups=[number], columns=list(columns), use_threads=False)


def decoded_bytes(opened: OpenedParquet, number: int, columns: Sequence[str], what: str) -> int:
    """Return the decompressed bytes of `columns` of row group `number`, according to the footer."""
    with _damage_named(what):
        return sum(_integer(chunk[3], 6) for chunk in _chunks(opened, number, columns))


def _chunks(opened: OpenedParquet, number: int, columns: Sequence[str]) -> Iterator[Fields]:
    """Yield the footer's column chunks of row group `number` that belong to `columns` or to fields inside them."""
    for chunk in opened.groups[number].get(1) or ():
        name = b".".join(chunk[3][3]).decode() + "."
        if any(name.startswith(f"{column}.") for column in columns):
            yield chunk


@contextlib.contextmanager
def _damage_named(what: str) -> Iterator[None]:
    """Context manager that converts errors of parsing damaged structures to an InputError about `what`."""
    try:
        yield
    except InputError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        raise InputError(f"{what} cannot be read as Parquet: the header of a page is damaged or encrypted") from None


@functools.lru_cache(maxsize=2)  # files are read one row group at a time
def _row_groups(path: str, state: FileState) -> list[Fields]:
    """Return the row groups in the footer of a file; [] if it is not a Parquet file, which pyarrow will report.

    Raises:
      ValueError: the footer is damaged, or it or the names in it are too large.
    """
    with Path(path).open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 8))
        size = int.from_bytes(file.read(4), "little")
        if file.read() != b"PAR1" or size + 8 > end:
            return []
        if size > (limit := max(MAX_FOOTER, end // FOOTER_PART)):
            raise ValueError(f"its footer has {size:,} bytes, more than {limit:,}")
        file.seek(end - 8 - size)
        data = file.read(size)
    try:
        footer, _ = _structure(data, 0, LONG)
        inner = sum(len(element[4]) + 1 for element in footer[2] if 5 in element)
        names = sum(len(element[4]) + inner for element in footer[2] if 5 not in element)
        groups: list[Fields] = [group for group in footer[4] if _integer(group, 3) >= 0]
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        raise ValueError("its footer is damaged") from None
    if names > MAX_NAMES:
        raise ValueError(f"the names of its columns have more than {MAX_NAMES:,} characters")
    return groups


def _chunk_pages(file: BinaryIO, chunk: Fields, what: str) -> Pages:
    """Return the sizes of the pages of one column in a row group; `chunk` is the column's metadata in the footer.

    Raises:
      InputError: a page is too large; see `check_pages`.
      LookupError, TypeError, AttributeError, ValueError, RecursionError: a header is damaged.
    """
    start, dictionary = _integer(chunk, 9), chunk.get(11)
    if dictionary and 0 < dictionary < start:
        start = dictionary
    length, rows = _integer(chunk, 7), _integer(chunk, 5)
    at, end, values, total, largest, prefixes = start, file.seek(0, 2), 0, 0, 0, False
    while values < rows and at < start + length:
        header, before = _page_header(file, at)
        kind, size, stored = (_integer(header, key) for key in (1, 2, 3))
        at += before + stored
        if at > end:
            raise ValueError("a page behind the end of the file")
        if size > most_decoded(stored):
            raise InputError(
                f"{what} has a page that decompresses to {size:,} bytes from {stored:,}, more than {MAX_DECODED:,} and "
                f"{MAX_RATIO} times as many; write smaller pages"
            )
        if kind in CONTENTS:
            count, encoding = (_integer(header[CONTENTS[kind]], key) for key in (1, 4 if kind == 3 else 2))
            if kind == 2 and count > size:
                raise ValueError("a dictionary of more values than bytes")
            values += 0 if kind == 2 else count
            prefixes |= encoding == PREFIXES
        total, largest = total + size, max(largest, size)
    return Pages(at - start, total if prefixes else largest)


def _page_header(file: BinaryIO, at: int) -> tuple[Fields, int]:
    """Return the header of the page at byte `at` in Thrift's compact protocol, and the header's length in bytes."""
    for size in HEADER_BYTES:
        file.seek(at)
        data = file.read(size)
        try:
            return _structure(data, 0, SHORT)
        except IndexError:
            if len(data) < size or size == HEADER_BYTES[-1]:
                raise
    raise AssertionError


def _structure(data: bytes, at: int, integers: int) -> tuple[Fields, int]:
    """Return the fields of a structure in Thrift's compact protocol by number, and the position after it.

    Args:
      data: the bytes that contain the structure.
      at: the position of the structure.
      integers: the Thrift type of integer fields to return; other integer fields are ignored, as pyarrow does.

    Raises:
      IndexError: the data is too short.
      ValueError: the data is damaged.
    """
    fields: Fields = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _signed(data, at)
        if number in fields:
            raise ValueError("two fields of one number")
        kind = head & 15
        fields[number], at = (None, at) if kind in (1, 2) else _value(data, at, kind, integers)  # booleans have no data
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, integers: int) -> tuple[Value, int]:
    """Return a value of the Thrift type `kind`, and the position after it; see `_structure`."""
    if kind in (4, SHORT, LONG):
        value, at = _signed(data, at)
        return value if kind == integers else None, at
    if kind == 8:
        size, at = _unsigned(data, at)
        return data[at : at + size], at + size
    if kind == 9:
        size, at = data[at] >> 4, at + 1
        kind = data[at - 1] & 15
        if size == 15:
            size, at = _unsigned(data, at)
        values = []
        for _ in range(size):
            value, at = _value(data, at, kind, integers)
            values.append(value)
        return values, at
    if kind == 12:
        return _structure(data, at, integers)
    if kind not in (1, 2, 3, 7):
        raise ValueError("a type that Parquet does not have")
    data[at]  # raises IndexError at the end
    return None, at + (8 if kind == 7 else 1)


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    """Decode an unsigned varint at position `at` of `data`; return it and the position after it."""
    value, shift = 0, 0
    while shift < 70:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    raise ValueError("an integer of more than ten bytes")


def _signed(data: bytes, at: int) -> tuple[int, int]:
    """Decode a zigzag varint (signed) at position `at` of `data`; return it and the position after it."""
    value, at = _unsigned(data, at)
    return value >> 1 ^ -(value & 1), at


def _integer(fields: Fields, number: int) -> int:
    """Return field `number` of a Thrift structure. Raises ValueError if it is not an integer or is negative."""
    value = fields.get(number)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"field {number} is {value}")
    return value
