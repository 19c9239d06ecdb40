"""Text files (.txt, .jsonl, .jsonl.zst and .parquet) that are tokenized when they are opened."""

import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np

from input_pipeline.errors import InputError, check_split
from input_pipeline.files import OpenedFiles
from input_pipeline.optional import require
from input_pipeline.source import TokenSource
from input_pipeline.text import documents as texts
from input_pipeline.text import packing
from input_pipeline.text.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, end_token, open_tokenizer

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")
MAX_BYTES = 1_000_000_000  # total size of the files; larger data should be tokenized only once
SILENT_SECONDS = 2.0  # before the first progress message
MESSAGE_SECONDS = 10.0  # between progress messages


class TokenizedFiles(TokenSource):
    """Base class of sources of text files, which are tokenized when a source is opened."""

    opened: OpenedFiles

    def open_files(
        self, path: str, context: int, tokenizer: str | None, end_of_text: str, suffixes: Sequence[str] = texts.SUFFIXES
    ) -> tuple[texts.Files, Tokenizer]:
        """Set the attributes that the arguments define, and return the files at `path` and the opened tokenizer.

        Raises:
          MissingDataError: the files or the tokenizer do not exist.
          InputError: the context is not positive, the tokenizer is invalid, or the files are too large.
        """
        self.path, self.context = path, packing.check_context(context)
        opened = open_tokenizer(tokenizer, end_of_text)
        self.vocab_size, self.token_bytes, self.end_of_text = opened.vocab_size, opened.token_bytes, opened.end_of_text
        self.dtype = np.dtype(np.uint16 if opened.vocab_size <= 1 << 16 else np.uint32)  # the smallest for all tokens
        files = texts.find_files(path, suffixes)
        check_size(files, path)
        self.opened = OpenedFiles([str(file) for file in files.paths], files.root)
        return files, opened

    def encoded(self, documents: Iterator[texts.Document], tokenizer: Tokenizer) -> Iterator[texts.EncodedDocument]:
        """Yield documents and their tokens, and log the progress every MESSAGE_SECONDS after SILENT_SECONDS."""
        logged = time.monotonic() + SILENT_SECONDS - MESSAGE_SECONDS
        for document, tokens in texts.encode_documents(documents, tokenizer):
            if time.monotonic() > logged + MESSAGE_SECONDS:
                logged = time.monotonic()
                read, size = document.bytes_read / 1e6, self.opened.nbytes() / 1e6
                logger.info("tokenizing %s: %.0f of %.0f MB", self.path, read, size)
            yield texts.EncodedDocument(document, [each.astype(self.dtype) for each in tokens])


class LineSource(TokenizedFiles):
    """Base class of sources of `.jsonl` and `.jsonl.zst` files whose rows are lines.

    Fields:
      rows: the tokens of each row.
      locations: its file and line.
    """

    rows: list[np.ndarray]
    locations: list[str]

    def open_lines(
        self, path: str, context: int, tokenizer: str | None, end_of_text: str, keys: Sequence[str]
    ) -> tuple[Iterator[texts.Document], Tokenizer]:
        """Open files as `open_files` does, and return their lines, with the strings of `keys`, and the tokenizer."""
        self.rows, self.locations = [], []
        files, opened = self.open_files(path, context, tokenizer, end_of_text, texts.LINE_SUFFIXES)
        return texts.read_documents(files, keys), opened

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self, index: int) -> str:
        """Return the file and line of a row."""
        return self.locations[index]

    def nbytes(self) -> int:
        """Return the size of all tokens in bytes."""
        return sum(row.nbytes for row in self.rows)

    def add(self, location: str, tokens: np.ndarray) -> None:
        """Append a row."""
        self.locations.append(location)
        self.rows.append(tokens)

    def check_not_empty(self) -> None:
        """Raise InputError if there is no row."""
        if not self.rows:
            raise InputError(f"{self.path} holds no lines")


class Source(packing.StreamSource, TokenizedFiles):
    """Documents of text files, packed into rows as `input_pipeline.text.packing` describes."""

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
        if not 0 <= validation_fraction < 1:
            raise InputError(f"validation_fraction={validation_fraction} should be at least 0 and below 1")
        if split == "validation" and not validation_fraction:
            raise InputError("split='validation' is empty without a validation_fraction above 0")
        files, opened = self.open_files(path, context, tokenizer, end_of_text)
        documents = (
            document
            for document in texts.read_documents(files, (key,))
            if texts.in_validation(document.name, validation_fraction) == (split == "validation")
        )
        stream, end = bytearray(), np.array(end_token(opened), self.dtype).tobytes()
        for _, (tokens,) in self.encoded(documents, opened):
            stream += tokens.tobytes() + end
        if not stream:
            raise InputError(f"{path} holds no text of split {split!r} with validation_fraction={validation_fraction}")
        self.tokens = np.frombuffer(stream, self.dtype)


def check_size(files: texts.Files, path: str) -> None:
    """Raise InputError if the files have more than MAX_BYTES in all, too much to tokenize at every start."""
    if files.nbytes > MAX_BYTES:
        raise InputError(
            f"{path} holds {files.nbytes / 1e9:.1f} GB, more than {MAX_BYTES / 1e9:g}: tokenize it once, with "
            f"python -m dcvit.tokenize --data {path} --out PREFIX, and read it with kind='megatron'"
        )


def train_tokenizer(path: str, vocab_size: int, key: str = "text") -> str:
    """Return the tokenizer.json of a BPE tokenizer of bytes, as GPT-2's, trained on text files.

    The result is a function of the files and the arguments.

    Args:
      path: a file, folder or glob, as of data of kind "text".
      vocab_size: the number of tokens, `END_OF_TEXT` included; fewer if the text has too few pairs to merge.
      key: key of the text in the JSON object of a line.

    Raises:
      MissingDataError: the files do not exist.
      InputError: a file is invalid, the files are too large, or `vocab_size` is too small.
    """
    if vocab_size < (fewest := ByteTokenizer.vocab_size):
        raise InputError(f"a tokenizer of {vocab_size} tokens: expected {fewest}, for all bytes, or more")
    files = texts.find_files(path)
    check_size(files, path)
    tokenizers = require("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((document.texts[0] for document in texts.read_documents(files, (key,))), trainer)
    content: str = tokenizer.to_str()
    return content
