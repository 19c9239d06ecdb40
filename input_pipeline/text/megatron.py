"""Tokens in Megatron's .bin/.idx pairs, such as Pythia's copy of the Pile, and a writer of them.

The .bin is one stream of tokens. The .idx says how it is divided into sequences: magic, u64 version, u8 dtype code,
u64 number of sequences, u64 length of the document index, int32 sizes, int64 offsets in bytes, int64 document index.
Opening reads neither as a whole, so that its time and memory hardly depend on their size.
"""

import contextlib
import json
import mmap
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from input_pipeline.errors import InputError, MissingDataError, first_line
from input_pipeline.text import packing as token_rows
from input_pipeline.text.tokenizer import vocabulary

MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
CHUNK = 1 << 18  # sizes or offsets that are in memory at a time


class Source:
    """The tokens of a .bin/.idx pair as rows; see `input_pipeline.text.packing`.

    Sequences of one length, as Pythia's of 2049 tokens, are rows already and have to fit the context. Others are
    documents, packed as they stand, with or without a token at their ends.
    """

    class_names = None

    def __init__(
        self,
        path: str,
        context: int,
        vocab_size: int | None = None,
        end_of_text: int | None = None,
        tokenizer: str | None = None,
        rows: Sequence[int | None] | None = None,
    ):
        """
        Args:
          path: of the .bin, of the .idx, what the two have in common, or a folder with one such pair.
          context: a row holds one token more.
          vocab_size: all tokens are less than this.
          end_of_text: the token that ends a document; Pythia's is 0.
          tokenizer: the tokenizer.json the tokens come from, for their bytes; by default the one PREFIX.json names.
          rows: [first, last) of the rows, as in a slice: (0, -100) and (-100, None) are training and validation.

        `vocab_size` and `end_of_text` are by default those in PREFIX.json, as `dcvit.tokenize` writes it, or else the
        tokenizer's, or else unknown; tokens of an unknown vocabulary are not checked.

        Raises:
          MissingDataError: no such pair.
          InputError: files that do not fit each other or the context, or a token that is not in the vocabulary.
        """
        self.context, prefix = token_rows.check_context(context), _prefix(path)
        self.path = f"{prefix}.bin"
        index = read_index(prefix)
        about = _about(prefix)
        if about.get("documents", index.sequences) != index.sequences:
            raise InputError(f"{prefix}.json tells of {about['documents']:,} documents, the .idx {index.sequences:,}")
        if vocab_size is not None and about.get("vocab_size", 0) > vocab_size:
            raise InputError(f"{prefix}.json tells of {about['vocab_size']:,} tokens, vocab_size={vocab_size:,}")
        made_by = about.get("tokenizer")
        if tokenizer is None and isinstance(made_by, str) and Path(made_by).exists():
            tokenizer = made_by
        self.vocab_size, self.end_of_text, self.token_bytes = vocabulary(
            tokenizer,
            about.get("vocab_size") if vocab_size is None else vocab_size,
            about.get("end_of_text") if end_of_text is None else end_of_text,
            of_bytes=about.get("tokenizer", "") is None,
        )
        if index.length not in (None, context + 1) and "documents" not in about:
            raise InputError(
                f"{prefix}.idx: rows of {index.length} tokens, the config's context {context} needs {context + 1}"
            )
        self.tokens = _mapped(self.path, index.dtype)
        count = token_rows.row_count(len(self.tokens), context)
        self.chosen = range(count) if rows is None else range(count)[_slice(rows)]
        if not self.chosen:
            raise InputError(f"{self.path} holds {count:,} rows, of which rows={rows} chooses none")
        try:
            self[0]
        except InputError as e:
            raise InputError(f"{self.describe(0)}: {e}") from None

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return token_rows.row_at(self.tokens, self.chosen[index], self.context, self.vocab_size)

    def describe(self, index: int) -> str:
        """The file and the row in it."""
        return f"{self.path}, row {self.chosen[index]}"

    def nbytes(self) -> int:
        """Bytes of the chosen rows."""
        return len(self.chosen) * (self.context + 1) * self.tokens.itemsize


class Index(NamedTuple):
    """What an .idx says of its .bin; `length` is that of each sequence where there are several of one length."""

    dtype: np.dtype
    sequences: int
    length: int | None


def read_index(prefix: str) -> Index:
    """Reads an .idx and checks it against the .bin, by sizes and by the last sequence. Raises InputError."""
    path, data = f"{prefix}.idx", f"{prefix}.bin"
    try:
        size, tokens_size = Path(path).stat().st_size, Path(data).stat().st_size
        with Path(path).open("rb") as file:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size or header[:9] != MAGIC:
                raise InputError(f"{path} is no index of Megatron's: it does not begin with {MAGIC.decode()!r}")
            _, version, code, sequences, documents = HEADER.unpack(header)
            if version != VERSION:
                raise InputError(f"{path}: version {version}, expected {VERSION}")
            if code not in DTYPES:
                kind = "floats" if code in (6, 7) else "unknown"
                raise InputError(f"{path}: dtype code {code} ({kind}), expected one of {', '.join(map(str, DTYPES))}")
            expected = HEADER.size + 12 * sequences + 8 * documents
            if size != expected:
                raise InputError(f"{path} has {size:,} bytes, its header needs {expected:,}: cut off or damaged")
            if not sequences or not tokens_size:
                raise InputError(f"{path} holds no sequences, or {data} no tokens")
            length = _equal_length(file, sequences)
            last_size = _number(file, "<i4", HEADER.size + 4 * (sequences - 1))
            first, last = (_number(file, "<i8", HEADER.size + 4 * sequences + 8 * i) for i in (0, sequences - 1))
    except OSError as e:
        raise InputError(f"cannot read {e.filename or path}: {e.strerror}") from None
    dtype = np.dtype(DTYPES[code])
    end = last + last_size * dtype.itemsize
    if first != 0 or end != tokens_size:
        raise InputError(f"{data} has {tokens_size:,} bytes, {path} needs {end:,}: cut off, or not of one pair")
    if tokens_size % dtype.itemsize:
        raise InputError(f"{data} has {tokens_size:,} bytes, which are no tokens of {dtype.itemsize} bytes each")
    if length is not None and length * sequences * dtype.itemsize != tokens_size:
        raise InputError(f"{path}: its {sequences:,} sequences of {length} tokens do not lie one after the other")
    return Index(dtype, sequences, length)


class Writer:
    """Writes a .bin/.idx pair, one document after the other, and PREFIX.json; use as a context manager.

    The files get their names when all is written: what is interrupted cannot be opened. In memory are four bytes of
    each document.
    """

    def __init__(
        self, prefix: str, vocab_size: int, end_of_text: int | None = None, about: Mapping[str, Any] | None = None
    ):
        """
        Args:
          prefix: the path of the files without .bin, .idx and .json.
          vocab_size: tokens are stored in two bytes where this is 65,536 or less, else in four.
          end_of_text: the token that ends a document; it is written as any other, by the caller.
          about: more to say in PREFIX.json.

        Raises:
          InputError: a file of that name is there already, or cannot be written.
        """
        self.prefix, self.vocab_size = prefix, vocab_size
        self.code = 8 if vocab_size <= 1 << 16 else 4
        self.about = {"vocab_size": vocab_size, "end_of_text": end_of_text, **(about or {})}
        self.sizes, self.tokens = array("i"), 0
        for suffix in (".bin", ".idx", ".json"):
            if Path(prefix + suffix).exists():
                raise InputError(f"{prefix}{suffix} is there already; remove it or choose another name")
        self.file: BinaryIO | None = None

    def __enter__(self) -> "Writer":
        with self._named_errors(".bin"):
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            self.file = Path(f"{self.prefix}.bin.new").open("wb")
        return self

    def add(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Appends a document. Raises InputError for a token that is not in the vocabulary, or a full disk."""
        if self.file is None:
            raise ValueError("the writer is not open")
        values = token_rows.checked(np.asarray(tokens), self.vocab_size)
        with self._named_errors(".bin"):
            self.file.write(values.astype(DTYPES[self.code]).tobytes())
        self.sizes.append(len(values))
        self.tokens += len(values)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self.file is not None:
                with contextlib.suppress(OSError):  # a full disk, said before
                    self.file.close()
            for suffix in (".bin", ".idx", ".json"):
                Path(f"{self.prefix}{suffix}.new").unlink(missing_ok=True)

    def _finish(self) -> None:
        """Writes what is left, then gives the files their names, the .idx last: without it, nothing opens."""
        assert self.file is not None
        if not self.sizes:
            raise InputError(f"no documents to write to {self.prefix}.bin")
        with self._named_errors(".bin"):
            _settle(self.file)
        about = {**self.about, "documents": len(self.sizes), "tokens": self.tokens}
        with self._named_errors(".json"), Path(f"{self.prefix}.json.new").open("wb") as file:
            file.write(json.dumps(about, indent=2).encode() + b"\n")
            _settle(file)
        with self._named_errors(".idx"), Path(f"{self.prefix}.idx.new").open("wb") as file:
            count, width = len(self.sizes), np.dtype(DTYPES[self.code]).itemsize
            file.write(HEADER.pack(MAGIC, VERSION, self.code, count, count + 1))
            sizes = np.frombuffer(self.sizes, np.int32)
            file.write(sizes.astype("<i4").tobytes())
            start = 0
            for at in range(0, count, CHUNK):
                ends = start + np.cumsum(sizes[at : at + CHUNK], dtype=np.int64) * width
                file.write(np.concatenate([[start], ends[:-1]]).astype("<i8").tobytes())
                start = int(ends[-1])
            for at in range(0, count + 1, CHUNK):
                file.write(np.arange(at, min(at + CHUNK, count + 1)).astype("<i8").tobytes())
            _settle(file)
        for suffix in (".bin", ".json", ".idx"):
            with self._named_errors(suffix):
                Path(f"{self.prefix}{suffix}.new").replace(self.prefix + suffix)

    @contextlib.contextmanager
    def _named_errors(self, suffix: str) -> Any:
        try:
            yield
        except OSError as e:
            raise InputError(f"cannot write {self.prefix}{suffix}: {e.strerror}") from None


def _settle(file: BinaryIO) -> None:
    """Waits until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _mapped(path: str, dtype: np.dtype) -> np.ndarray:
    """The tokens of a file, of which nothing is read before it is used."""
    try:
        with Path(path).open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from None
    if hasattr(mmap, "MADV_RANDOM"):
        content.madvise(mmap.MADV_RANDOM)  # rows are read in random order: no more than they need
    return np.frombuffer(content, dtype)


def _prefix(path: str) -> str:
    """The path of a pair without suffix. Raises MissingDataError where one of the two is not there."""
    if "://" in path:
        raise InputError(f"{path}: only local files so far")
    whole = str(Path(path).expanduser())
    if Path(whole).is_dir():
        inside = sorted(Path(whole).glob("*.bin"))
        if len(inside) != 1:
            names = ", ".join(file.name for file in inside[:6]) or "none"
            raise MissingDataError(f"{path} is a folder: expected one .bin file in it, found {names}")
        whole = str(inside[0])
    prefix = whole.removesuffix(".bin").removesuffix(".idx")
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            raise MissingDataError(f"no file {prefix}{suffix}: expected {prefix}.bin and {prefix}.idx")
    return prefix


def about(path: str) -> dict[str, Any]:
    """What PREFIX.json says of a pair; nothing where there is none. Raises as `Source` does."""
    return _about(_prefix(path))


def _about(prefix: str) -> dict[str, Any]:
    """What PREFIX.json says; nothing where there is none."""
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return {}
    try:
        about = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f"cannot read {path}: {first_line(e)}") from None
    numbers = ("vocab_size", "end_of_text", "documents")
    if not isinstance(about, dict) or any(not isinstance(about.get(key), int | None) for key in numbers):
        raise InputError(f"{path}: expected a JSON object with numbers for {', '.join(numbers)}")
    return about


def _slice(rows: Sequence[int | None]) -> slice:
    if len(rows) != 2:
        raise InputError(f"rows={rows} should be two numbers, the first row and the one after the last")
    return slice(*rows)


def _number(file: BinaryIO, dtype: str, at: int) -> int:
    file.seek(at)
    return int(np.frombuffer(file.read(np.dtype(dtype).itemsize), dtype)[0])


def _equal_length(file: BinaryIO, sequences: int) -> int | None:
    """The length of all sequences, or None where there is one only or they differ; stops at the first that differs."""
    length = None
    file.seek(HEADER.size)
    for at in range(0, sequences, CHUNK):
        sizes = np.frombuffer(file.read(4 * min(CHUNK, sequences - at)), "<i4")
        length = int(sizes[0]) if length is None else length
        if (sizes != length).any():
            return None
    return length if sequences > 1 else None
