"""A stream of tokens as rows that do not overlap: what every kind of text yields.

Row i of a stream holds its tokens i·(context+1) up to before (i+1)·(context+1): `tokens`, int32 of (context+1,), and
`is_target`, bool of the same shape: whether the prediction of a token counts. The first token of a row is never a
target, for nothing precedes it. A short last row is filled up with token 0, which is no target. Each document is
followed by the token `end_of_text`, and documents are packed one after the other.
"""

from typing import Any

import numpy as np

from input_pipeline.errors import InputError


def check_context(context: int) -> int:
    """The context. Raises InputError where it is not positive."""
    if context < 1:
        raise InputError(f"context={context} should be 1 or more")
    return context


def row_count(tokens: int, context: int) -> int:
    """How many rows so many tokens make; a single token that is left over has no target and makes none."""
    full, rest = divmod(tokens, context + 1)
    return full + (rest > 1)


def row_at(stream: np.ndarray, index: int, context: int, vocab_size: int | None = None) -> dict[str, Any]:
    """Row `index` of a stream. Raises IndexError beyond the last, InputError for a token out of the vocabulary."""
    if not 0 <= index < row_count(len(stream), context):
        raise IndexError(index)
    tokens = stream[index * (context + 1) : (index + 1) * (context + 1)]
    return filled_row(checked(tokens, vocab_size), context)


def filled_row(tokens: np.ndarray, context: int, first_target: int = 1) -> dict[str, Any]:
    """The row of at most context+1 tokens; those from `first_target` on are targets."""
    row = np.zeros(context + 1, np.int32)
    row[: len(tokens)] = tokens
    places = np.arange(context + 1)
    return {"tokens": row, "is_target": (places >= first_target) & (places < len(tokens))}


def checked(tokens: np.ndarray, vocab_size: int | None) -> np.ndarray:
    """The tokens. Raises InputError where one is negative, or not below `vocab_size` where that is known."""
    most = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    wrong = (tokens < 0) | (tokens > most)
    if wrong.any():
        raise InputError(f"token {int(tokens[wrong][0])} is not in the vocabulary of {most + 1:,}")
    return tokens
