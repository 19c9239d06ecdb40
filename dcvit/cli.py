"""What the commands share: options, and one line instead of a traceback for what a user can mend."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcvit import distributed
from dcvit.checkpoint import CheckpointError
from dcvit.config import ConfigError
from dcvit.metrics import MetricsError
from input_pipeline import InputError
from input_pipeline.errors import first_line, nearest

FORMATS = ("table", "csv", "json")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors, and which collects `--config.KEY=VALUE` overrides."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the overrides as "KEY=VALUE"."""
        args, rest = self.parse_known_args(argv)
        overrides = []
        while rest:
            word = rest.pop(0)
            if not word.startswith("--config."):
                known = [o for action in self._actions for o in action.option_strings]
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
        raise argparse.ArgumentTypeError(f"{text}: only local folders so far")
    return Path(text).expanduser()


def run(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """The exit status of `main`: its own; 2, with one line on stderr, for an expected error; 130 for Ctrl-C."""
    try:
        return main(argv)
    except (ConfigError, CheckpointError, InputError, MetricsError, FloatingPointError, OSError) as e:
        message, status = str(e), 2
        print(f"error: {message}", file=sys.stderr)
    except KeyboardInterrupt:
        message, status = "interrupted", 130
        print(message, file=sys.stderr)
    except Exception as e:
        if distributed.alone():
            raise
        message, status = first_line(e), 1
        traceback.print_exc()
    if not distributed.alone():
        distributed.fail(message, status)
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
