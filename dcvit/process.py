"""Standard streams of a command's process, whose reader may go away, numbers on them, and its log on stderr."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO

from dcvit.errors import escaped

LOGGERS = ("dcvit", "input_pipeline")  # the packages whose log records a command prints


def number(value: float) -> str:
    """Return a result as text: four decimals from 0.001 to 10, else four significant digits, or an integer."""
    if value == 0 or 1e-3 <= abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:.0f}"


def say(text: str) -> None:
    """Print a line to stdout, unprintable characters escaped; discard it and all later output if no reader is left."""
    try:
        print(escaped(text), flush=True)
    except BrokenPipeError:
        discard(sys.stdout)


def reader_is_gone() -> bool:
    """Return True if stdout is a pipe or socket that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def discard(stream: TextIO) -> None:
    """Connect a stream to the null device, so that neither later output nor the flush at exit raises an error."""
    with open(os.devnull, "w") as null:  # noqa: PTH123 - opens no path of a user
        os.dup2(null.fileno(), stream.fileno())


class _LineFormatter(logging.Formatter):
    """Formats a log record as one printable line, followed by the traceback if it has one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the message of a record with unprintable characters escaped, line breaks included."""
        return escaped(record.message)


@contextlib.contextmanager
def logging_to(handler: logging.Handler, *names: str) -> Iterator[None]:
    """Inside the context, the records of loggers at level INFO and above go to `handler` only.

    They do not reach the root logger, where absl may have installed a handler that would print them again.
    """
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in map(logging.getLogger, names)]
    for logger, *_ in before:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def log_to_stderr() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the log records of `LOGGERS` are printed to stderr, one plain line each.

    The choice of an attention implementation, which `dcvit.dcmha` logs whenever a model is traced, is printed by the
    progress display of training only.
    """
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno > logging.INFO or not record.name.startswith("dcvit.dcmha"))
    handler.setFormatter(_LineFormatter())
    return logging_to(handler, *LOGGERS)
