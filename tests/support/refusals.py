"""Errors that a user can fix, whose message is one line."""

import contextlib
import tracemalloc

import pytest


@contextlib.contextmanager
def refused(error, *parts, match=None, most_bytes=None):
    """Expect an error of one line that has these parts and matches a regular expression; yield what was raised.

    At most `most_bytes` are allocated, of the memory of Python, numpy and zstandard's output.
    """
    if most_bytes:
        tracemalloc.start()
    try:
        with pytest.raises(error, match=match) as raised:
            yield raised
        assert not most_bytes or tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
    message = str(raised.value)
    assert message.splitlines() == [message]  # also without a line break at its end
    assert [part for part in parts if part not in message] == [], message
