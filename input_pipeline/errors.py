"""Errors about data that a user can fix, and argument checks that raise them."""

import contextlib
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

TOWER = {float: (float, int), complex: (complex, float, int)}  # the types that match a type hint of a number


class InputError(ValueError):
    """Invalid data or an invalid description of data; the message names the file, record or option."""


class MissingDataError(InputError):
    """Data that does not exist; the message names the searched location and how to obtain the data."""


class ReadingError(InputError):
    """A failure that is not the fault of one example, such as an unreadable file, a missing library or a bug.

    It always ends the run, even when corrupt examples are skipped.
    """


class MissingLibraryError(ReadingError):
    """An optional library that is not installed; the message names the extra that contains it."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its type name if the text is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Convert any error of a library inside the context to an InputError of one line, "PROBLEM: ERROR".

    Errors of any type are those of damaged data; a panic of a library that is written in Rust is a BaseException.
    """
    try:
        yield
    except (InputError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        raise InputError(f"{problem}: {first_line(e)}") from None


def first_line_with_type(error: BaseException) -> str:
    """Return the type name of an exception and the first line of its text, for unexpected exceptions."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error) else name


def nearest(name: str, valid_names: Iterable[str]) -> str:
    """Return the end of an error message: the valid name most similar to `name`, or the list of valid names."""
    name, valid_names = str(name), list(map(str, valid_names))
    close = difflib.get_close_matches(name, valid_names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(valid_names) or 'none'}"


def check_split(kind: str, split: str, splits: Iterable[str]) -> None:
    """Raise InputError if `split` is not one of `splits`, the splits of data of this kind."""
    if split not in splits:
        raise InputError(f"{kind} has no split {split!r}; {nearest(split, splits)}")


def check_arguments(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    what: str,
    also: Iterable[str] = (),
) -> None:
    """Check that `function(*args, **kwargs)` is a valid call: valid names, and values of the annotated types.

    An int is accepted for a float. A parameter without annotation accepts any value.

    Args:
      function: the function or class to call.
      args: its positional arguments.
      kwargs: its keyword arguments.
      what: the subject of the error message.
      also: further names that the message may suggest for a misspelled keyword.

    Raises:
      InputError: the call is invalid; the message names the argument.
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
    is_class = inspect.isclass(function) and not issubclass(function, tuple)  # the hints of a NamedTuple are its own
    hints = typing.get_type_hints(function.__init__ if is_class else function)
    for name, value in bound.arguments.items():
        if name in named and name in hints and not has_type(value, hints[name]):
            expected = type_name(hints[name])
            raise InputError(f"{what}: {name}={value!r} should be of type {expected}, not {type(value).__name__}")


def has_type(value: object, hint: object) -> bool:
    """Return True if `value` matches a type hint.

    An int matches float, a bool matches neither int nor float, and a string does not match a sequence.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, option) for option in sorted(arguments, key=lambda option: type(option) is not type))
    if Sequence in (hint, origin):  # check every item; beartype checks only one
        return isinstance(value, list | tuple) and all(has_type(v, item) for v in value for item in arguments)
    if isinstance(value, bool) and hint in (int, float):
        return False
    if isinstance(hint, type) and type(hint) is type:
        return isinstance(value, TOWER.get(hint, (hint,)))
    if origin is dict and typing.Any in arguments[1:]:
        return isinstance(value, dict) and all(has_type(key, arguments[0]) for key in value)
    import beartype  # deferred: importing it takes longer than everything else in this module
    import beartype.door

    conf = beartype.BeartypeConf(is_pep484_tower=True)
    return bool(beartype.door.is_bearable(value, hint, conf=conf))  # type: ignore[arg-type]


def type_name(hint: object) -> str:
    """Return the text by which error messages name a type hint."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("collections.abc.", "").replace("typing.", "")
