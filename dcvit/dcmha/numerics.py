"""Constants and small functions that several implementations of attention share."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dcvit.dcmha import device
from dcvit.dcmha.shapes import Array, Float

LOG2_E = math.log2(math.e)  # the fused kernels compute softmax in base 2: exp(x) = 2^(x·log2(e))
MASKED_SCORE = -1e30  # the score of a masked key: finite, and 2^MASKED_SCORE is 0 in float32


def statistics_dtype(dtype: DTypeLike) -> np.dtype[np.floating]:
    """Return the dtype of softmax and norm statistics: float64 for float64 inputs, float32 for all others."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def is_float(x: Array | np.ndarray | jax.ShapeDtypeStruct) -> bool:
    """Return True if an array has floating-point numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def cdiv(size: int, block: int) -> int:
    """Return `size / block`, rounded up."""
    return -(-size // block)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return cdiv(size, multiple) * multiple


def pad(x: Array, axis: int, size: int) -> Array:
    """Return `x` with zeros appended to an axis, so that it has length `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def product(
    x: Float[Array, "*B M"],
    kernel: Float[Array, "M N"],
    *,
    precision: jax.lax.PrecisionLike = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*B N"]:
    """Return x·kernel, with sums and result in `dtype`, by default that of the factors.

    On a CPU, the leading axes are one axis: XLA would transpose the gradients of a result with several ones to compute
    that of the kernel, which then takes 1.05 to 2.0 times as long.
    """
    rows = x if device.platform() != "cpu" or device.splits_arrays() else x.reshape(-1, x.shape[-1])
    out = jnp.matmul(rows, kernel, precision=precision, preferred_element_type=dtype)
    return out.reshape(*x.shape[:-1], -1)


def total(terms: Sequence[Array | int]) -> Array:
    """Return the sum of a non-empty sequence, added from left to right."""
    return functools.reduce(jnp.add, terms)  # type: ignore[return-value]
