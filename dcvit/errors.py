"""Errors that a user can fix, checks of arguments that raise them, and text that is safe to print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from input_pipeline.errors import InputError, check_arguments, first_line, has_type, nearest, type_name

__all__ = [
    "CheckpointError", "ConfigError", "InputError", "MetricsError", "check_call", "escaped", "first_line",
    "has_type", "nearest", "type_name",
]  # fmt: skip


class ConfigError(ValueError):
    """An invalid config or command argument; the message is one line."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or does not fit the model; the message names the file."""


class MetricsError(ValueError):
    """A damaged metrics file; the message names the file and the line."""


def escaped(text: str) -> str:
    """Return text in one printable line: other characters are written as Python's escapes, such as `\\n` or `\\x1b`.

    These are control characters, marks that change the direction of text, unusual spaces, and the bytes of a file name
    that are not valid UTF-8. A terminal could execute them, or show another name.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def check_call(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    what: str,
    *,
    args: Sequence[Any] = (),
    also: Iterable[str] = (),
) -> None:
    """Check that `function(*args, **kwargs)` is a valid call: known names, and values of the annotated types.

    Args:
      function: the function or class to call.
      kwargs: its keyword arguments, usually from a config.
      what: the name of `kwargs` in error messages, such as "config.model".
      args: its positional arguments.
      also: further names that a misspelled keyword may stand for, suggested in the message.

    Raises:
      ConfigError: names the argument, and the nearest valid one.
    """
    try:
        check_arguments(function, args, kwargs, what, also)
    except InputError as e:
        raise ConfigError(str(e)) from None
