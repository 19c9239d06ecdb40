"""Option parsing, error messages, log output and tables shared by the commands.

Importing this module is fast, because `dcvit --help` should not wait for JAX. Commands import what they need after
they have parsed their options.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import os
import re
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcvit import process
from dcvit.errors import EXPECTED, ConfigError, InputError, escaped, first_line, nearest
from dcvit.runs import files
from input_pipeline import huggingface
from input_pipeline.files import expand
from input_pipeline.optional import require_extra

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from dcvit.hub.open import Opened

COMMANDS = {
    "train": "train a model from a config",
    "evaluate": "run the evaluators of a config on a checkpoint",
    "predict": "classify image files with a trained model",
    "generate": "continue text with a trained language model",
    "lm_eval": "run tasks of lm-evaluation-harness on a language model",
    "convert": "convert a model to a format of another library, or from one",
    "tokenize": "convert text files to token files",
    "check-data": "read all data of a config, and list damaged examples",
    "check-kernels": "verify and time the implementations of attention on this device",
    "benchmark": "measure speed, memory and FLOP/s of configs on this device",
    "aot": "compile the training step of a config for a TPU slice",
    "explore": "write a page that shows how the heads of a model compose",
    "compare": "compare the results and the speed of runs, and draw their curves",
}
FORMATS = ("table", "csv", "json", "markdown")
EXIT_SIGPIPE = 141  # exit status that a shell reports for SIGPIPE

Main = Callable[[Sequence[str] | None], int]


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError` and collects `--config.KEY=VALUE` overrides."""

    def __init__(self, prog: str, *, examples: Sequence[str] = (), extra: str | None = None, **options: Any):
        """Prepare the parser of a command.

        Args:
          prog: the command, such as "dcvit train".
          examples: command lines for the help.
          extra: the extra that the command needs.
          **options: those of argparse; the description is that of `COMMANDS`.
        """
        purpose = COMMANDS.get(prog.removeprefix("dcvit "), "")
        options = {"description": f"{purpose[:1].upper()}{purpose[1:]}.", "allow_abbrev": False, **options}
        super().__init__(prog, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.examples, self.extra = examples, extra

    def format_help(self) -> str:
        """Return the help: options, examples and, for a command with a config, overrides and names of configs."""
        lines = [super().format_help()]
        if any(action.dest == "config" for action in self._actions):
            from dcvit.config import load as config

            lines += [
                "--config.KEY=VALUE overrides a key of the config; `dcvit help config` lists all keys.",
                f"Configs of the package: {', '.join(path.stem for path in config.shipped())}.\n",
            ]
        if self.examples:
            lines += ["examples:", *(f"  {line}" for line in self.examples), ""]
        return "\n".join(lines)

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` instead of printing the usage and exiting."""
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words of a command line.

        Returns:
          The options, and the config overrides as strings "KEY=VALUE".

        Raises:
          ConfigError: an unknown or invalid option, for which the message suggests the nearest valid one, or an
            override without a config.
          MissingLibraryError: a library of `extra` is not installed.
        """
        words, overrides = _split_overrides(sys.argv[1:] if argv is None else argv)
        valid = [option for action in self._actions for option in action.option_strings]
        for word in words:
            name = word.partition("=")[0]
            if re.match(r"--|-[A-Za-z]\S*$", word) and name not in valid:
                raise ConfigError(f"unknown option {name}; {self._hint(name, valid)}")
        if overrides and "--config" not in valid:
            raise ConfigError(f"{self.prog} takes no --config.{overrides[0]}")
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        if overrides and not args.config:
            raise ConfigError("--config.KEY=VALUE needs --config: the config of a workdir cannot be changed")
        if self.extra:
            require_extra(self.extra)
        return args, overrides

    def _hint(self, name: str, valid: Sequence[str]) -> str:
        """Return the end of the message about an unknown option: the valid one, or the key that it may stand for."""
        if "." in name:
            return "did you mean '--config.KEY=VALUE'?"
        if "--config" in valid:
            from dcvit.config import values

            if name.removeprefix("--") in values.known_keys():
                return f"did you mean '--config.{name.removeprefix('--')}=VALUE'?"
        return nearest(name, valid, f"{self.prog} ")


def _split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into its other words and the overrides, "--config.KEY=VALUE" or "--config.KEY VALUE"."""
    words, overrides = list[str](), list[str]()
    remaining = list(argv)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--config."):
            words.append(word)
            continue
        if "=" not in word and remaining and not remaining[0].startswith("--"):
            word = f"{word}={remaining.pop(0)}"
        overrides.append(word.removeprefix("--config."))
    return words, overrides


def path(text: str) -> Path:
    """Convert an option's value to a path, with ~ expanded."""
    if not text:  # most likely an unset shell variable
        raise argparse.ArgumentTypeError("an empty path")
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text}: expected a path, not a URL")
    try:
        return expand(text)
    except InputError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def utf8_path(text: str) -> Path:
    """Convert an option's value to a path as in `path`, in valid UTF-8, which Orbax and TensorStore need."""
    if huggingface.is_name(text):
        raise argparse.ArgumentTypeError(f"{text}: expected a path, not a repository of the Hugging Face Hub")
    local = path(text)
    try:
        str(local.absolute()).encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text}: the path is not valid UTF-8") from None
    return local


def folder(text: str) -> files.Folder:
    """Convert an option's value to a folder: a path as in `utf8_path`, or the URL of a supported store."""
    if "://" not in text:
        return utf8_path(text)
    try:
        return files.folder(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def model(text: str) -> files.Folder:
    """Convert an option's value to a folder: that of the package's model of this name, or else as in `folder`.

    The name of a repository of the Hugging Face Hub is checked and stays; `check_model` downloads it.
    """
    from dcvit.hub import pretrained

    if not huggingface.is_name(text):
        return folder(pretrained.resolve(text))
    try:
        return Path(str(huggingface.parse(text)))
    except InputError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def local_model(text: str) -> Path:
    """Convert an option's value as `model` does, but for the URL of a store."""
    found = model(text)
    if not isinstance(found, Path):
        raise argparse.ArgumentTypeError(f"{text}: expected a path, not a URL")
    return found


def add_model_options(parser: Parser, *, weights: bool = True, image_size: bool = False) -> None:
    """Add the options that select a trained model, and `--format`; `weights`: their help offers weights, too.

    With `image_size`, the option of this name gives images another height and width.
    """
    parser.set_defaults(image_size=None)
    if image_size:
        text = "size of images in pixels, such as 256 or 256x320 (height x width), instead of that of training"
        parser.add_argument("--image-size", type=_image_size, help=text)
    places = "folder of a training run" + (", weights that `dcvit.load` opens" if weights else "")
    parser.add_argument("--workdir", "--model", type=model, help=f"{places}, a model of the package, or hf:OWNER/NAME")
    parser.add_argument("--config", help="config file or bare name, instead of the workdir's config")
    parser.add_argument(
        "--checkpoint", type=model, help="checkpoint, workdir, weights or hf:OWNER/NAME, instead of the workdir"
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="format of the output")


def check_config(spec: str, overrides: Sequence[str]) -> None:
    """Load a config before a command imports JAX and loads it, so that an error is shown at once; log nothing."""
    from dcvit.config import load as config

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        config.load(spec, overrides)
    finally:
        logging.disable(before)


def check_model(args: argparse.Namespace, overrides: Sequence[str]) -> ConfigDict | None:
    """Return the config that the options of `add_model_options` name, None for that of the model, before JAX starts.

    Models of the Hugging Face Hub are downloaded, and `args` then has their folders.

    Raises:
      ConfigError: there is no such model, or the config is invalid.
      CheckpointError: see `dcvit.hub.repository.download`.
    """
    from dcvit.config import load as config
    from dcvit.hub import pretrained

    for name in ("checkpoint", "workdir"):
        if huggingface.is_name(found := getattr(args, name)):
            setattr(args, name, Path(pretrained.resolve(str(found))))
    if args.workdir is None and (args.config is None or args.checkpoint is None):
        raise ConfigError("give --workdir DIR, or both --config CONFIG and --checkpoint CHECKPOINT")
    if args.workdir is not None and not args.workdir.exists():
        raise ConfigError(f"no workdir {args.workdir}{pretrained.hint(args.workdir)}")
    return None if args.config is None else config.load(args.config, overrides)


def open_model(args: argparse.Namespace, config: ConfigDict | None, overrides: Sequence[str]) -> Opened:
    """Open the model of the options of `add_model_options`, with the result of `check_model`."""
    from dcvit.hub import open as hub

    size = args.image_size
    return hub.open_model(args.workdir, config=config, checkpoint=args.checkpoint, overrides=overrides, image_size=size)


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a function that converts an option's value to an integer, which is not less than `minimum`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} should be an integer, {minimum} or more")
        return int(text)

    return convert


def start_jax(args: argparse.Namespace | None = None, *, preemptible: bool = False) -> None:
    """Configure JAX, connect the processes of the run, and check the devices; see `dcvit.parallel`.

    Args:
      args: the options of `dcvit.parallel.multihost.add_options`; None means a run of one process.
      preemptible: see `dcvit.parallel.multihost.initialize`.

    Raises:
      ConfigError: an environment variable or an option is invalid, or there is no device.
    """
    from dcvit.parallel import multihost, runtime

    runtime.configure()
    if args is not None:
        multihost.initialize(args, preemptible=preemptible)
    runtime.check_devices()


def _image_size(text: str) -> tuple[int, int]:
    """Return the height and width that the text of an option gives: "256", or "256x320"."""
    found = re.fullmatch(r"([1-9][0-9]{0,4})(?:x([1-9][0-9]{0,4}))?", text, re.ASCII)
    if not found:
        raise argparse.ArgumentTypeError(f"expected pixels, such as 256 or 256x320, found {text!r}")
    return int(found[1]), int(found[2] or found[1])


def run(main: Main, argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    An expected error, or a lack of memory, is printed as one line on stderr and gives status 2. Ctrl-C gives status
    130. Any other exception is a bug and propagates, except in a run of several processes, where the other processes
    are informed first. If the reader of stdout goes away, as in `dcvit predict … | head`, the command ends silently
    with status 141. Characters that the encoding of stdout or stderr does not have are written as escapes.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - open until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with process.log_to_stderr():
        try:
            status = main(argv)
            sys.stdout.flush()
            return status
        except EXPECTED as e:
            message, status = str(e), 2
            if isinstance(e, BrokenPipeError) and process.reader_is_gone():  # not the pipe or socket of a library
                process.discard(sys.stdout)
                status = EXIT_SIGPIPE
            else:
                print_error(message)
        except KeyboardInterrupt:
            message, status = "interrupted", 130
            print(message, file=sys.stderr)
        except Exception as e:
            message, status = _report(e)
        if multihost := _multihost():
            multihost.fail(message, status)
        return status


def print_error(message: str) -> None:
    """Print an error as one line on stderr."""
    print(f"error: {escaped(message)}", file=sys.stderr)


def _report(error: Exception) -> tuple[str, int]:
    """Print an exception that is not in `EXPECTED`; return its message for other processes and the exit status.

    Raises it again if it is a bug in a run of one process.
    """
    message, text = first_line(error), str(error).lower()
    if isinstance(error, MemoryError) or (type(error).__name__ == "JaxRuntimeError" and "out of memory" in text):
        message = f"{message.removesuffix('.')}; a smaller batch, model or context needs less memory"
        print_error(message)
        return message, 2
    multihost = _multihost()
    if not multihost:
        raise error
    if failure := multihost.peer_failure(error):
        print_error(f"stopped because {failure}")
    else:
        traceback.print_exception(error)
    return message, 1


def _multihost() -> types.ModuleType | None:
    """Return `dcvit.parallel.multihost` in a run of several processes, else None; never imports JAX."""
    if "jax" not in sys.modules:
        return None
    from dcvit.parallel import multihost

    return None if multihost.is_single_process() else multihost


def show(rows: Iterable[Mapping[str, object]], form: str, *, title: str | None = None) -> None:
    """Print rows that have the same keys, as `form` says: as CSV or JSON, each as soon as it is computed, or a table.

    A table has the columns with a value, and is adapted to the width of the terminal, unless it is in Markdown. JSON
    has the exact text; in CSV and tables, characters that cannot be printed are escaped.
    """
    if form == "json":
        _show_json(rows)
    elif form == "csv":
        _show_csv(rows)
    elif form == "markdown":
        header, *lines = _cells(list(rows))
        for line in (header, ["---"] * len(header), *lines) if header else ():
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
    else:
        _show_table(_cells(list(rows)), title)


def _show_json(rows: Iterable[Mapping[str, object]]) -> None:
    """Print rows as a JSON list with an indentation of 2, each as soon as it is computed."""
    start = "["
    for row in rows:
        print(start, textwrap.indent(json.dumps(row, indent=2), "  "), sep="\n", end="", flush=True)
        start = ","
    print("\n]" if start == "," else "[]")


def _show_csv(rows: Iterable[Mapping[str, object]]) -> None:
    """Print rows as CSV with a header, each as soon as it is computed."""
    writer = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(sys.stdout, fieldnames=list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({name: escaped(value) if isinstance(value, str) else value for name, value in row.items()})
        sys.stdout.flush()


def _cells(rows: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Return the header of a table and its lines, with the columns that have a value."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    return [names, *([_cell(row[name]) for name in names] for row in rows)]


def _cell(value: object) -> str:
    return "–" if value is None else process.number(value) if isinstance(value, float) else escaped(str(value))


def _show_table(lines: Sequence[Sequence[str]], title: str | None) -> None:
    """Print a table, transposed if the terminal is too narrow and that is narrower."""
    console = Console()

    def width(table: Table) -> int:
        return table.__rich_measure__(console, console.options.update(width=10_000)).maximum

    table = _table(lines, title)
    if width(table) > console.width:
        transposed = _table(list(zip(*lines, strict=True)), title)
        transposed.columns[0].no_wrap = True
        table = min(table, transposed, key=width)
    with console.capture() as printed:  # `print` raises BrokenPipeError, where the console would end the process
        console.print(table)
    print(printed.get(), end="")


def _table(lines: Sequence[Sequence[str]], title: str | None) -> Table:
    """Build a table of text, a header and lines, with the first column aligned left and the others aligned right."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(lines[0]):
        table.add_column(Text(name), justify="right" if i else "left", overflow="fold")
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    return table
