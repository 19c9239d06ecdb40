"""Text to tokens and back: bytes, or a `tokenizer.json` of Hugging Face's tokenizers.

Special tokens are never made from text: a document that contains "<|endoftext|>" has these characters as text.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.errors import InputError, MissingDataError, first_line, nearest
from input_pipeline.optional import require

END_OF_TEXT = "<|endoftext|>"
BYTES = 256
MOST_TOKENS = 1 << 24  # in a vocabulary: the largest in use have a sixteenth of it; a number's absence costs memory
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # a single byte, as sentencepiece writes it
SPACE = "\u2581"  # stands for a space in sentencepiece's tokens


class ByteTokenizer:
    """UTF-8 bytes as tokens, and one more that ends a text."""

    end_of_text: int | None = BYTES
    vocab_size = BYTES + 1

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text that each token stands for: int32 of (vocab_size,)."""
        return (np.arange(self.vocab_size) < BYTES).astype(np.int32)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without an end."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, with U+FFFD for bytes that are not UTF-8, such as a last character cut short."""
        return bytes(i for i in ids if i < BYTES).decode(errors="replace")


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`. Its own templates are not applied: no token is added at either end."""

    def __init__(self, path: str, end_of_text: str | None = END_OF_TEXT):
        """See `open_tokenizer`."""
        file = Path(path).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise MissingDataError(f"no tokenizer {file}: give a tokenizer.json, or the folder that holds it")
        try:
            content = file.read_text(encoding="utf-8")
            self.tokenizer = require("tokenizers").Tokenizer.from_str(content)
        except InputError:
            raise
        except Exception as e:  # the library raises plain Exceptions
            raise InputError(f"{file} is no tokenizer.json: {first_line(e)}") from None
        self.path = str(file)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        self.vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        self.added = self.tokenizer.get_added_tokens_decoder()
        self.vocab_size = max(self.vocab.values(), default=-1) + 1
        if self.vocab_size > MOST_TOKENS:
            raise InputError(f"{file} numbers a token {self.vocab_size - 1:,}; expected less than {MOST_TOKENS:,}")
        self.spelling = _spelling(json.loads(content))
        self.end_of_text = None if end_of_text is None else self._special(end_of_text)

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text that each token stands for, 0 for a special one: int32 of (vocab_size,).

        None where tokens are spelt neither as bytes (GPT-2's alphabet) nor as text with single bytes as a last resort
        (sentencepiece's). A space that the tokenizer puts before every text counts.
        """
        if self.spelling is None:
            return None
        found = np.zeros(self.vocab_size, np.int32)
        for token, i in self.vocab.items():
            if i in self.added:
                found[i] = 0 if self.added[i].special else len(token.encode())
            elif self.spelling == "bytes":
                found[i] = len(token)  # each character is one byte
            else:
                found[i] = 1 if BYTE_TOKEN.fullmatch(token) else len(token.replace(SPACE, " ").encode())
        return found

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without an end."""
        with self._named_errors():
            found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, by several threads."""
        with self._named_errors():
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, nothing for special ones, U+FFFD for bytes that are not UTF-8."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:  # the library raises plain Exceptions
            raise InputError(f"{self.path} cannot tokenise: {first_line(e)}") from None

    def _special(self, name: str) -> int:
        """The number of a special token."""
        special = {token.content: i for i, token in self.added.items() if token.special}
        if name not in special:
            raise InputError(f"{self.path} has no special token {name!r} for end_of_text; {nearest(name, special)}")
        if special[name] in self.encode(name):
            raise InputError(f"{self.path} makes the special token {name!r} from text that looks like it")
        return special[name]


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(path: str | None, end_of_text: str | None = END_OF_TEXT) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of a folder that holds one; None stands for bytes.

    Args:
      path: the file.
      end_of_text: its special token that ends a document; None: it is not needed. Bytes have their own.

    Raises:
      MissingDataError: no such file.
      InputError: no tokenizer, or one without that special token.
    """
    return ByteTokenizer() if path is None else FileTokenizer(path, end_of_text)


def end_token(tokenizer: Tokenizer) -> int:
    """The token that ends a document."""
    if tokenizer.end_of_text is None:
        raise InputError("documents need an end_of_text: name a special token of the tokenizer")
    return tokenizer.end_of_text


class Vocabulary(NamedTuple):
    """What is known of the tokens in a file: all are below `vocab_size`, `end_of_text` ends a document."""

    vocab_size: int | None
    end_of_text: int | None
    token_bytes: np.ndarray | None


def vocabulary(
    tokenizer: str | None, vocab_size: int | None, end_of_text: int | None, of_bytes: bool = False
) -> Vocabulary:
    """The vocabulary of data that came as tokens: as given, and otherwise that of the tokenizer, where there is one.

    `vocab_size` may be more than the tokenizer's, as where it is padded; what is added stands for no bytes. `of_bytes`
    says that without a tokenizer the tokens are bytes. Raises InputError where the tokenizer has more tokens, or
    `end_of_text` is not among them.
    """
    if vocab_size is not None and not 0 < vocab_size <= MOST_TOKENS:
        raise InputError(f"a vocabulary of {vocab_size:,} tokens; expected 1 to {MOST_TOKENS:,}")
    known = None
    if tokenizer is not None or of_bytes:
        known = open_tokenizer(tokenizer, END_OF_TEXT if end_of_text is None else None)
    if known is not None and vocab_size is not None and known.vocab_size > vocab_size:
        raise InputError(f"the tokenizer has {known.vocab_size:,} tokens, vocab_size={vocab_size:,}")
    if known is not None:
        vocab_size = known.vocab_size if vocab_size is None else vocab_size
        end_of_text = known.end_of_text if end_of_text is None else end_of_text
    if end_of_text is not None and not 0 <= end_of_text < (vocab_size or end_of_text + 1):
        raise InputError(f"end_of_text={end_of_text} is not in the vocabulary of {vocab_size}")
    token_bytes = None if known is None else known.token_bytes
    if token_bytes is not None and vocab_size is not None:
        token_bytes = np.pad(token_bytes, (0, vocab_size - len(token_bytes)))
    return Vocabulary(vocab_size, end_of_text, token_bytes)


def _spelling(description: dict[str, Any]) -> str | None:
    """How the tokens of a tokenizer.json are spelt: "bytes", "text", or None where that is not known."""
    parts = {part for key in ("pre_tokenizer", "decoder") for part in _parts(description.get(key))}
    if "ByteLevel" in parts:
        return "bytes"
    return "text" if "ByteFallback" in parts else None


def _parts(part: Any) -> Iterator[str]:
    """The types of a part of a tokenizer.json and of the parts inside it."""
    if isinstance(part, dict):
        yield str(part.get("type"))
        for inside in (*part.get("pretokenizers", ()), *part.get("decoders", ())):
            yield from _parts(inside)
