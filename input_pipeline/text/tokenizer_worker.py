"""Handler of `input_pipeline.limited_worker` that runs a tokenizer of the tokenizers library.

The first request is the content of a tokenizer.json. In the others, "encode" is followed by texts, and "decode" by the
tokens of one text. Tokens are uint32.
"""

import json
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENS, MAX_TOKENS_PER_BYTE = 1 << 10, 1 << 6  # limit of tokens: 1,024, and 64 more for each byte of a text


class Handler:
    """A tokenizer without truncation and padding, to which special tokens are text."""

    def __init__(self) -> None:
        self.tokenizer: tokenizers.Tokenizer | None = None

    def __call__(self, request: list[bytes]) -> list[bytes]:
        """Answer a request. Any exception of the library is an error."""
        operation, *arguments = request
        if self.tokenizer is None:
            return self._load(operation)
        if operation == b"encode":
            return _encode(self.tokenizer, arguments)
        return [self.tokenizer.decode(array("I", arguments[0]).tolist(), skip_special_tokens=True).encode()]

    def _load(self, content: bytes) -> list[bytes]:
        """Load a tokenizer.json.

        Returns:
          As JSON: the numbers of all tokens by their texts, the added tokens as (number, text, whether it is special),
          and the parts `pre_tokenizer` and `decoder` of the file.
        """
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        added = [(i, token.content, token.special) for i, token in tokenizer.get_added_tokens_decoder().items()]
        description = json.loads(content)
        parts = [description.get(key) for key in ("pre_tokenizer", "decoder")]
        self.tokenizer = tokenizer
        return [json.dumps(data).encode() for data in (tokenizer.get_vocab(), added, parts)]


def _encode(tokenizer: "tokenizers.Tokenizer", texts: Sequence[bytes]) -> list[bytes]:
    """Return the tokens of each text. Raises ValueError if a text becomes too many tokens."""
    encodings = tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
    for text, encoding in zip(texts, encodings, strict=True):
        if len(encoding) > MAX_TOKENS + MAX_TOKENS_PER_BYTE * len(text):
            raise ValueError(f"{len(text):,} bytes of text become {len(encoding):,} tokens")
    return [array("I", encoding.ids).tobytes() for encoding in encodings]
