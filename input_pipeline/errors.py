"""What goes wrong with data that a user can mend, told in one line."""

import difflib
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import beartype
import beartype.door

LM_LIBRARIES = ("tokenizers", "zstandard")  # of the `lm` extra; the others are of `data`


class InputError(ValueError):
    """Bad data or a bad description of data; the message names the file, record or option."""


class MissingDataError(InputError):
    """Data that is not there at all; the message says where it was looked for and how to get it."""


class ReadingError(InputError):
    """What no example is to blame for: a file that cannot be read, too little memory, a library that is missing, a
    bug. It ends the run, whatever becomes of corrupt examples."""


def first_line(error: BaseException) -> str:
    """An exception as a message shows it: the first line of its text, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def with_type(error: BaseException) -> str:
    """The same for an exception that nobody expected: its type, and the first line of its text."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error) else name


def require(module: str) -> Any:
    """An imported library of the `data` or `lm` extra. Raises ReadingError, naming the extra, where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        extra = "lm" if module.partition(".")[0] in LM_LIBRARIES else "data"
        raise ReadingError(f'this needs {e.name}, which is not installed: pip install "dcvit[{extra}]"') from None


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name most like `name`, or all of them."""
    name, known = str(name), list(map(str, known))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def check_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], what: str, also: Iterable[str] = ()
) -> None:
    """Raises InputError, naming `what`, where `function` cannot be called with these arguments or their types.

    An int passes for a float; parameters without annotation take anything.
    """
    signature = inspect.signature(function)
    named = [name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for name in kwargs:
        if name not in named:
            raise InputError(f"{what} has no option {name!r}; {nearest(name, [*named, *also])}")
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as e:
        raise InputError(f"{what}: {e}") from None
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    for name, value in bound.arguments.items():
        if name in named and name in hints and not has_type(value, hints[name]):
            expected = type_name(hints[name])
            raise InputError(f"{what}: {name}={value!r} should be of type {expected}, not {type(value).__name__}")


def has_type(value: Any, hint: Any) -> bool:
    """Whether `value` fits a type hint. An int passes for a float, a bool for no number, a string for no sequence."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, option) for option in arguments)
    if Sequence in (hint, origin):  # every item, where beartype would look at one
        return isinstance(value, list | tuple) and all(has_type(v, item) for v in value for item in arguments)
    if isinstance(value, bool) and hint in (int, float):
        return False
    return bool(beartype.door.is_bearable(value, hint, conf=beartype.BeartypeConf(is_pep484_tower=True)))


def type_name(hint: Any) -> str:
    """A type hint as a message shows it."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("collections.abc.", "").replace("typing.", "")
