"""Image files listed with their labels in a CSV or Parquet file, with one label for each image or several."""

import csv
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from input_pipeline import source as base
from input_pipeline.errors import InputError, MissingDataError, ReadingError, nearest
from input_pipeline.files import OpenedFiles, expand, named_errors
from input_pipeline.images.folder import describe_classes
from input_pipeline.optional import require
from input_pipeline.parquet_files import open_parquet, place

logger = logging.getLogger(__name__)

DELIMITERS = {".csv": ",", ".tsv": "\t"}
IGNORED = ("", "-1")  # cells of unknown labels
TRUTH = {"1": 1, "1.0": 1, "true": 1, "0": 0, "0.0": 0, "false": 0, **dict.fromkeys((*IGNORED, "-1.0"), -1)}
PLACEHOLDER = re.compile(r"\{([^{}]+)\}")  # of a column in `path`
NEGATIVE = re.compile(r"-\d+")  # no label, but "-1" alone in a cell
WHOLE = re.compile(r"-?\d+\.0")  # an integer as libraries write it where other rows have no value


class Labels(NamedTuple):
    """Labels of some rows, N or N C as `input_pipeline.source.Source.labels` describes them, and the class names."""

    array: np.ndarray
    class_names: tuple[str, ...]


class Table(NamedTuple):
    """Columns of a file by name as text, and the number of each row; in text, its last line."""

    file: Path
    columns: dict[str, list[str]]
    numbers: list[int]

    def location(self, row: int) -> str:
        """Return the location of a row for messages, such as "labels.csv:7"."""
        return f"{self.file}:{self.numbers[row]}"


def read_table(path: str, names: Sequence[str]) -> Table:
    """Read some columns of a file ending in .csv (commas), .tsv (tabs) or .parquet, whose first line names them.

    Missing values of a Parquet file become empty.

    Raises:
      MissingDataError: the file does not exist.
      InputError: the file is damaged, or a column is missing.
    """
    file = expand(path)
    if "://" in path or not file.is_file():
        raise MissingDataError(f"no file {path}{'; only local files are read' * ('://' in path)}")
    if file.suffix.lower() == ".parquet":
        columns = _parquet_columns(file, names)
        numbers = [*range(1, len(columns[names[0]]) + 1)]
    elif file.suffix.lower() in DELIMITERS:
        columns, numbers = _text_columns(file, names)
    else:
        raise InputError(f"{file}: expected a name ending in {', '.join([*DELIMITERS, '.parquet'])}")
    if not numbers:
        raise InputError(f"{file} has no rows")
    return Table(file, columns, numbers)


def _parquet_columns(file: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Return columns of a Parquet file, as the text of a CSV file, with 1 and 0 for true and false."""
    types, columns = require("pyarrow.types"), dict[str, list[str]]()
    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    with open_parquet(str(file)) as opened:
        for name in names:
            kind = opened.schema_arrow.field(place(file, name, opened.schema_arrow.names)).type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            if not any(test(kind) for test in (*tests, types.is_null)):  # a column without any value
                raise InputError(f"{file}: the column {name!r} should have text, numbers or truth values, not {kind}")
            columns[name] = [_text(value) for value in opened.read([name]).column(0).to_pylist()]
    return columns


def _text(value: object) -> str:
    """Return a value of a Parquet file as the text that a CSV file has for it; None and NaN are empty."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _text_columns(file: Path, names: Sequence[str]) -> tuple[dict[str, list[str]], list[int]]:
    """Return columns of a .csv or .tsv file, and the number of the last line of each row."""
    with named_errors(file):
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise InputError(f"{file} is not UTF-8: {e.reason} at byte {e.start + 1:,}") from None
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=DELIMITERS[file.suffix.lower()], strict=True)
    numbers, cells = [], []
    try:
        header = [name.strip() for name in next(reader, [])]
        places = {name: place(file, name, header) for name in names}
        for row in filter(None, reader):  # without blank lines
            if len(row) != len(header):
                raise InputError(f"{file}:{reader.line_num}: {len(row)} cells, but {len(header)} in the first line")
            numbers.append(reader.line_num)
            cells.append(row)
    except csv.Error as e:
        raise InputError(f"{file}:{reader.line_num}: {e}") from None
    return {name: [row[at] for row in cells] for name, at in places.items()}, numbers


class Source(base.Source):
    """Images of a manifest: a file ending in .csv, .tsv or .parquet, with a row for each image.

    An example is `image` (the bytes of the image file), and for one label `label` (int32; -1 if it is unknown), for
    several `labels` (float32, 1 for the classes of the image, 0 for others, and -1 for unknown ones). Unknown labels
    are empty cells and -1.
    """

    class_names: tuple[str, ...]
    labels: np.ndarray
    opened: OpenedFiles

    def __init__(
        self,
        manifest: str,
        path: str = "path",
        labels: str | Sequence[str] = "label",
        sep: str | None = None,
        classes: str | Sequence[str] | None = None,
        split: str | None = None,
        split_column: str = "split",
        data_dir: str | None = None,
    ):
        """
        Args:
          manifest: the file.
          path: the column of the paths, or a pattern with columns in braces, such as "images/{id}.png".
          labels: the column of class names or numbers; or several columns, one for each class, with 1 and 0.
          sep: the cells of `labels` are names of several classes with this separator between them. The separator alone
            is an image of no class.
          classes: names of the classes in the order of their numbers, or a file with a name in each line. By default
            the sorted names of all rows, of every split.
          split: use only rows with this text in `split_column`; by default all rows.
          split_column: the column of splits.
          data_dir: folder that contains the images, to which paths are relative; by default that of the manifest.

        Raises:
          MissingDataError: the manifest or all image files do not exist.
          InputError: the manifest is damaged, a column, class, split or image file is missing, an image occurs twice,
            or a path leads out of the folder.
        """
        columns, named = ([labels], labels) if isinstance(labels, str) else ([*labels], None)
        if named is None and (sep is not None or classes is not None or not columns):
            raise InputError(f"labels={labels!r} are columns of classes: expected one or more, and no sep or classes")
        parts = PLACEHOLDER.findall(path) or [path]
        table = read_table(manifest, [*parts, *columns, *([] if split is None else [split_column])])
        rows = _rows_of_split(table, split, split_column)
        if named is None:
            self.labels, self.class_names = _truths(table, columns, rows)
        else:
            self.labels, self.class_names = _named(table, named, sep, _class_list(classes), rows)
        self.root = os.path.abspath(table.file.parent if data_dir is None else expand(data_dir))  # noqa: PTH100 - no links
        files = _files(table, path, self.root)
        self.files = [files[row] for row in rows]
        self.opened = _opened(table, self.files, self.root, rows)
        self._log(table.file if split is None else f"{table.file}, {split}")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> base.Example:
        image, label = self.opened.read(index + 1), self.labels[index]
        return {"image": image, "labels": label.astype(np.float32)} if label.ndim else {"image": image, "label": label}

    def describe(self, index: int) -> str:
        """Return the file of an example."""
        return self.files[index]

    def name(self, index: int) -> str:
        """Return the path of an example relative to the folder of the images."""
        return self.files[index].removeprefix(self.root)

    def _log(self, what: object) -> None:
        """Log the numbers of images and classes, and of images with unknown labels."""
        names, several = self.class_names, self.labels.reshape(len(self), -1)
        counts = (several == 1).sum(axis=0)
        if self.labels.ndim == 1:
            counts = np.bincount(self.labels[self.labels >= 0], minlength=len(names))
        shown = describe_classes(len(self), counts, names) if counts.any() else f"{len(self):,} images without labels"
        if self.labels.ndim > 1 and (several < 0).any():
            shown += f"; {(several < 0).mean():.1%} of the labels are unknown"
        if unknown := int((several < 0).all(axis=1).sum()):
            shown += f"; {unknown:,} image(s) without a known label"
        logger.info("%s: %s", what, shown)
        if self.labels.ndim == 1 and (joined := [name for name in names if "|" in name]):
            logger.warning("%s: %r is one class; several classes in a cell need sep='|'", what, joined[0])


def _truths(table: Table, columns: Sequence[str], rows: Sequence[int]) -> Labels:
    """Return the labels of `rows` in columns of 1, 0 and unknown cells; InputError for another cell in any row."""
    if len(set(columns)) < len(columns):
        raise InputError(f"labels={columns!r}: a column occurs twice")
    array = np.empty((len(rows), len(columns)), np.int8)
    for number, column in enumerate(columns):
        values = np.empty(len(table.numbers), np.int8)
        for row, cell in enumerate(table.columns[column]):
            value = TRUTH.get(cell.strip().lower())
            if value is None:
                expected = "1, 0, or -1 or nothing for an unknown label"
                raise InputError(f"{table.location(row)}: {column!r} is {cell[:40]!r}, expected {expected}")
            values[row] = value
        array[:, number] = values[rows]
    return Labels(array, tuple(columns))


def _named(table: Table, column: str, sep: str | None, classes: Sequence[str] | None, rows: Sequence[int]) -> Labels:
    """Return the labels of `rows` in a column of class names or numbers, one in each cell, or several with `sep`.

    The classes are those of all rows, and InputError names the row of an invalid one.
    """
    if sep is not None and not sep.strip():  # a cell with the separator alone, for no class, would be an empty one
        raise InputError(f"sep={sep!r}: expected the text between two class names, such as '|'")
    cells = [_cell(cell) for cell in table.columns[column]]
    listed = [[cell] if sep is None else [name for name in map(_cell, cell.split(sep)) if name] for cell in cells]
    listed = [[] if cell in IGNORED else names for cell, names in zip(cells, listed, strict=True)]
    first = {name: row for row in reversed(range(len(cells))) for name in listed[row]}  # the first row of each name
    if negative := next(filter(NEGATIVE.fullmatch, first), None):
        message = f"{negative[:40]!r} is no class; an unknown label is -1 alone, or nothing"
        raise InputError(f"{table.location(first[negative])}: {message}")
    if not first:
        raise InputError(f"{table.file}: no row has a label in the column {column!r}")
    class_names, numbers = _numbered(first, classes)
    if unknown := first.keys() - numbers.keys():
        name = min(unknown, key=first.__getitem__)
        raise InputError(f"{table.location(first[name])}: no class {name[:40]!r}; {nearest(name, class_names)}")
    shape = (len(rows),) if sep is None else (len(rows), len(class_names))
    array = np.zeros(shape, np.int32 if sep is None else np.int8)
    for i, row in enumerate(rows):
        found = [numbers[name] for name in listed[row]]
        if cells[row] in IGNORED:
            array[i] = -1
        elif sep is None:
            array[i] = found[0]
        else:
            array[i, found] = 1
    return Labels(array, class_names)


def _cell(cell: str) -> str:
    """Return a label without spaces around it, and without ".0" after an integer."""
    cell = cell.strip()
    return cell[:-2] if WHOLE.fullmatch(cell) else cell


def _numbered(names: Iterable[str], classes: Sequence[str] | None) -> tuple[tuple[str, ...], Mapping[str, int]]:
    """Return the class names, and the number of each name that a cell may have.

    Names that are all integers are sorted as numbers. With other `classes`, integers are the numbers of the classes.
    """
    names = set(names)
    are_integers = all(name.isdecimal() and len(name) < 19 for name in names)
    if classes is None:
        found = sorted(names, key=lambda name: (int(name), name)) if are_integers else sorted(names)
        return tuple(found), {name: number for number, name in enumerate(found)}
    if are_integers and not names & set(classes):
        return tuple(classes), {name: int(name) for name in names if int(name) < len(classes)}
    return tuple(classes), {name: number for number, name in enumerate(classes)}


def _class_list(classes: str | Sequence[str] | None) -> Sequence[str] | None:
    """Return the class names of a list, or of a file with a name in each line; None for None."""
    if classes is None:
        return None
    what, found = "classes", classes
    if isinstance(classes, str):
        what, file = f"classes={classes}", expand(classes)
        if not file.is_file():
            raise MissingDataError(f"{what}: no such file")
        try:
            found = [line.strip() for line in file.read_bytes().decode("utf-8-sig").splitlines()]
        except (OSError, ValueError) as e:
            raise InputError(f"{what}: {e}") from None
    doubled = [name for name, count in Counter(found).items() if count > 1 or not name]
    if doubled or not found:
        raise InputError(f"{what}: expected different names, one for each class, found {doubled or found}")
    return found


def _rows_of_split(table: Table, split: str | None, column: str) -> list[int]:
    """Return the rows with `split` in the column of splits. Raises InputError if there are none."""
    if split is None:
        return [*range(len(table.numbers))]
    cells = [cell.strip() for cell in table.columns[column]]
    rows = [row for row, cell in enumerate(cells) if cell == split]
    if not rows:
        raise InputError(
            f"{table.file}: no row has {split!r} in the column {column!r}; {nearest(split, sorted({*cells}))}"
        )
    return rows


def _files(table: Table, path: str, root: str) -> list[str]:
    """Return the image file of each row. Raises InputError for one out of the folder `root`, or that occurs twice."""
    pieces = PLACEHOLDER.split(path) if PLACEHOLDER.search(path) else ["", path, ""]
    inside = root.rstrip(os.sep) + os.sep
    first: dict[str, int] = {}
    for row in range(len(table.numbers)):
        name = "".join(table.columns[p][row] if i % 2 else p for i, p in enumerate(pieces))
        where = table.location(row)
        if not all(table.columns[p][row] for p in pieces[1::2]) or "://" in name:
            raise InputError(f"{where}: the path {name[:80]!r} should be that of a local file")
        file = os.path.normpath(os.path.join(inside, name))  # noqa: PTH118 - there may be a million
        if not file.startswith(inside):
            raise InputError(
                f"{where}: {name!r} is outside of {root}; set data_dir to a folder that contains all images"
            )
        if (before := first.setdefault(file, row)) != row:
            raise InputError(
                f"{where}: {name!r} is also in line {table.numbers[before]}; expected a row for each image"
            )
    return [*first]


def _opened(table: Table, files: Sequence[str], root: str, rows: Sequence[int]) -> OpenedFiles:
    """Return the opened manifest and image files. Raises InputError if files are missing."""
    manifest = os.path.abspath(table.file)  # noqa: PTH100 - links are not followed
    try:
        return OpenedFiles([manifest, *files], os.path.commonpath([root, os.path.dirname(manifest)]), whole=1)  # noqa: PTH120
    except ReadingError:
        missing = [i for i, file in enumerate(files) if not os.path.exists(file)]  # noqa: PTH110
        if not missing:
            raise
        error = MissingDataError if len(missing) == len(files) else InputError
        raise error(
            f"{table.location(rows[missing[0]])}: no file {files[missing[0]]}; {len(missing):,} of {len(files):,} "
            "image files are missing"
        ) from None
