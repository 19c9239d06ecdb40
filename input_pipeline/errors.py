"""What goes wrong with data that a user can mend, told in one line."""

import difflib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import beartype
import beartype.door


class InputError(ValueError):
    """Bad data or a bad description of data; the message names the file, record or option."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name most like `name`, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def check_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> None:
    """Raises InputError, naming `what`, where `function` cannot be called with these arguments or their types.

    An int passes for a float; parameters without annotation take anything.
    """
    signature = inspect.signature(function)
    named = [name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for name in kwargs:
        if name not in named:
            raise InputError(f"{what} has no option {name!r}; {nearest(name, named)}")
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as e:
        raise InputError(f"{what}: {e}") from None
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    for name, value in bound.arguments.items():
        if name in named and name in hints and not has_type(value, hints[name]):
            expected = getattr(hints[name], "__name__", str(hints[name]))
            raise InputError(f"{what}: {name}={value!r} should be of type {expected}, not {type(value).__name__}")


def has_type(value: Any, hint: Any) -> bool:
    """Whether `value` is an instance of a type hint; an int passes for a float, a bool not for a number."""
    if isinstance(value, bool) and hint in (int, float):
        return False
    return bool(beartype.door.is_bearable(value, hint, conf=beartype.BeartypeConf(is_pep484_tower=True)))
