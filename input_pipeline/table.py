"""Columns of a CSV or Parquet file as text, with the line or row of each."""

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from input_pipeline.errors import InputError, MissingDataError, nearest
from input_pipeline.files import expand, named_errors
from input_pipeline.optional import require
from input_pipeline.row_groups import open_parquet, read_batches

SUFFIXES = (".csv", ".tsv", ".parquet")


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
        places = [_place(file, name, header) for name in names]
        for row in reader:
            if row and len(row) != len(header):
                raise InputError(f"{file}:{reader.line_num}: {len(row)} cells, but {len(header)} in the first line")
            if row:
                yield reader.line_num, [row[place] for place in places]
    except csv.Error as e:
        raise InputError(f"{file}:{reader.line_num}: {e}") from None


def _parquet_rows(file: Path, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the values of `names` of each row of a Parquet file, as text."""
    types = require("pyarrow.types")
    number = itertools.count(1)
    with open_parquet(str(file)) as opened:
        schema = opened.schema_arrow
        for name in names:
            kind = schema.field(_place(file, name, schema.names)).type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
            if not any(test(kind) for test in (*tests, types.is_null)):  # a column without any value
                raise InputError(f"{file}: the column {name!r} should have text, numbers or truth values, not {kind}")
        for group in range(opened.num_row_groups):
            for batch in read_batches(opened, group, names):
                for row in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                    yield next(number), [_text(value) for value in row]


def _place(file: Path, name: str, header: Sequence[str]) -> int:
    """Return the place of a column. Raises InputError if there is none, or several, of this name."""
    if header.count(name) != 1:
        found = "no column" if name not in header else f"{header.count(name)} columns"
        raise InputError(f"{file} has {found} {name!r}; {nearest(name, header)}")
    return header.index(name)


def _text(value: object) -> str:
    """Return a value of a Parquet file as the text that a CSV file has for it; None and NaN are empty."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)
