"""Documents of text files, read once, in order and in little memory.

A .txt file is one document. Each line of a .jsonl or .jsonl.zst file is one document, and so is each row of a .parquet
file.
"""

import glob
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from input_pipeline.errors import InputError, MissingDataError, first_line, nearest
from input_pipeline.files import expand, files_below, named_errors
from input_pipeline.optional import require
from input_pipeline.parquet_files import open_parquet, place, read_batches
from input_pipeline.text.tokenizer import Tokenizer

LINE_SUFFIXES = (".jsonl", ".jsonl.zst")
PARQUET = ".parquet"
SUFFIXES = (".txt", *LINE_SUFFIXES, PARQUET)
INDEX_SUFFIX = ".offsets"  # of the index that `input_pipeline.tfrecord` stores next to a file
PIECE_BYTES = 1 << 16  # of a compressed file, read at a time
BATCH_CHARACTERS = 1 << 20  # characters that are tokenized together
MAX_WINDOW_BYTES = 1 << 31  # the largest zstd window, of --long=31; memory is allocated only for files that use it


class Document(NamedTuple):
    """The strings of one document, one for each key that is read, with its location and name."""

    texts: tuple[str, ...]
    location: str  # "file:line"
    name: str  # the same, relative to the folder of the files
    bytes_read: int  # of all files so far, as they are stored; those of a Parquet file count at its end


class EncodedDocument(NamedTuple):
    """A document and the tokens of each of its strings."""

    document: Document
    tokens: list[np.ndarray]


class Files(NamedTuple):
    """Files in order, the folder to which their names are relative, and the sum of their sizes in bytes.

    The folder does not depend on the files that exist, because the split of a document follows from its name.
    """

    paths: list[Path]
    root: Path
    nbytes: int


def find_files(path: str, suffixes: Sequence[str] = SUFFIXES, contains: str = "") -> Files:
    """Return the file at a path, the files in a folder and its subfolders, or the files that match a glob, sorted.

    Hidden files in a folder are ignored.

    Args:
      path: a file, folder or glob.
      suffixes: suffixes that the names must have if `contains` is empty.
      contains: string that the names of a folder's files must contain. Files that are given by name or glob may have
        any name.

    Raises:
      MissingDataError: no file was found.
      InputError: a file has another suffix, the path is a URL, or a folder cannot be read.
    """
    if "://" in path:
        raise InputError(f"{path}: only local files are supported")
    place = expand(path)
    expected = f"with {contains!r} in their names" if contains else f"ending in {', '.join(suffixes)}"

    def matches(file: Path) -> bool:
        name = file.name
        return contains in name and not name.endswith(INDEX_SUFFIX) if contains else name.endswith(tuple(suffixes))

    if place.is_dir():
        paths = [p for p in map(Path, files_below(place)) if matches(p)]
        root = place
    else:
        paths = [place] if place.is_file() else [Path(p) for p in glob.glob(str(place), recursive=True)]  # noqa: PTH207
        paths = [p for p in paths if p.is_file() and (not contains or not p.name.endswith(INDEX_SUFFIX))]
        fixed = itertools.takewhile(lambda part: part == glob.escape(part), place.parent.parts)
        root = place.parent if place.is_file() else Path(*fixed)  # in front of the first part with a wildcard
    if not paths:
        raise MissingDataError(f"no files at {path}: expected a file, a glob, or a folder of files {expected}")
    for file in paths:
        if not contains and not matches(file):
            raise InputError(f"{file}: expected a name {expected}")
    paths.sort(key=lambda file: file.relative_to(root).as_posix())
    return Files(paths, root, sum(file.stat().st_size for file in paths))


def read_documents(files: Files, keys: Sequence[str]) -> Iterator[Document]:
    """Yield every document with the strings of its `keys`, or with the whole text of a .txt file.

    Documents with a single, empty string are skipped.

    Raises:
      InputError: a file is damaged or cut off, the text is not UTF-8, a line is not
        a JSON object, or a key (a column of a .parquet file) is missing or is not a string. The message names the file
        and the line or row.
    """
    before = 0
    for file in files.paths:
        name = file.relative_to(files.root).as_posix()
        with named_errors(file), file.open("rb") as stream:
            for number, texts in _texts(file, stream, keys):
                if any(texts) or len(keys) > 1:
                    yield Document(texts, f"{file}:{number}", f"{name}:{number}", before + stream.tell())
            before += file.stat().st_size


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[EncodedDocument]:
    """Yield each document with the tokens of its strings. Batches of documents are tokenized by several threads."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document.texts)) + len(document.location)  # positive even for empty strings
        if size >= BATCH_CHARACTERS:
            yield from _encode_batch(batch, tokenizer)
            batch, size = [], 0
    yield from _encode_batch(batch, tokenizer)


def in_validation(name: str, fraction: float) -> bool:
    """Return True if the document `name` is in the validation split, about a `fraction` of all documents.

    The split follows from a hash of the document's name, so adding or removing a document does not move others.
    """
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") < fraction * 2**64


def _encode_batch(batch: list[Document], tokenizer: Tokenizer) -> Iterator[EncodedDocument]:
    """Yield each document of `batch` with the tokens of its strings, which are tokenized in one call."""
    tokens = iter(tokenizer.encode_batch([text for document in batch for text in document.texts]))
    for document in batch:
        yield EncodedDocument(document, [next(tokens) for _ in document.texts])


def _texts(file: Path, stream: BinaryIO, keys: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (line or row number, or 1; strings) of each document of a file, which `stream` reads."""
    if file.name.endswith(LINE_SUFFIXES):
        lines = _split(_decompressed(file, stream)) if file.name.endswith(".zst") else stream
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _strings(line, keys, f"{file}:{number}")
    elif file.name.endswith(PARQUET):
        yield from _rows(file, keys)
    else:
        yield 1, (_decode(stream.read(), f"{file}:1"),)


def _strings(line: bytes, keys: Sequence[str], location: str) -> tuple[str, ...]:
    """Return the strings that the JSON object in a line has for `keys`. Raises InputError if it is invalid."""
    text = _decode(line, location)
    try:
        content = json.loads(text)
    except ValueError as e:
        raise InputError(f"{location}: not JSON: {first_line(e)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{location}: {type(content).__name__} instead of a JSON object")
    for key in keys:
        if key not in content:
            raise InputError(f"{location}: no key {key!r}; {nearest(key, content)}")
        if not isinstance(content[key], str):
            raise InputError(f"{location}: {key!r} is {type(content[key]).__name__}, expected a string")
        try:
            content[key].encode()
        except UnicodeEncodeError as e:
            raise InputError(f"{location}: {key!r} is not Unicode: {e.reason} at character {e.start + 1}") from None
    return tuple(content[key] for key in keys)


def _decode(data: bytes, location: str) -> str:
    """Return UTF-8 bytes, which start at `location`, "file:line", as text. InputError names line and byte of damage."""
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        file, _, first = location.rpartition(":")
        line = int(first) + data.count(b"\n", 0, e.start)
        at = e.start - (data.rfind(b"\n", 0, e.start) + 1)
        raise InputError(f"{file}:{line}: not UTF-8: {e.reason} at byte {at + 1}") from None


def _rows(file: Path, keys: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (number, strings of the columns `keys`) of each row of a Parquet file."""
    types = require("pyarrow.types")
    with open_parquet(str(file)) as opened:
        schema = opened.schema_arrow
        for key in keys:
            place(file, key, schema.names)
            if not types.is_string(kind := schema.field(key).type) and not types.is_large_string(kind):
                raise InputError(f"{file}: the column {key!r} should contain strings, not {kind}")
        batches = (batch for group in range(opened.num_row_groups) for batch in read_batches(opened, group, keys))
        rows = (row for batch in batches for row in zip(*(batch[key].to_pylist() for key in keys), strict=True))
        for number, texts in enumerate(rows, start=1):
            if None in texts:
                raise InputError(f"{file}:{number}: {keys[texts.index(None)]!r} is null, expected a string")
            yield number, tuple(map(str, texts))


def _split(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a text that is given in pieces."""
    rest = [b""]  # the parts of a line whose end was not read yet
    for data in pieces:
        first, *others = data.split(b"\n")
        rest.append(first)
        for other in others:
            yield b"".join(rest)
            rest = [other]
    yield b"".join(rest)


def _decompressed(file: Path, stream: BinaryIO) -> Iterator[bytes]:
    """Yield the decompressed pieces of a zstd file with any number of frames.

    zstandard's stream reader would accept a file that is cut off; here the last frame must be complete.
    """
    zstandard = require("zstandard")
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    frame = None
    while data := stream.read(PIECE_BYTES):
        while data:
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as e:
                raise InputError(f"{file} is damaged before byte {stream.tell():,}: {first_line(e)}") from None
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None or not stream.tell():
        raise InputError(f"{file} is cut off at byte {stream.tell():,}: its last zstd frame is incomplete")
