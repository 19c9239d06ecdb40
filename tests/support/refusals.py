"""Errors that a user can fix, whose message is one line."""

import contextlib

import pytest


@contextlib.contextmanager
def refused(error, *parts, match=None):
    """Expect an error of one line that has these parts and matches a regular expression; yield what was raised."""
    with pytest.raises(error, match=match) as raised:
        yield raised
    assert "\n" not in str(raised.value)
    assert all(part in str(raised.value) for part in parts), str(raised.value)
