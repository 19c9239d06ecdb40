"""Parquet files, decoded by pyarrow a few rows at a time."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from input_pipeline.errors import InputError, ReadingError, first_line, nearest
from input_pipeline.files import file_state
from input_pipeline.optional import require

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

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


def place(file: Path | str, name: str, header: Sequence[str]) -> int:
    """Return the place of a column of a table. Raises InputError if there is none, or several, of this name."""
    if header.count(name) != 1:
        found = "no column" if name not in header else f"{header.count(name)} columns"
        raise InputError(f"{file} has {found} {name!r}; {nearest(name, header)}")
    return header.index(name)
