"""The tokenizers library in a process of its own, because a tokenizer.json can take unlimited time or memory.

It can contain regular expressions that never end and replacements that double a text many times.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from input_pipeline.limited_process import LimitedProcess
from input_pipeline.text import tokenizer_worker


class AddedToken(NamedTuple):
    """A token that was added to a vocabulary; a special token is not text."""

    number: int
    text: str
    special: bool


class TokenizerProcess:
    """A tokenizer of the tokenizers library, which a process loads and runs."""

    vocab: dict[str, int]  # the number of each token
    added_tokens: list[AddedToken]
    pre_tokenizer: object  # this part of the tokenizer.json
    decoder: object

    def __init__(self, content: bytes):
        """
        Args:
          content: the content of a tokenizer.json.

        Raises:
          InputError: the content is invalid or exceeds a limit; the message does not name the file.
        """
        self._process = LimitedProcess(tokenizer_worker.__file__)
        self.vocab, added, (self.pre_tokenizer, self.decoder) = map(json.loads, self._process(content))
        self.added_tokens = [AddedToken(*token) for token in added]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text; several threads tokenize. Raises InputError if a text cannot be encoded."""
        return [np.frombuffer(tokens, np.uint32) for tokens in self._process(b"encode", *(t.encode() for t in texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special tokens. Raises InputError if the decoder fails."""
        return self._process(b"decode", np.asarray(ids, np.uint32).tobytes())[0].decode()
