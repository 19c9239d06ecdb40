"""Exception that an implementation of attention raises for a case that it does not support."""

from __future__ import annotations

from collections.abc import Callable


class UnsupportedError(NotImplementedError):
    """An implementation does not support the arguments; the message is a one-line reason.

    It is a class of its own, apart from the NotImplementedError that JAX raises.
    """


def reason_of(check: Callable[..., object], *args: object) -> str | None:
    """Return the message of the UnsupportedError that a function raises, or None."""
    try:
        check(*args)
    except UnsupportedError as error:
        return str(error)
    return None
