"""The standard streams of a command's process, whose reader may go away."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


@contextlib.contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Inside the context, continue without console output once the reader of stdout or stderr has gone away."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and cast(TextIO, _ClosableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _ClosableStream:
    """A standard stream whose reader may go away: from then on, output is discarded instead of raising an error."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, or discard it."""
        try:
            self._stream.write(text)
        except BrokenPipeError:
            discard(self._stream)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or discard its buffer."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            discard(self._stream)


def reader_is_gone() -> bool:
    """Return True if stdout is a pipe or socket that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def discard(stream: Any) -> None:
    """Connect a stream to the null device, so that neither later output nor the flush at exit raises an error."""
    with open(os.devnull, "w") as null:  # noqa: PTH123 - opens no path of a user
        os.dup2(null.fileno(), stream.fileno())
