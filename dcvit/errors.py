"""Errors that a user can fix, checks of arguments that raise them, and text that is safe to print."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from input_pipeline.errors import (
    InputError,
    check_arguments,
    first_line,
    first_line_with_type,
    has_type,
    type_name,
)
from input_pipeline.errors import nearest as similar

__all__ = [
    "EXPECTED", "NOT_FINITE", "CheckpointError", "ConfigError", "InputError", "MetricsError", "check_call",
    "check_regex", "escaped", "first_line", "first_line_with_type", "has_type", "matches", "nearest", "type_name",
]  # fmt: skip

NOT_FINITE = "not finite; the parameters are damaged, or too large for their dtype"  # what a model computes
# What the release 0.3.0 removed, by its complete name (of an option, with the command) → what to use instead. For one
# release.
REMOVED: dict[str, str] = {
    "dcvit convert --soup": "`--average` averages all sources; greedy soups are gone",
    "--to bv": "big_vision also reads what --to npz writes",
    "config.lora": "fine-tune with `freeze_layers`, `frozen` and `layer_decay`",
    "--to peft": "write the merged model with --to hf",
    "--to savedmodel": "write a program with --to stablehlo or onnx",
    "config.mlflow": "use wandb, or the events that TensorBoard reads",
    "config.trackio": "use wandb, or the events that TensorBoard reads",
    "config.on_corrupt": "the error about a damaged checkpoint names the one to resume from",
    "config.watchdog_exit": "the watchdog always ends the run",
    "config.distill.cache": "each step computes the teacher's logits",
    "dcvit benchmark --peak-tflops": "`mfu` is that of known devices; `tflops` divided by another peak gives theirs",
    "dcvit aot --all": "give --config and --topology",
    "dcvit compare --group": "dcvit train --seeds writes means and intervals to seeds.md",
    **dict.fromkeys(
        ["dcvit explore --data", "dcvit explore --limit"], "give inputs; the page has no averages over data"
    ),
    "dcvit evaluate --out": "`--format csv` prints the rows",
    "dcvit lm_eval --allow_code": "the files of --include_path may always run code",
    **dict.fromkeys(
        [
            f"heads={name}"
            for name in ("moh", "moh_topk", "diff", "diff2", "xsa", "knocking", "gated_elementwise", "paired")
        ],
        "use 'dcmha', 'talking', 'gated' or another name of docs/heads.md",
    ),
    "config.kernels=known": "`verify` uses kernels by their verdicts, `off` uses no kernels",
    "dcvit check-kernels --seconds": "each implementation has 300 s",
    "dcvit reproduce": "run `python scripts/paper` in a clone",
}


class ConfigError(ValueError):
    """An invalid config or command argument; the message is one line."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or does not fit the model; the message names the file."""


class MetricsError(ValueError):
    """A damaged metrics file; the message names the file and the line."""


EXPECTED = (ConfigError, CheckpointError, InputError, MetricsError, FloatingPointError, OSError)  # of a command


def check_regex(pattern: Any, what: str) -> None:
    """Raise ConfigError if `pattern` is not a regular expression."""
    try:
        re.compile(pattern)
        re.fullmatch(pattern, "")  # raises TypeError for bytes
    except (re.error, TypeError, OverflowError, RecursionError) as e:
        raise ConfigError(f"{what}: {pattern!r:.100} is not a regular expression: {e}") from None


def matches(pattern: str, names: Iterable[str], what: str) -> set[str]:
    """Return the `names` that a regular expression given by the user matches as a whole.

    Raises:
      ConfigError: it is not a regular expression.
    """
    check_regex(pattern, what)
    return {name for name in names if re.fullmatch(pattern, name)}


def nearest(name: str, valid_names: Iterable[str], place: str = "") -> str:
    """Return the end of an error message about an unknown name: what replaced it, the most similar one, or all.

    The name in `REMOVED` is that of `place`, such as "--to ", and `name`.
    """
    replacement = REMOVED.get(f"{place}{name}")
    return f"removed in 0.3.0: {replacement}" if replacement else similar(name, valid_names)


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
    for name in kwargs:
        if f"{what}.{name}" in REMOVED:
            raise ConfigError(f"{what} has no option {name!r}; {nearest(name, (), f'{what}.')}")
    try:
        check_arguments(function, args, kwargs, what, also)
    except InputError as e:
        raise ConfigError(str(e)) from None
