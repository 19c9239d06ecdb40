"""Parquet files, decoded by pyarrow a few rows at a time, and columns of a CSV or Parquet file as text."""

import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from input_pipeline.errors import InputError, MissingDataError, ReadingError, first_line, nearest
from input_pipeline.files import expand, file_state, named_errors
from input_pipeline.optional import require

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

SUFFIXES = (".csv", ".tsv", ".parquet")
BATCH_ROWS = 256  # decoded at a time
READ_BYTES = 1 << 20  # of a file at a time


@contextlib.contextmanager
def open_parquet(path: str, what: str = "") -> Iterator["ParquetFile"]:
    """Open a Parquet file for the context, and convert pyarrow's errors in it to errors about `what`, or the path.

    Checksums of pages are verified where a file has them.

    Raises:
      InputError: the file is damaged.
      ReadingError: the file cannot be read: an OSError with an errno. pyarrow's others are about damage.
    """
    file_state(path)  # a pipe would block
    options = {"page_checksum_verification": True, "pre_buffer": False, "buffer_size": READ_BYTES}
    try:
        with require("pyarrow.parquet").ParquetFile(path, **options) as file:
            yield file
    except (InputError, MemoryError):
        raise
    except (require("pyarrow").ArrowException, LookupError, OSError, ValueError) as e:
        if isinstance(e, OSError) and e.errno:
            raise ReadingError(f"cannot read {path}: {e.strerror}") from None
        raise InputError(f"{what or path} cannot be read as Parquet: {first_line(e)}") from None


def read_batches(file: "ParquetFile", number: int, columns: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    """Yield the rows of row group `number`, BATCH_ROWS at a time; names of fields are separated by dots."""
    yield from file.iter_batches(BATCH_ROWS, row_groups=[number], columns=list(columns), use_threads=False)


class Table(NamedTuple):
    """Columns of a file by name, and the number of each row: its last line in a text file, or its row in a Parquet."""

    file: Path
    columns: dict[str, list[str]]
    numbers: list[int]

    def location(self, row: int) -> str:
        """Return the location of a row for messages, such as "labels.csv:7"."""
        return f"{self.file}:{self.numbers[row]}"


def read_table(path: str, names: Sequence[str]) -> Table:
    """Read some columns of a file ending in .csv (commas), .tsv (tabs) or .parquet, whose first line names them.

    Missing values of a Parquet file become empty, and true and false become "1" and "0".

    Raises:
      MissingDataError: the file does not exist.
      InputError: the file is damaged, or a column is missing or of a type other than text, numbers and truth values.
    """
    file = expand(path)
    if "://" in path or not file.is_file():
        raise MissingDataError(f"no file {path}{'; only local files are read' * ('://' in path)}")
    if file.suffix.lower() not in SUFFIXES:
        raise InputError(f"{file}: expected a name ending in {', '.join(SUFFIXES)}")
    names = list(dict.fromkeys(names))
    rows = _parquet_rows(file, names) if file.suffix.lower() == ".parquet" else _text_rows(file, names)
    numbers, cells = [], [list[str]() for _ in names]
    for number, row in rows:
        numbers.append(number)
        for column, cell in zip(cells, row, strict=True):
            column.append(cell)
    if not numbers:
        raise InputError(f"{file} has no rows")
    return Table(file, dict(zip(names, cells, strict=True)), numbers)


def _text_rows(file: Path, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of `names` of each row of a .csv or .tsv file; blank lines are skipped."""
    with named_errors(file):
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise InputError(f"{file} is not UTF-8: {e.reason} at byte {e.start + 1:,}") from None
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        places = [place(file, name, header) for name in names]
        for row in reader:
            if row and len(row) != len(header):
                raise InputError(f"{file}:{reader.line_num}: {len(row)} cells, but {len(header)} in the first line")
            if row:
                yield reader.line_num, [row[place] for place in places]
    except csv.Error as e:
        raise InputError(f"{file}:{reader.line_num}: {e}") from None


def parquet_rows(file: "ParquetFile", names: Sequence[str]) -> Iterator[tuple[object, ...]]:
    """Yield the values of some columns of each row of an opened Parquet file."""
    for group in range(file.num_row_groups):
        for batch in read_batches(file, group, names):
            yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)


def _parquet_rows(file: Path, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the values of `names` of each row of a Parquet file, as text."""
    types = require("pyarrow.types")
    with open_parquet(str(file)) as opened:
        schema = opened.schema_arrow
        for name in names:
            kind = schema.field(place(file, name, schema.names)).type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
            if not any(test(kind) for test in (*tests, types.is_null)):  # a column without any value
                raise InputError(f"{file}: the column {name!r} should have text, numbers or truth values, not {kind}")
        for number, row in enumerate(parquet_rows(opened, names), start=1):
            yield number, [_text(value) for value in row]


def place(file: Path | str, name: str, header: Sequence[str]) -> int:
    """Return the place of a column of a file. Raises InputError if there is none, or several, of this name."""
    if header.count(name) != 1:
        found = "no column" if name not in header else f"{header.count(name)} columns"
        raise InputError(f"{file} has {found} {name!r}; {nearest(name, header)}")
    return header.index(name)


def _text(value: object) -> str:
    """Return a value of a Parquet file as the text that a CSV file has for it; None and NaN are empty."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)
