"""Tokenizers: UTF-8 bytes, words of a list, or a `tokenizer.json` of Hugging Face's tokenizers library.

Text is never converted to special tokens: the characters "<|endoftext|>" in a document are encoded as text.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from jaxtyping import Int32

from input_pipeline import huggingface
from input_pipeline.errors import InputError, MissingDataError, library_errors, nearest
from input_pipeline.files import expand, named_errors
from input_pipeline.optional import require

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
BYTE_END_OF_TEXT = 256  # the token after those of the 256 byte values
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # sentencepiece's token of a single byte
SPACE = "\u2581"  # represents a space in sentencepiece's tokens

TokenBytes = Int32[np.ndarray, "vocab_size"]


class Tokenizer(abc.ABC):
    """Base class of tokenizers.

    Fields:
      vocab_size: number of different tokens.
      end_of_text: the token that ends a text, or None if there is none.
      token_bytes: number of bytes of text of each token, int32 of shape (vocab_size,), or None if it is unknown.
    """

    vocab_size: int
    end_of_text: int | None = None
    token_bytes: TokenBytes | None = None

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, without an end of text. Raises InputError if a text has no tokens."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with U+FFFD for invalid UTF-8 such as an incomplete last character."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, as `encode_batch` does."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids


class ByteTokenizer(Tokenizer):
    """A tokenizer whose tokens are UTF-8 bytes, and one token that ends a text."""

    vocab_size = BYTE_END_OF_TEXT + 1
    end_of_text = BYTE_END_OF_TEXT
    token_bytes = (np.arange(vocab_size) < BYTE_END_OF_TEXT).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < BYTE_END_OF_TEXT).decode(errors="replace")


class WordTokenizer(Tokenizer):
    """A tokenizer whose tokens are the words of a fixed list, separated by white space in texts."""

    def __init__(self, words: Sequence[str]):
        self.words, self.vocab_size = tuple(words), len(words)
        self._numbers = {word: i for i, word in enumerate(words)}

    def numbers(self, words: Sequence[str]) -> list[int]:
        """Return the token of each word, its index in the list. Raises InputError if a word is not in the list."""
        try:
            return [self._numbers[word] for word in words]
        except KeyError as e:
            raise InputError(f"no word {e.args[0]!r} in the vocabulary; {nearest(e.args[0], self.words)}") from None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self.numbers(text.split()), np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words of tokens, each with a space before it; nothing for tokens beyond the vocabulary."""
        return "".join(f" {self.words[i]}" for i in ids if i < self.vocab_size)


class FileTokenizer(Tokenizer):
    """The tokenizer of a `tokenizer.json`, without its templates, truncation and padding.

    Fields:
      path: path of the file.
      origin: its absolute path, or the name and the commit of its repository, by which it can be opened again.
    """

    def __init__(self, path: str, end_of_text: str | None = END_OF_TEXT):
        """
        Args:
          path: path of the tokenizer.json or of its folder, or a name of `input_pipeline.huggingface`.
          end_of_text: the special token that ends a document, or None if it is not needed.

        Raises:
          MissingDataError: the file does not exist.
          InputError: the file is invalid or has no such special token.
        """
        library = require("tokenizers")
        if huggingface.is_name(path):
            self.origin = huggingface.pinned(path)
            file = huggingface.file(self.origin, FILE)
        else:
            file = expand(path)
            file = file / FILE if file.is_dir() else file
            self.origin = str(file.resolve())
        self.path = str(file)
        if not file.is_file():
            raise MissingDataError(f"no tokenizer {file}: give a tokenizer.json, or the folder that holds it")
        with named_errors(file):
            content = file.read_bytes()
        with library_errors(f"{file} is not a valid tokenizer.json"):
            self._tokenizer: tokenizers.Tokenizer = library.Tokenizer.from_str(content.decode())
            description = json.loads(content)
            self.spelling = _spelling(description.get("pre_tokenizer"), description.get("decoder"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # to text they are characters
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.end_of_text = None if end_of_text is None else self._special_token(end_of_text)

    @property
    def token_bytes(self) -> TokenBytes | None:  # type: ignore[override]  # an attribute of others
        """Number of bytes of text of each token, 0 for special tokens.

        None if the tokens are neither in GPT-2's byte alphabet nor text with tokens of single bytes as in
        sentencepiece. A space that the tokenizer adds before every text is counted.
        """
        if self.spelling is None:
            return None
        counts = np.zeros(self.vocab_size, np.int32)
        for token, i in self._tokenizer.get_vocab().items():
            if self.spelling == "bytes":
                counts[i] = len(token)  # each character is one byte
            else:
                counts[i] = 1 if BYTE_TOKEN.fullmatch(token) else len(token.replace(SPACE, " ").encode())
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            counts[number] = 0 if added.special else len(added.content.encode())
        return counts

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with library_errors(f"{self.path} cannot tokenize"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special tokens. Raises InputError if the decoder fails."""
        with library_errors(f"{self.path} cannot decode"):
            return str(self._tokenizer.decode(list(ids)))

    def _special_token(self, name: str) -> int:
        """Return the number of a special token. Raises InputError if it is missing, or text can be encoded as it."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        if name not in special:
            raise InputError(f"{self.path} has no special token {name!r} for end_of_text; {nearest(name, special)}")
        if special[name] in self.encode(name):
            raise InputError(f"{self.path} encodes the text {name!r} as the special token")
        return special[name]


def open_tokenizer(path: str | None, end_of_text: str | None = END_OF_TEXT) -> Tokenizer:
    """Open the tokenizer of a `tokenizer.json`, or of the folder or the repository that contains one.

    Args:
      path: the file or folder, or a name of `input_pipeline.huggingface`; None gives the tokenizer of bytes.
      end_of_text: the file's special token that ends a document, or None if it is not needed. The tokenizer of bytes
        has its own.

    Raises:
      MissingDataError: the file does not exist.
      InputError: the file is invalid or has no such special token.
    """
    return ByteTokenizer() if path is None else FileTokenizer(path, end_of_text)


def end_token(tokenizer: Tokenizer) -> int:
    """Return the token that ends a document. Raises InputError if the tokenizer was opened without one."""
    if tokenizer.end_of_text is None:
        raise InputError("documents need an end_of_text: name a special token of the tokenizer")
    return tokenizer.end_of_text


class Vocabulary(NamedTuple):
    """Properties of the tokens that a file or a data set contains; None stands for unknown."""

    vocab_size: int | None  # all tokens are less than this
    end_of_text: int | None  # the token that ends a document
    token_bytes: TokenBytes | None


def vocabulary(
    tokenizer: str | None, vocab_size: int | None, end_of_text: int | None, of_bytes: bool = False
) -> Vocabulary:
    """Return the vocabulary of data that is stored as tokens, as given or from the tokenizer that made them.

    Args:
      tokenizer: path of the tokenizer.json, if it is known.
      vocab_size: by default the tokenizer's. It may be larger, because vocabularies are often padded; the additional
        tokens have no bytes.
      end_of_text: by default the tokenizer's.
      of_bytes: whether the tokens are bytes if no tokenizer is given.

    Raises:
      InputError: the tokenizer has more than `vocab_size` tokens, or `end_of_text` is not in the vocabulary.
    """
    known = None
    if tokenizer is not None or of_bytes:
        known = open_tokenizer(tokenizer, END_OF_TEXT if end_of_text is None else None)
    if known is not None and vocab_size is not None and known.vocab_size > vocab_size:
        raise InputError(f"the tokenizer has {known.vocab_size:,} tokens, more than vocab_size={vocab_size:,}")
    if known is not None:
        vocab_size = known.vocab_size if vocab_size is None else vocab_size
        end_of_text = known.end_of_text if end_of_text is None else end_of_text
    if end_of_text is not None and not 0 <= end_of_text < (vocab_size or end_of_text + 1):
        raise InputError(f"end_of_text={end_of_text} is not in the vocabulary of {vocab_size}")
    token_bytes = None if known is None else known.token_bytes
    if token_bytes is not None and vocab_size is not None:
        token_bytes = np.pad(token_bytes, (0, vocab_size - len(token_bytes)))
    return Vocabulary(vocab_size, end_of_text, token_bytes)


def _spelling(pre_tokenizer: object, decoder: object) -> Literal["bytes", "text"] | None:
    """Return how the tokens of a tokenizer.json with this pre-tokenizer and decoder are spelled; None if unknown.

    "bytes" is GPT-2's alphabet with one character per byte; "text" is text with tokens of single bytes as a fallback.
    """
    described = json.dumps([pre_tokenizer, decoder])
    if '"type": "ByteLevel"' in described:
        return "bytes"
    return "text" if '"type": "ByteFallback"' in described else None
