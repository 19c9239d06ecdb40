"""Pairs of inputs and targets, such as instructions and answers; the loss counts only the targets."""

import numpy as np

from input_pipeline.errors import InputError
from input_pipeline.source import Example
from input_pipeline.text import packing
from input_pipeline.text.documents import LINE_SUFFIXES, read_documents
from input_pipeline.text.files import TokenizedFiles
from input_pipeline.text.tokenizer import END_OF_TEXT, end_token

LOCATION_BYTES = 256  # approximate memory for the location of a row


class Source(TokenizedFiles):
    """Lines of .jsonl and .jsonl.zst files, one row each: input tokens, target tokens and the end of text.

    `is_target` is true only for the targets and the end of text. Inputs that are too long lose their first tokens. If
    there are no inputs, an end of text precedes the targets.
    """

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
          path: a file, folder or glob.
          context: number of tokens in a model input; a row has one token more.
          tokenizer: path of a tokenizer.json or of its folder; by default the tokens are UTF-8 bytes.
          end_of_text: the tokenizer's special token that ends a row.
          inputs: key of the inputs in the JSON object of a line.
          targets: key of the targets.

        Raises:
          MissingDataError: the files or the tokenizer do not exist.
          InputError: targets are empty or longer than a row, or a file is invalid (see
            `input_pipeline.text.documents`).
        """
        files, opened = self.open_files(path, context, tokenizer, end_of_text, LINE_SUFFIXES)
        stream, end = bytearray(), end_token(opened)
        self.locations: list[str] = []
        ends, first_targets = [0], []
        for document, (before, after) in self.encoded(read_documents(files, (inputs, targets)), opened):
            self.check_memory(len(stream) + LOCATION_BYTES * len(self.locations))
            if not len(after):
                raise InputError(f"{document.location}: {targets!r} is empty: nothing to predict")
            if len(after) > context - 1:
                raise InputError(
                    f"{document.location}: targets of {len(after)} tokens; with a token before and one after them, a "
                    f"context of {context} has room for {context - 1}"
                )
            before = before[-(context - len(after)) :] if len(before) else np.array([end])
            stream += np.concatenate([before, after, [end]]).astype(self.dtype).tobytes()
            ends.append(len(stream) // self.dtype.itemsize)
            first_targets.append(len(before))
            self.locations.append(document.location)
        if not self.locations:
            raise InputError(f"{path} holds no lines")
        self.tokens = np.frombuffer(stream, self.dtype)
        self.ends, self.first_targets = np.array(ends), np.array(first_targets)

    def __len__(self) -> int:
        return len(self.locations)

    def __getitem__(self, index: int) -> Example:
        tokens = self.tokens[self.ends[index] : self.ends[index + 1]]
        return packing.padded_row(tokens, self.context, int(self.first_targets[index]))

    def describe(self, index: int) -> str:
        """Return the file and line of a row."""
        return self.locations[index]

    def nbytes(self) -> int:
        """Return the size of all tokens in bytes."""
        return self.tokens.nbytes
