"""The process of a command: its replacement by a new one that runs the same command, and its standard streams."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

RESTARTS, MOST_RESTARTS = "DCVIT_RESTARTS", 20  # environment variable with the number of restarts of this command


def restart() -> None:
    """Replace this process, to run the command again; return if that happened too often or is not possible."""
    count = int(os.environ.get(RESTARTS, "0"))
    if count < MOST_RESTARTS and _is_command_line():
        os.environ[RESTARTS] = str(count + 1)
        if sys.stdout:
            sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _is_command_line() -> bool:
    """Return True if Python was started with the words of `sys.argv`, which a program may set, and has no debugger."""
    words, started = sys.argv, sys.orig_argv[-len(sys.argv) :]
    before = sys.orig_argv[-len(words) - 1 : -len(words)]
    is_same = bool(words) and started[1:] == words[1:] and (started[0] == words[0] or before == ["-m"])
    return is_same and bool(sys.executable) and sys.gettrace() is None


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
