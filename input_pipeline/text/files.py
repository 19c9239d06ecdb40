"""Text files of one's own, tokenised when they are opened: .txt, .jsonl and .jsonl.zst."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from input_pipeline import memory
from input_pipeline.errors import InputError, nearest
from input_pipeline.text import packing
from input_pipeline.text.documents import Encoded, Files, encoded, find_files, held_out, read_documents
from input_pipeline.text.tokenizer import END_OF_TEXT, Tokenizer, end_token, open_tokenizer

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")
MOST_BYTES = 1_000_000_000  # of files as they are stored; more is better tokenised once
SILENT_SECONDS = 2.0  # before the first line of progress


class Source:
    """The documents of text files, packed into rows; see `input_pipeline.text.packing`."""

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
          path: a file, a folder or a glob; one document is a .txt file, or a line of .jsonl or .jsonl.zst.
          context: a row holds one token more.
          tokenizer: a tokenizer.json, or the folder of one; None: tokens are bytes.
          end_of_text: the tokenizer's special token that ends a document.
          key: of a line's JSON object, where the text is.
          split: "train" or, of a `validation_fraction` above 0, "validation".
          validation_fraction: about the share of documents, chosen by their file and line, that are for validation.

        Raises:
          MissingDataError: no such files or tokenizer.
          InputError: anything else that is unusable; see `input_pipeline.text.documents`.
        """
        check_split(split, validation_fraction)
        self.context, self.path = packing.check_context(context), path
        opened = open_tokenizer(tokenizer, end_of_text)
        self.vocab_size, self.token_bytes = opened.vocab_size, opened.token_bytes
        self.end_of_text: int | None = end_token(opened)
        files = find_files(path)
        check_size(files, path)
        dtype, stream = token_dtype(opened), bytearray()
        documents = (
            document
            for document in read_documents(files, (key,))
            if held_out(document.name, validation_fraction) == (split == "validation")
        )
        end = dtype.type(self.end_of_text).tobytes()
        left = memory.available()
        for _, tokens in progress(encoded(documents, opened), files, path):
            check_memory(len(stream), left, path)
            stream += tokens[0].astype(dtype).tobytes() + end
        if not stream:
            raise InputError(f"{path} holds no text, of split {split!r} and validation_fraction={validation_fraction}")
        self.tokens = np.frombuffer(stream, dtype)

    def __len__(self) -> int:
        return packing.row_count(len(self.tokens), self.context)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return packing.row_at(self.tokens, index, self.context, self.vocab_size)

    def describe(self, index: int) -> str:
        """Which row this is."""
        return f"{self.path}, row {index}"

    def nbytes(self) -> int:
        """Bytes of all tokens."""
        return self.tokens.nbytes


def check_split(split: str, validation_fraction: float) -> None:
    """Raises InputError for a split or a fraction that does not exist."""
    if split not in SPLITS:
        raise InputError(f"text has no split {split!r}; {nearest(split, SPLITS)}")
    if not 0 <= validation_fraction < 1:
        raise InputError(f"validation_fraction={validation_fraction} should be at least 0 and below 1")
    if split == "validation" and not validation_fraction:
        raise InputError("split='validation' is empty without a validation_fraction above 0")


def check_size(files: Files, path: str) -> None:
    """Raises InputError for files too large to be tokenised at every start."""
    if files.nbytes > MOST_BYTES:
        raise InputError(
            f"{path} holds {files.nbytes / 1e9:.1f} GB, more than {MOST_BYTES / 1e9:g}: tokenise it once, with "
            f"python -m dcvit.tokenize --data {path} --out PREFIX, and read it with kind='megatron'"
        )


def check_memory(nbytes: int, left: int | None, path: str) -> None:
    """Raises InputError where what was tokenised takes most of the memory that was left, as a packed file's may."""
    if left is not None and nbytes > left * 3 // 4:
        raise InputError(f"{path}: its tokens do not fit the {left / 1e9:.1f} GB of memory left; take fewer files")


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest unsigned dtype that holds a tokenizer's tokens."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def progress(documents: Iterator[Encoded], files: Files, path: str) -> Iterator[Encoded]:
    """The same again; a line on stderr now and then, where it takes long."""
    shown = time.monotonic() + SILENT_SECONDS - 10
    for document, tokens in documents:
        if time.monotonic() > shown + 10:
            shown = time.monotonic()
            logger.info("tokenising %s: %.0f of %.0f MB", path, document.read / 1e6, files.nbytes / 1e6)
        yield document, tokens
