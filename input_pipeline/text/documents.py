"""Documents from files: .txt, one a file; .jsonl and .jsonl.zst, one a line. Read once, in order, in little memory."""

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from input_pipeline import memory
from input_pipeline.errors import InputError, MissingDataError, first_line, nearest
from input_pipeline.optional import require
from input_pipeline.text.tokenizer import Tokenizer

LINES = (".jsonl", ".jsonl.zst")
SUFFIXES = (".txt", *LINES)
INDEX = ".offsets"  # of what `input_pipeline.tfrecord` keeps beside a file
PIECE = 1 << 16  # bytes read at a time
PACKED_PIECE = 1 << 10  # and of what is packed: zstd's best ratio makes 32 MB of them, four bytes for each block
BATCH = 1 << 20  # characters that are tokenised together
WINDOW = 1 << 31  # the largest that zstd's --long allows; so much memory only where a file was written so
LONGEST = 1 << 27  # bytes of a line, some fifty novels; parsing JSON takes up to twenty times as much memory


class Document(NamedTuple):
    """The strings of one document; `where` is its "file:line", `name` the same from the folder on, `read` the number
    of bytes read so far of all files as they are stored."""

    texts: tuple[str, ...]
    where: str
    name: str
    read: int


Encoded = tuple[Document, list[np.ndarray]]  # with the tokens of its texts


class Files(NamedTuple):
    """Files in order, the folder that their names count from, and their bytes together."""

    paths: list[Path]
    root: Path
    nbytes: int


def find_files(path: str, suffixes: Sequence[str] = SUFFIXES, contains: str = "") -> Files:
    """A file; or all files below a folder, hidden ones left out; or those that a glob names. Sorted.

    Args:
      path: the file, folder or glob.
      suffixes: how the names have to end, where `contains` is empty.
      contains: what the names of a folder's files have to contain instead; any other name is given on purpose.

    Raises:
      MissingDataError: there are none.
      InputError: a name of another suffix, or a file that cannot be read.
    """
    if "://" in path:
        raise InputError(f"{path}: only local files so far")
    place = Path(path).expanduser()
    expected = f"with {contains!r} in their names" if contains else f"ending in {', '.join(suffixes)}"

    def fits(file: Path) -> bool:
        name = file.name
        return contains in name and not name.endswith(INDEX) if contains else name.endswith(tuple(suffixes))

    if place.is_dir():
        found = (p for p in place.rglob("*") if fits(p) and p.is_file())
        paths = [p for p in found if not any(part.startswith(".") for part in p.relative_to(place).parts)]
        root = place
    else:
        paths = [place] if place.is_file() else [Path(p) for p in glob.glob(str(place), recursive=True)]  # noqa: PTH207
        paths = [p for p in paths if p.is_file() and (not contains or not p.name.endswith(INDEX))]
        root = Path(os.path.commonpath([p.parent for p in paths])) if paths else place
    if not paths:
        raise MissingDataError(f"no files at {path}: expected a file, a glob, or a folder of files {expected}")
    for file in paths:
        if not contains and not fits(file):
            raise InputError(f"{file}: expected a name {expected}")
    paths.sort(key=lambda file: file.relative_to(root).as_posix())
    return Files(paths, root, sum(file.stat().st_size for file in paths))


def read_documents(files: Files, keys: Sequence[str]) -> Iterator[Document]:
    """Every document with the strings of its `keys`; of a .txt file, which has no keys, all of it. Those
    with a single key, which is empty, are left out.

    Raises:
      InputError: a file that is cut off or damaged, a line of more than LONGEST bytes, a .txt beyond the memory left,
        text that is not UTF-8, a line that is no JSON object, a key that is not there or holds no string; the message
        names file and line.
    """
    before = 0
    for file in files.paths:
        name = file.relative_to(files.root).as_posix()
        try:
            if file.name.endswith(LINES):
                for number, line, read in _lines(file):
                    where = f"{file}:{number}"
                    texts = _strings(line, keys, where)
                    if any(texts) or len(keys) > 1:
                        yield Document(texts, where, f"{name}:{number}", before + read)
            elif text := _decode(_whole(file), f"{file}:1"):
                yield Document((text,), f"{file}:1", f"{name}:1", before + file.stat().st_size)
            before += file.stat().st_size
        except OSError as e:
            raise InputError(f"cannot read {file}: {e.strerror}") from None


def encoded(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Each document with the tokens of its texts; some are tokenised together, which may take several threads."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document.texts)) + len(document.where)  # however many texts are empty
        if size >= BATCH:
            yield from _encoded(batch, tokenizer)
            batch, size = [], 0
    yield from _encoded(batch, tokenizer)


def held_out(name: str, fraction: float) -> bool:
    """Whether a document is for validation: by a hash of its name, so that others that come or go move none."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") < fraction * 2**64


def _encoded(batch: list[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    tokens = iter(tokenizer.encode_batch([text for document in batch for text in document.texts]))
    for document in batch:
        yield document, [next(tokens) for _ in document.texts]


def _strings(line: bytes, keys: Sequence[str], where: str) -> tuple[str, ...]:
    """The strings of some keys of a JSON object."""
    text = _decode(line, where)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as e:
        raise InputError(f"{where}: not JSON: {e.msg} at character {e.pos + 1}") from None
    except (ValueError, RecursionError) as e:  # a number of thousands of digits, or what is nested as deeply
        raise InputError(f"{where}: not JSON of a document: {first_line(e)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{where}: {type(content).__name__} instead of a JSON object")
    for key in keys:
        if key not in content:
            raise InputError(f"{where}: no key {key!r}; {nearest(key, content)}")
        if not isinstance(content[key], str):
            raise InputError(f"{where}: {key!r} is {type(content[key]).__name__}, expected a string")
        try:
            content[key].encode()
        except UnicodeEncodeError as e:
            raise InputError(f"{where}: {key!r} is not Unicode: {e.reason} at character {e.start + 1}") from None
    return tuple(content[key] for key in keys)


def _decode(data: bytes, where: str) -> str:
    """UTF-8 to a string. Raises InputError with the line, counted from that in `where`, and the byte in it."""
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        file, _, first = where.rpartition(":")
        line = int(first) + data.count(b"\n", 0, e.start)
        at = e.start - (data.rfind(b"\n", 0, e.start) + 1)
        raise InputError(f"{file}:{line}: not UTF-8: {e.reason} at byte {at + 1}") from None


def _lines(file: Path) -> Iterator[tuple[int, bytes, int]]:
    """(number, line, bytes of the file read so far) of each line that is not blank."""
    number, rest, size = 0, [b""], 0  # the parts of a line that has no end yet, and their bytes
    read = 0
    for data, read in _unpacked(file) if file.name.endswith(".zst") else _pieces(file, PIECE):
        first, *others = data.split(b"\n")
        rest.append(first)
        for other in others:
            number, line, rest, size = number + 1, b"".join(rest), [other], 0
            if line.strip():
                yield number, line, read
        size += len(rest[-1])
        if size > LONGEST:
            raise InputError(f"{file}:{number + 1}: a line of more than {LONGEST:,} bytes is no document")
    if (line := b"".join(rest)).strip():
        yield number + 1, line, read


def _whole(file: Path) -> bytes:
    """All bytes of a file. Raises InputError where they and a string of them have no room."""
    size, left = file.stat().st_size, memory.available()
    if left is not None and 2 * size > left:
        raise InputError(f"{file}: one document of {size / 1e9:.1f} GB, and {left / 1e9:.1f} GB of memory left")
    return file.read_bytes()


def _pieces(file: Path, piece: int) -> Iterator[tuple[bytes, int]]:
    """(some bytes, bytes read so far) of a file."""
    read = 0
    with file.open("rb") as stream:
        while data := stream.read(piece):
            read += len(data)
            yield data, read


def _unpacked(file: Path) -> Iterator[tuple[bytes, int]]:
    """(unpacked bytes, packed bytes read so far) of a zstd file of any number of frames.

    A reader of the stream would yield what there is of a file that is cut off; here the last frame has to end.
    """
    zstandard = require("zstandard")
    left = memory.available()
    window = WINDOW if left is None else max(WINDOW >> 8, min(WINDOW, left // 2))
    unpacker: Any = zstandard.ZstdDecompressor(max_window_size=window)
    frame: Any = None
    read = 0
    for data, read in _pieces(file, min(PIECE, PACKED_PIECE)):
        while data:
            frame = frame or unpacker.decompressobj()
            try:
                unpacked = frame.decompress(data)
            except zstandard.ZstdError as e:
                if "too much memory" in str(e):
                    raise InputError(f"{file}: a zstd frame needs a window of more than {window:,} bytes") from None
                raise InputError(f"{file} is damaged before byte {read:,}: {first_line(e)}") from None
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
            yield unpacked, read
    if frame is not None or not read:
        raise InputError(f"{file} is cut off at byte {read:,}: its last zstd frame does not end")
