"""Writer of Megatron's .bin/.idx pairs, and conversion of text files to them."""

import contextlib
import json
import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from input_pipeline.errors import InputError
from input_pipeline.files import named_errors
from input_pipeline.text.documents import encode_documents, find_files, read_documents
from input_pipeline.text.megatron_format import DTYPES, HEADER, MAGIC, VERSION, Description
from input_pipeline.text.packing import check_tokens
from input_pipeline.text.tokenizer import FileTokenizer, end_token, open_tokenizer

SUFFIXES = (".bin", ".json", ".idx")  # The .idx is renamed last, because readers open a pair by its .idx.

# Called after each document with the bytes read, the bytes of all files, and the tokens written so far.
OnProgress = Callable[[int, int, int], None]


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
        "vocab_size": opened.vocab_size, "end_of_text": end, "tokenizer": source, "bytes": 0,
    }  # fmt: skip
    with MegatronWriter(prefix, description) as writer:
        for document, (tokens,) in encode_documents(read_documents(files, (key,)), opened):
            writer.add(np.concatenate([tokens, [end]]))
            description["bytes"] += len(document.texts[0].encode())
            on_progress(document.bytes_read, files.nbytes, writer.tokens)
    return description


class MegatronWriter:
    """A context manager that writes a .bin/.idx pair document by document, and PREFIX.json.

    The files are renamed to their final names after everything is written, so files of an interrupted run cannot be
    opened.
    """

    def __init__(self, prefix: str, description: Description):
        """
        Args:
          prefix: path of the files without suffix.
          description: content of PREFIX.json, to which the numbers of documents and tokens are added at the end. Its
            `vocab_size` determines the size of a token: two bytes up to 65,536, otherwise four.

        Raises:
          InputError: a file with one of the names exists.
        """
        self.prefix, self.description, self.vocab_size = prefix, description, description["vocab_size"]
        self.code = 8 if self.vocab_size <= 1 << 16 else 4
        self.sizes, self.tokens = array("i"), 0
        for suffix in SUFFIXES:
            if Path(prefix + suffix).exists():
                raise InputError(f"{prefix}{suffix} already exists; remove it or choose another name")
        self.file: BinaryIO | None = None

    def __enter__(self) -> "MegatronWriter":
        with named_errors(self.prefix + ".bin", "write"):
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            self.file = self._temporary(".bin").open("wb")
        return self

    def add(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Append the tokens of one document.

        Raises:
          InputError: a token is not in the vocabulary, or writing fails.
        """
        if self.file is None:
            raise ValueError("the writer is not open")
        values = check_tokens(np.asarray(tokens), self.vocab_size)
        with named_errors(self.prefix + ".bin", "write"):
            self.file.write(values.astype(DTYPES[self.code]).tobytes())
        self.sizes.append(len(values))
        self.tokens += len(values)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self.file is not None:
                with contextlib.suppress(OSError):  # reported by an earlier write
                    self.file.close()
            for suffix in SUFFIXES:
                self._temporary(suffix).unlink(missing_ok=True)

    def _temporary(self, suffix: str) -> Path:
        """Return the path that the file with this suffix has while it is being written."""
        return Path(f"{self.prefix}{suffix}.new")

    def _finish(self) -> None:
        """Write PREFIX.json and PREFIX.idx, and rename all files from their temporary to their final names."""
        assert self.file is not None
        if not self.sizes:
            raise InputError(f"no documents to write to {self.prefix}.bin")
        with named_errors(self.prefix + ".bin", "write"):
            _flush_to_disk(self.file)
        self.description["documents"], self.description["tokens"] = len(self.sizes), self.tokens
        with named_errors(self.prefix + ".json", "write"), self._temporary(".json").open("wb") as file:
            file.write(json.dumps(self.description, indent=2).encode() + b"\n")
            _flush_to_disk(file)
        with named_errors(self.prefix + ".idx", "write"), self._temporary(".idx").open("wb") as file:
            self._write_index(file)
            _flush_to_disk(file)
        renamed: list[Path] = []
        try:
            for suffix in SUFFIXES:
                with named_errors(self.prefix + suffix, "write"):
                    renamed.append(self._temporary(suffix).replace(self.prefix + suffix))
        except BaseException:
            for final in renamed:
                final.unlink(missing_ok=True)
            raise

    def _write_index(self, file: BinaryIO) -> None:
        """Write the index: header, lengths, offsets, and a document index in which each sequence is a document."""
        count, width = len(self.sizes), np.dtype(DTYPES[self.code]).itemsize
        file.write(HEADER.pack(MAGIC, VERSION, self.code, count, count + 1))
        sizes = np.frombuffer(self.sizes, np.int32)
        file.write(sizes.astype("<i4").tobytes())
        file.write(((np.cumsum(sizes, dtype=np.int64) - sizes) * width).astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())


def _flush_to_disk(file: BinaryIO) -> None:
    """Wait until everything that was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())
