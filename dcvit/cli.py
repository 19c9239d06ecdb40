"""What the commands share: options, and one line instead of a traceback for what a user can mend."""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import json
import logging
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcvit.checkpoint import files
from dcvit.checkpoint.files import Folder
from dcvit.errors import CheckpointError, ConfigError, MetricsError, first_line, nearest
from dcvit.parallel import multihost
from input_pipeline import InputError

CACHE_BYTES = 10**10
FORMATS = ("table", "csv", "json")
LOGGERS = ("dcvit", "input_pipeline")  # the packages whose log records a command prints


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors, and which collects `--config.KEY=VALUE` overrides."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the overrides as "KEY=VALUE"."""
        known = [o for action in self._actions for o in action.option_strings]
        for word in sys.argv[1:] if argv is None else argv:
            if word == "--":
                break
            name = word.partition("=")[0]
            if word.startswith("--") and name not in known and not word.startswith("--config."):
                near = "--config.KEY=VALUE" if "." in name else None
                raise ConfigError(
                    f"unknown option {name}; {f'did you mean {near!r}?' if near else nearest(name, known)}"
                )
        args, rest = self.parse_known_args(argv)
        overrides = []
        while rest:
            word = rest.pop(0)
            if not word.startswith("--config."):
                raise ConfigError(f"unknown option {word}; {nearest(word.partition('=')[0], known)}")
            if "=" not in word and rest:
                word = f"{word}={rest.pop(0)}"
            overrides.append(word.removeprefix("--config."))
        return args, overrides


def path(text: str) -> Path:
    """An option's path, with ~ expanded; an empty one is most likely an unset variable, and refused."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text}: only paths, no URLs")
    return Path(text).expanduser()


def folder(text: str) -> Folder:
    """An option's folder: a path, as `path` has it, or the URL of a store."""
    if "://" not in text:
        return path(text)
    try:
        return files.folder(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def keep_compiled() -> None:
    """Has JAX keep what it compiles on disk, up to `CACHE_BYTES`, unless its own settings say where.

    In `~/.cache/dcvit` (or $XDG_CACHE_HOME/dcvit), by kind of processor: homes are shared by machines that differ.
    """
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - never raises
        info = Path("/proc/cpuinfo")
        flags = re.search(r"^flags.*$", info.read_text(), re.MULTILINE) if info.is_file() else None
        kind = hashlib.sha256((flags[0] if flags else platform.processor()).encode()).hexdigest()[:8]
        jax.config.update("jax_compilation_cache_dir", str(base / "dcvit" / f"{platform.machine()}-{kind}"))
        jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)


@contextlib.contextmanager
def log_to_stderr() -> Iterator[None]:
    """Print the log records of `LOGGERS` at level INFO and above to stderr, one plain line each, inside the context.

    Records do not reach the root logger, where absl may have installed a handler that would print them again. A live
    progress bar replaces the handlers of these loggers while it is shown.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    previous = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, previous, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def run(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    An expected error is printed as one line on stderr and gives status 2. Ctrl-C gives status 130. Any other exception
    is a bug and propagates, except in a run of several processes, where the other processes are informed first.
    """
    keep_compiled()
    with log_to_stderr():
        return _status(main, argv)


def _status(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None) -> int:
    """Call `main` and convert exceptions to exit statuses."""
    try:
        return main(argv)
    except (ConfigError, CheckpointError, InputError, MetricsError, FloatingPointError, OSError) as e:
        message, status = str(e), 2
        print(f"error: {message}", file=sys.stderr)
    except KeyboardInterrupt:
        message, status = "interrupted", 130
        print(message, file=sys.stderr)
    except Exception as e:
        if multihost.is_single_process():
            raise
        message, status = first_line(e), 1
        traceback.print_exc()
    if not multihost.is_single_process():
        multihost.fail(message, status)
    return status


def show(rows: Sequence[Mapping[str, Any]], form: str, *, title: str | None = None) -> None:
    """Prints rows of equal keys as CSV, as JSON or as a table, which lies on its side where the terminal is narrow."""
    if form == "json":
        print(json.dumps(list(rows), indent=2))
    elif form == "csv":
        writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        names = list(rows[0]) if rows else []
        lines = [[f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
        console, table = Console(), _table(title, names, lines)
        if table.__rich_measure__(console, console.options.update(width=10_000)).maximum > console.width:
            sideways = list(zip(names, *lines, strict=True))
            table = _table(title, sideways[0], sideways[1:])
        console.print(table)


def _table(title: str | None, header: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """A table of text, its first column to the left and the others to the right."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(Text(name), justify="right" if i else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table
