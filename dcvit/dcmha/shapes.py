"""Array annotations of the package: those of jaxtyping where it is installed.

The annotations document shapes, and the tests execute them. The code does not need them, so that the core and the
models also import where only jax, flax and numpy are installed.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

try:
    from jaxtyping import Array, Bool, Float, Int, Shaped
except ModuleNotFoundError:
    from jax import Array

    Bool = Float = Int = Shaped = Any  # type: ignore[assignment]

__all__ = ["Array", "Bool", "Float", "Int", "Ref", "Shaped", "not_none"]

Value = TypeVar("Value")


@runtime_checkable
class Ref(Protocol):
    """A reference to memory in a Pallas kernel, or to a part of it. Pallas has no public type for both."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def at(self) -> Any: ...

    def __getitem__(self, index: Any, /) -> Array: ...

    def __setitem__(self, index: Any, value: Array, /) -> None: ...


def not_none(value: Value | None) -> Value:
    """Return `value`, an optional reference or array that the configuration guarantees not to be None."""
    assert value is not None
    return value
