"""Rows of a token stream, the form in which every kind of text is read.

In a stream, each document is followed by the token `end_of_text`, and documents are concatenated. Row i contains the
tokens i·(context + 1) to (i + 1)·(context + 1) - 1 of the stream, so rows do not overlap. A row is a dict:

    tokens: int32 of shape (context + 1,)
    is_target: bool of shape (context + 1,), whether the loss counts the prediction of a token

The first token of a row is never a target, because no token precedes it. A short last row is padded with token 0, which
is not a target.
"""

import numpy as np
from jaxtyping import Integer

from input_pipeline.errors import InputError
from input_pipeline.source import TokenSource

Tokens = Integer[np.ndarray, "tokens"]
Row = dict[str, np.ndarray]


class StreamSource(TokenSource):
    """Base class of sources whose rows are those of one stream of tokens.

    Fields:
      path: the files, for messages.
      tokens: the stream.
    """

    path: str
    tokens: Tokens

    def __len__(self) -> int:
        return row_count(len(self.tokens), self.context)

    def __getitem__(self, index: int) -> Row:
        return row_at(self.tokens, index, self.context, self.vocab_size)

    def describe(self, index: int) -> str:
        """Return the path and the number of a row."""
        return f"{self.path}, row {index}"

    def nbytes(self) -> int:
        """Return the size of all tokens in bytes."""
        return self.tokens.nbytes


def check_context(context: int) -> int:
    """Return `context`, the number of tokens in a model input. Raises InputError if it is not positive."""
    if context < 1:
        raise InputError(f"context={context} should be 1 or more")
    return context


def row_count(tokens: int, context: int) -> int:
    """Return the number of rows of a stream; a single remaining token has no target and does not make a row."""
    full, rest = divmod(tokens, context + 1)
    return full + (rest > 1)


def row_at(stream: Tokens, index: int, context: int, vocab_size: int | None = None) -> Row:
    """Return a row of a stream.

    Raises:
      IndexError: the stream has fewer rows.
      InputError: a token is not in the vocabulary.
    """
    if not 0 <= index < row_count(len(stream), context):
        raise IndexError(index)
    tokens = stream[index * (context + 1) : (index + 1) * (context + 1)]
    return padded_row(check_tokens(tokens, vocab_size), context)


def padded_row(tokens: Tokens, context: int, first_target: int = 1) -> Row:
    """Return a row of at most context + 1 tokens, padded with 0; the tokens from `first_target` on are targets."""
    row = np.zeros(context + 1, np.int32)
    row[: len(tokens)] = tokens
    positions = np.arange(context + 1)
    return {"tokens": row, "is_target": (positions >= first_target) & (positions < len(tokens))}


def check_first_row(source: TokenSource) -> None:
    """Raise InputError, with the row's location, if the first row of a source is invalid."""
    try:
        source[0]
    except InputError as e:
        raise InputError(f"{source.describe(0)}: {e}") from None


def check_tokens(tokens: Tokens, vocab_size: int | None) -> Tokens:
    """Return the tokens. Raises InputError if one is negative, or not below a known `vocab_size`."""
    largest = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    wrong = (tokens < 0) | (tokens > largest)
    if wrong.any():
        raise InputError(f"token {int(tokens[wrong][0])} is not in the vocabulary of {largest + 1:,}")
    return tokens
