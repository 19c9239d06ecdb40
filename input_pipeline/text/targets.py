"""Pairs of inputs and targets, such as instructions and answers; the loss counts only the targets."""

import numpy as np

from input_pipeline.errors import InputError
from input_pipeline.source import Example
from input_pipeline.text import packing
from input_pipeline.text.files import LineSource
from input_pipeline.text.tokenizer import END_OF_TEXT, end_token


class Source(LineSource):
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
        lines, opened = self.open_lines(path, context, tokenizer, end_of_text, (inputs, targets))
        end = np.array([end_token(opened)], self.dtype)
        self.first_targets: list[int] = []
        for document, (before, after) in self.encoded(lines, opened):
            if not len(after):
                raise InputError(f"{document.location}: {targets!r} is empty: nothing to predict")
            if len(after) > context - 1:
                raise InputError(
                    f"{document.location}: targets of {len(after)} tokens; with a token before and one after them, a "
                    f"context of {context} has room for {context - 1}"
                )
            before = before[-(context - len(after)) :] if len(before) else end
            self.add(document.location, np.concatenate([before, after, end]))
            self.first_targets.append(len(before))
        self.check_not_empty()

    def __getitem__(self, index: int) -> Example:
        return packing.padded_row(self.rows[index], self.context, self.first_targets[index])
