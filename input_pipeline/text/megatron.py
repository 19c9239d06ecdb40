"""Tokens in Megatron's .bin/.idx pairs, such as Pythia's tokenized Pile; `megatron_format` describes the files."""

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from input_pipeline import huggingface
from input_pipeline.errors import InputError
from input_pipeline.files import OpenedFiles, check_unchanged, named_errors
from input_pipeline.text import packing
from input_pipeline.text.megatron_format import Description, find_prefix, read_description, read_index
from input_pipeline.text.tokenizer import vocabulary


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
        _check_description(prefix, description, index.sequences, vocab_size)
        made_by = description.get("tokenizer")
        if tokenizer is None and isinstance(made_by, str) and (huggingface.is_name(made_by) or Path(made_by).exists()):
            tokenizer = made_by
        self.vocab_size, self.end_of_text, self.token_bytes = vocabulary(
            tokenizer,
            description.get("vocab_size") if vocab_size is None else vocab_size,
            description.get("end_of_text") if end_of_text is None else end_of_text,
            of_bytes=description.get("tokenizer", "") is None,
        )
        if index.length not in (None, context + 1) and "documents" not in description:
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
        try:
            self[0]
        except InputError as e:
            raise InputError(f"{self.describe(0)}: {e}") from None

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


def _check_description(prefix: str, description: Description, sequences: int, vocab_size: int | None) -> None:
    """Raise InputError if PREFIX.json contradicts the index or the given vocabulary size."""
    documents, tokens = description.get("documents"), description.get("vocab_size")
    if documents is not None and documents != sequences:
        raise InputError(f"{prefix}.json gives {documents:,} documents, but the .idx {sequences:,} sequences")
    if vocab_size is not None and tokens is not None and tokens > vocab_size:
        raise InputError(f"{prefix}.json gives a vocab_size of {tokens:,}, more than vocab_size={vocab_size:,}")


def _mapped(path: str, dtype: np.dtype) -> np.ndarray:
    """Return the tokens of a file as a memory-mapped array, of which only the parts that are used are read."""
    with named_errors(path), Path(path).open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        content.madvise(mmap.MADV_RANDOM)  # rows are read in random order, so read-ahead would be wasted
    return np.frombuffer(content, dtype)
