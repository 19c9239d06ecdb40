"""Ops that change one value of an example."""

import dataclasses
from collections.abc import Callable

import numpy as np

from input_pipeline.errors import ReadingError
from input_pipeline.source import Example


@dataclasses.dataclass(frozen=True)
class Change:
    """An op that applies `function(value, rng)` to the value of `inkey`, stores it as `outkey`, and keeps other keys.

    A preprocessing string gives the keys as additional arguments: `resize(8, inkey="image", outkey="small")`, or
    `key="mask"` for both.
    """

    function: Callable[..., np.ndarray]
    inkey: str = "image"
    outkey: str = "image"
    name: str = "op"  # in messages
    encoded: bool = False  # the value is the bytes of an image file instead of pixels

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        """Apply the op. Raises ReadingError if the value is not an image: the preprocessing string is wrong."""
        value = example[self.inkey]
        is_pixels = isinstance(value, np.ndarray) and value.ndim == 3 and value.dtype.kind in "uifb"
        if not (isinstance(value, bytes) if self.encoded else is_pixels):
            expected = "the bytes of an image file" if self.encoded else "pixels of shape (height, width, channels)"
            shape = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            raise ReadingError(f"{self.name}: {self.inkey!r} should be {expected}, found {shape}")
        return {**example, self.outkey: self.function(value, rng)}
