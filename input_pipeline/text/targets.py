"""Inputs and targets, as instructions are: rows of one example each, whose loss counts the targets only."""

from typing import Any

import numpy as np

from input_pipeline import memory
from input_pipeline.errors import InputError
from input_pipeline.text import packing
from input_pipeline.text.documents import LINES, encoded, find_files, read_documents
from input_pipeline.text.files import check_memory, check_size, progress, token_dtype
from input_pipeline.text.tokenizer import END_OF_TEXT, end_token, open_tokenizer

PLACE = 256  # bytes of memory, about, for where a row is


class Source:
    """The lines of .jsonl and .jsonl.zst files, each a row: the inputs' tokens, the targets' and the end of text.

    `is_target` is true for the targets and their end of text only; see `text.packing`. Inputs that are too long
    lose their beginning; where there are none an end of text precedes the targets.
    """

    class_names = None

    def __init__(
        self,
        path: str,
        context: int,
        tokenizer: str | None = None,
        end_of_text: str = END_OF_TEXT,
        inputs: str = "inputs",
        targets: str = "targets",
    ):
        """
        Args:
          path: a file, a folder or a glob.
          context: a row holds one token more.
          tokenizer: a tokenizer.json, or the folder of one; None: tokens are bytes.
          end_of_text: the tokenizer's special token that ends a row.
          inputs, targets: keys of a line's JSON object.

        Raises:
          MissingDataError: no such files or tokenizer.
          InputError: targets that do not fit a row, or anything else that is unusable; see `text.documents`.
        """
        self.context = packing.check_context(context)
        opened = open_tokenizer(tokenizer, end_of_text)
        self.vocab_size, self.token_bytes = opened.vocab_size, opened.token_bytes
        self.end_of_text: int | None = end_token(opened)
        files = find_files(path, LINES)
        check_size(files, path)
        end, left = np.array([self.end_of_text]), memory.available()
        dtype, stream = token_dtype(opened), bytearray()
        self.places: list[str] = []
        ends, firsts = [0], []
        for document, (before, after) in progress(
            encoded(read_documents(files, (inputs, targets)), opened), files, path
        ):
            check_memory(len(stream) + PLACE * len(self.places), left, path)
            if not len(after):
                raise InputError(f"{document.where}: {targets!r} is empty: nothing to predict")
            room = context - len(after)  # for the inputs, after the end of text has its place
            if room < 1:
                raise InputError(
                    f"{document.where}: targets of {len(after)} tokens; with a token before and one after them, a "
                    f"context of {context} has room for {context - 1}"
                )
            before = before[-room:] if len(before) else end
            stream += np.concatenate([before, after, end]).astype(dtype).tobytes()
            ends.append(len(stream) // dtype.itemsize)
            firsts.append(len(before))
            self.places.append(document.where)
        if not self.places:
            raise InputError(f"{path} holds no lines")
        self.tokens = np.frombuffer(stream, dtype)
        self.ends, self.firsts = np.array(ends), np.array(firsts)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[self.ends[index] : self.ends[index + 1]]
        return packing.filled_row(tokens, self.context, int(self.firsts[index]))

    def describe(self, index: int) -> str:
        """The file and line of a row."""
        return self.places[index]

    def nbytes(self) -> int:
        """Bytes of all tokens."""
        return self.tokens.nbytes
