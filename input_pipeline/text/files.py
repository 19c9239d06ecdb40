"""Text files (.txt, .jsonl, .jsonl.zst and .parquet) that are tokenized when they are opened."""

import logging
import time
from collections.abc import Iterator

import numpy as np

from input_pipeline import memory
from input_pipeline.errors import InputError, check_split
from input_pipeline.files import OpenedFiles
from input_pipeline.source import Example
from input_pipeline.text import packing
from input_pipeline.text.documents import (
    EncodedDocument,
    Files,
    encode_documents,
    find_files,
    in_validation,
    read_documents,
)
from input_pipeline.text.tokenizer import END_OF_TEXT, Tokenizer, end_token, open_tokenizer

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")
MAX_BYTES = 1_000_000_000  # total size of the files; larger data should be tokenized only once
SILENT_SECONDS = 2.0  # before the first progress message
MESSAGE_SECONDS = 10.0  # between progress messages


class Source:
    """Documents of text files, packed into rows as `input_pipeline.text.packing` describes."""

    class_names = None

    def __init__(
        self,
        path: str,
        context: int,
        tokenizer: str | None = None,
        end_of_text: str = END_OF_TEXT,
        key: str = "text",
        split: str = "train",
        validation_fraction: float = 0.0,
    ):
        """
        Args:
          path: a file, folder or glob. A .txt file is one document, and so is each line of .jsonl and .jsonl.zst files
            and each row of .parquet files.
          context: number of tokens in a model input; a row has one token more.
          tokenizer: path of a tokenizer.json or of its folder; by default the tokens are UTF-8 bytes.
          end_of_text: the tokenizer's special token that ends a document.
          key: key of the text in the JSON object of a line, or its column in a .parquet file.
          split: "train" or "validation".
          validation_fraction: approximate fraction of the documents in the split "validation"; the documents are
            chosen by a hash of their file name and line number.

        Raises:
          MissingDataError: the files or the tokenizer do not exist.
          InputError: a file is invalid (see `input_pipeline.text.documents`), the files are too large, or the split is
            empty.
        """
        check_split("text", split, SPLITS)
        _check_fraction(split, validation_fraction)
        self.context, self.path = packing.check_context(context), path
        opened = open_tokenizer(tokenizer, end_of_text)
        self.vocab_size, self.token_bytes = opened.vocab_size, opened.token_bytes
        self.end_of_text: int | None = end_token(opened)
        files = find_files(path)
        check_size(files, path)
        self.opened = OpenedFiles([str(file) for file in files.paths], files.root)
        dtype, stream = token_dtype(opened), bytearray()
        documents = (
            document
            for document in read_documents(files, (key,))
            if in_validation(document.name, validation_fraction) == (split == "validation")
        )
        end = dtype.type(self.end_of_text).tobytes()
        available = memory.available()
        for _, tokens in log_progress(encode_documents(documents, opened), files, path):
            check_memory(len(stream), available, path)
            stream += tokens[0].astype(dtype).tobytes() + end
        if not stream:
            raise InputError(f"{path} holds no text of split {split!r} with validation_fraction={validation_fraction}")
        self.tokens = np.frombuffer(stream, dtype)

    def __len__(self) -> int:
        return packing.row_count(len(self.tokens), self.context)

    def __getitem__(self, index: int) -> Example:
        return packing.row_at(self.tokens, index, self.context, self.vocab_size)

    def describe(self, index: int) -> str:
        """Return the path and the number of a row."""
        return f"{self.path}, row {index}"

    def nbytes(self) -> int:
        """Return the size of all tokens in bytes."""
        return self.tokens.nbytes


def _check_fraction(split: str, validation_fraction: float) -> None:
    """Raise InputError if the fraction is invalid for the split."""
    if not 0 <= validation_fraction < 1:
        raise InputError(f"validation_fraction={validation_fraction} should be at least 0 and below 1")
    if split == "validation" and not validation_fraction:
        raise InputError("split='validation' is empty without a validation_fraction above 0")


def check_size(files: Files, path: str) -> None:
    """Raise InputError if the files are too large to be tokenized at every start."""
    if files.nbytes > MAX_BYTES:
        raise InputError(
            f"{path} holds {files.nbytes / 1e9:.1f} GB, more than {MAX_BYTES / 1e9:g}: tokenize it once, with "
            f"python -m dcvit.tokenize --data {path} --out PREFIX, and read it with kind='megatron'"
        )


def check_memory(nbytes: int, available: int | None, path: str) -> None:
    """Raise InputError if the tokens use most of the available memory, as those of a compressed file may do.

    Args:
      nbytes: size of the tokens so far.
      available: memory that was available before the first token, or None if it is unknown.
      path: the path of the files, for the message.
    """
    if available is not None and nbytes > available * 3 // 4:
        raise InputError(
            f"{path}: its tokens do not fit in the {available / 1e9:.1f} GB of memory left; use fewer files"
        )


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the smallest unsigned dtype for a tokenizer's tokens, uint16 or uint32."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def log_progress(documents: Iterator[EncodedDocument], files: Files, path: str) -> Iterator[EncodedDocument]:
    """Yield the documents, and log the progress every MESSAGE_SECONDS if tokenizing takes more than SILENT_SECONDS."""
    logged = time.monotonic() + SILENT_SECONDS - MESSAGE_SECONDS
    for encoded in documents:
        if time.monotonic() > logged + MESSAGE_SECONDS:
            logged = time.monotonic()
            logger.info("tokenizing %s: %.0f of %.0f MB", path, encoded.document.bytes_read / 1e6, files.nbytes / 1e6)
        yield encoded
