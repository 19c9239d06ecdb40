"""The array annotations of the core: jaxtyping's where it is installed.

The annotations document shapes and are executed by the tests; the code itself never needs them,
so the core and the models also import where only jax, flax and numpy are present.
"""

from typing import Any

try:
    from jaxtyping import Array, Bool, Float, Int
except ModuleNotFoundError:
    from jax import Array

    Bool = Float = Int = Any  # type: ignore[assignment]

__all__ = ["Array", "Bool", "Float", "Int"]
