"""Conversion of generated tokens to text while they are generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

INCOMPLETE = "\ufffd"  # the decoded text of bytes that are not yet a complete character


class TextStream:
    """Incremental decoder of one example's tokens.

    It returns complete characters only, and no text from the first stop string on. The attribute `stopped` is True once
    a stop string was generated.

    Args:
      decode: a tokenizer's function from tokens to text.
      stop: strings that end the text and are not part of it.
      after: the preceding tokens, whose text is not returned.
    """

    KEPT = 16  # preceding tokens that are decoded again, because some decoders treat the beginning of a text specially

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), after: Sequence[int] = ()):
        self.decode, self.stop, self.stopped = decode, tuple(stop), False
        self._tokens = self._tail(list(after))
        self._returned = len(self._complete_text())  # characters of the text that were returned or precede it

    def push(self, token: int) -> str:
        """Append a token, and return the text that further tokens cannot change any more."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        text = self._complete_text()
        end = len(text)
        found = [i for i in (text.find(word, self._returned) for word in self.stop) if i >= 0]
        if found:
            self.stopped, end = True, min(found)
        else:  # keep back text that may be the beginning of a stop string
            starts = range(self._returned, end)
            end = next((i for i in starts if any(word.startswith(text[i:]) for word in self.stop)), end)
        piece, self._returned = text[self._returned : end], max(self._returned, end)
        if len(self._tokens) > 4 * self.KEPT and self._returned == len(self.decode(self._tokens)):
            self._tokens = self._tail(self._tokens)
            self._returned = len(self._complete_text())
        return piece

    def rest(self) -> str:
        """Return the text held back because it could begin a stop string, without an incomplete last character."""
        return "" if self.stopped else self._complete_text()[self._returned :]

    def _complete_text(self) -> str:
        """Return the text of the tokens, without incomplete characters at the end.

        Some decoders return one replacement character for each byte of an incomplete character and of the complete
        characters directly before it.
        """
        return self.decode(self._tokens).rstrip(INCOMPLETE)

    def _tail(self, tokens: list[int]) -> list[int]:
        """Return the last `KEPT` tokens, or up to 3 more, so that they do not begin inside a character's bytes."""
        starts = [max(0, len(tokens) - self.KEPT - more) for more in range(4)]
        complete = (start for start in starts if not self.decode(tokens[start:]).startswith(INCOMPLETE))
        return tokens[next(complete, starts[0]) :]


def push_steps(steps: Iterator[list[int | None]], streams: Sequence[TextStream]) -> Iterator[list[tuple[int, str]]]:
    """Feed the steps of `dcvit.inference.generation.generate` to one stream per example.

    Yields:
      After each step, the pairs (example, new text) of the examples that received a token. The iteration ends when all
      examples have ended, by a token or by a stop string.
    """
    for step in steps:
        received = [(i, token) for i, token in enumerate(step) if token is not None and not streams[i].stopped]
        yield [(i, streams[i].push(token)) for i, token in received]
        if all(token is None or stream.stopped for token, stream in zip(step, streams, strict=True)):
            return
