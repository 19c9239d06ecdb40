"""Tokens in Megatron's .bin/.idx pairs, such as Pythia's tokenized Pile: reading, and writing from text files.

PREFIX.bin is one stream of tokens. PREFIX.idx divides it into sequences and contains, in this order: magic, version
(u64), dtype code (u8), number of sequences (u64), length of the document index (u64), lengths of the sequences (int32),
their offsets in bytes (int64), document index (int64). PREFIX.json, which `tokenize_files` also writes, describes the
tokens; it is not part of Megatron's format.
"""

import json
import mmap
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

import numpy as np

from input_pipeline import huggingface
from input_pipeline.errors import InputError, MissingDataError, first_line
from input_pipeline.files import OpenedFiles, check_unchanged, expand, named_errors
from input_pipeline.text import packing
from input_pipeline.text.documents import encode_documents, find_files, read_documents
from input_pipeline.text.tokenizer import FileTokenizer, end_token, open_tokenizer, vocabulary

CHECKED_AT_ONCE = 1 << 20  # sequences
MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
SUFFIXES = (".bin", ".json", ".idx")  # in the order in which a writer names them: readers open a pair by its .idx

# Called after each document with the bytes read, the bytes of all files, and the tokens written so far.
OnProgress = Callable[[int, int, int], None]


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


class Source(packing.StreamSource):
    """Tokens of a .bin/.idx pair as rows.

    If all sequences have the same length, such as Pythia's 2,049 tokens, each is a row, and the length must match the
    context. Otherwise the sequences are documents and are packed as `input_pipeline.text.packing` describes, without
    adding tokens at their ends.
    """

    opened: OpenedFiles

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
        By default, `vocab_size` and `end_of_text` are those in PREFIX.json, which `dcvit.tokenize` writes, or the
        tokenizer's. Tokens of an unknown vocabulary are not checked.

        Args:
          path: path of the .bin or the .idx file, their common prefix, or a folder with one pair.
          context: number of tokens in a model input; a row has one token more.
          vocab_size: number of different tokens.
          end_of_text: the token that ends a document; Pythia's is 0.
          tokenizer: path of the tokenizer.json that made the tokens, from which their bytes are known; by default the
            one in PREFIX.json.
          rows: [first, last + 1] of the rows to use, as in a slice. For example, [0, -100] for training and
            [-100, None] for validation.

        Raises:
          MissingDataError: the files do not exist.
          InputError: the files are not a pair, do not match the context, or contain a token that is not in the
            vocabulary.
        """
        self.context, prefix = packing.check_context(context), find_prefix(path)
        self.path = f"{prefix}.bin"
        self.opened = OpenedFiles([self.path, f"{prefix}.idx"], Path(prefix).parent)
        index, description = read_index(prefix), read_description(prefix)
        documents, tokens = description.get("documents"), description.get("vocab_size")
        if documents not in (None, index.sequences):
            raise InputError(f"{prefix}.json gives {documents:,} documents, but the .idx {index.sequences:,} sequences")
        if vocab_size is not None and tokens is not None and tokens > vocab_size:
            raise InputError(f"{prefix}.json gives a vocab_size of {tokens:,}, more than vocab_size={vocab_size:,}")
        made_by = description.get("tokenizer")
        if tokenizer is None and isinstance(made_by, str) and (huggingface.is_name(made_by) or Path(made_by).exists()):
            tokenizer = made_by
        self.vocab_size, self.end_of_text, self.token_bytes = vocabulary(
            tokenizer,
            tokens if vocab_size is None else vocab_size,
            description.get("end_of_text") if end_of_text is None else end_of_text,
            of_bytes=description.get("tokenizer", "") is None,
        )
        if index.length not in (None, context + 1) and documents is None:
            raise InputError(
                f"{prefix}.idx: rows of {index.length} tokens, the config's context {context} needs {context + 1}"
            )
        self.tokens = _mapped(self.path, index.dtype)
        count = packing.row_count(len(self.tokens), context)
        if rows is not None and len(rows) != 2:
            raise InputError(f"rows={rows} should be two numbers, the first row and the one after the last")
        self.rows = range(count)[slice(None) if rows is None else slice(*rows)]
        if not self.rows:
            raise InputError(f"{self.path} holds {count:,} rows, of which rows={rows} selects none")
        packing.check_first_row(self)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> packing.Row:
        check_unchanged(self.path, self.opened.state(0))
        return packing.row_at(self.tokens, self.rows[index], self.context, self.vocab_size)

    def describe(self, index: int) -> str:
        """Return the file and the number of a row in it."""
        return super().describe(self.rows[index])

    def nbytes(self) -> int:
        """Return the size of the selected rows in bytes."""
        return len(self.rows) * (self.context + 1) * self.tokens.itemsize


def _mapped(path: str, dtype: np.dtype) -> np.ndarray:
    """Return the tokens of a file as a memory-mapped array, of which only the parts that are used are read."""
    with named_errors(path), Path(path).open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        content.madvise(mmap.MADV_RANDOM)  # rows are read in random order, so read-ahead would be wasted
    return np.frombuffer(content, dtype)


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


def tokenize_files(
    data: str, tokenizer: str | None, prefix: str, *, key: str, end_of_text: str, on_progress: OnProgress
) -> Description:
    """Tokenize text files and write the tokens to PREFIX.bin, PREFIX.idx and PREFIX.json, one sequence per document.

    Args:
      data: a file, folder or glob of .txt, .jsonl, .jsonl.zst or .parquet files.
      tokenizer: path of a tokenizer.json or of its folder; None for bytes.
      prefix: path of the files to write, without suffix.
      key: key of the text in the JSON object of a line.
      end_of_text: the tokenizer's special token that is added to the end of each document.
      on_progress: called after each document.

    Returns:
      The content of PREFIX.json.

    Raises:
      InputError: the data or the tokenizer is invalid, a file to write exists, or writing fails.
    """
    opened = open_tokenizer(tokenizer, end_of_text)
    files = find_files(data)
    end = end_token(opened)
    source = opened.origin if isinstance(opened, FileTokenizer) else None
    description: Description = {
        "vocab_size": opened.vocab_size, "end_of_text": end, "tokenizer": source, "bytes": 0, "tokens": 0,
    }  # fmt: skip

    def sequences() -> Iterable[np.ndarray]:
        for document, (tokens,) in encode_documents(read_documents(files, (key,)), opened):
            yield np.concatenate([tokens, [end]])
            description["bytes"] += len(document.texts[0].encode())
            on_progress(document.bytes_read, files.nbytes, description["tokens"])

    write_pair(prefix, sequences(), description)
    return description


def write_pair(prefix: str, sequences: Iterable[np.ndarray | Sequence[int]], description: Description) -> None:
    """Write PREFIX.bin, PREFIX.idx and PREFIX.json, whose number of tokens is kept up to date while writing.

    The files get their final names after everything is written, so those of an interrupted run cannot be opened.

    Args:
      prefix: path of the files without suffix.
      sequences: the tokens of each document.
      description: content of PREFIX.json, to which the numbers of documents and tokens are added. Its `vocab_size`
        determines the size of a token: two bytes up to 65,536, otherwise four.

    Raises:
      InputError: a file with one of the names exists, a token is not in the vocabulary, there are no documents, or
        writing fails.
    """
    vocab_size, sizes = description["vocab_size"], array("i")
    code = 8 if vocab_size <= 1 << 16 else 4
    for suffix in SUFFIXES:
        if Path(prefix + suffix).exists():
            raise InputError(f"{prefix}{suffix} already exists; remove it or choose another name")
    temporary = {suffix: Path(f"{prefix}{suffix}.new") for suffix in SUFFIXES}
    try:
        with named_errors(f"{prefix}.bin", "write"):
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            with temporary[".bin"].open("wb") as file:
                for sequence in sequences:
                    values = packing.check_tokens(np.asarray(sequence), vocab_size)
                    file.write(values.astype(DTYPES[code]).tobytes())
                    sizes.append(len(values))
                    description["tokens"] = description.get("tokens", 0) + len(values)
                file.flush()
                os.fsync(file.fileno())
        if not sizes:
            raise InputError(f"no documents to write to {prefix}.bin")
        description["documents"] = len(sizes)
        contents = {
            ".json": json.dumps(description, indent=2).encode() + b"\n",
            ".idx": _index(np.frombuffer(sizes, np.int32), code),
        }
        for suffix, content in contents.items():
            with named_errors(prefix + suffix, "write"), temporary[suffix].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for suffix in SUFFIXES:
            with named_errors(prefix + suffix, "write"):
                temporary[suffix].replace(prefix + suffix)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def _index(sizes: np.ndarray, code: int) -> bytes:
    """Return the content of an index: header, lengths, offsets, and a document index of one sequence each."""
    starts = (np.cumsum(sizes, dtype=np.int64) - sizes) * np.dtype(DTYPES[code]).itemsize
    header = HEADER.pack(MAGIC, VERSION, code, len(sizes), len(sizes) + 1)
    documents = np.arange(len(sizes) + 1, dtype="<i8")
    return b"".join((header, sizes.astype("<i4").tobytes(), starts.astype("<i8").tobytes(), documents.tobytes()))
