"""Mean, standard deviation and range of each channel of a set of images."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Num

from input_pipeline.errors import InputError


class Channel(NamedTuple):
    """Statistics of all pixels of one channel; `std` is that of the population, with the divisor n."""

    mean: float
    std: float
    min: float
    max: float


class Statistics:
    """Accumulator of the statistics of images.

    An image contributes n pixels of mean m and variance v, each computed in float64 in two passes. The images are
    merged as by Chan et al. (1983), with N = Σ n and M = Σ n m / N:

      std² = (Σ n v + Σ n m²) / N - M²

    in exact rational arithmetic, so that nothing cancels, and the result is the same in any order, bit for bit.
    """

    def __init__(self) -> None:
        """Start without images."""
        self.count = 0
        self.sums: np.ndarray | None = None  # Σ n m, Σ n m², Σ n v of each channel, `Fraction`s
        self.least = self.most = np.zeros(0)

    def add(self, image: Num[np.ndarray, "height width channels"]) -> None:
        """Add the pixels of an image. Raises InputError if it has other channels than those before."""
        pixels = image.reshape(-1, image.shape[-1])
        n = len(pixels)
        moments = [(Fraction(float(c.mean(dtype=np.float64))), float(c.var(dtype=np.float64))) for c in pixels.T]
        sums = np.array([(n * m, n * m * m, n * Fraction(v)) for m, v in moments], object)
        self._merge(n, sums, pixels.min(axis=0), pixels.max(axis=0))

    def update(self, other: Statistics) -> None:
        """Add the images of another accumulator. Raises InputError if they have other channels."""
        if other.sums is not None:
            self._merge(other.count, other.sums, other.least, other.most)

    def _merge(self, count: int, sums: np.ndarray, least: np.ndarray, most: np.ndarray) -> None:
        if self.sums is None:
            self.count, self.sums, self.least, self.most = count, sums, least, most
            return
        if sums.shape != self.sums.shape:
            raise InputError(f"the image has {len(sums)} channels, others {len(self.sums)}")
        self.count, self.sums = self.count + count, self.sums + sums
        self.least, self.most = np.minimum(self.least, least), np.maximum(self.most, most)

    def channels(self) -> list[Channel]:
        """Return the statistics of each channel; empty without images."""
        if self.sums is None:
            return []
        found = []
        for (total, squares, inside), least, most in zip(self.sums, self.least, self.most, strict=True):
            mean = total / self.count
            variance = (inside + squares) / self.count - mean * mean
            found.append(Channel(float(mean), float(variance) ** 0.5, float(least), float(most)))
        return found


def value_range(channels: Sequence[Channel]) -> str:
    """Return the op `vgg_value_range` with mean and standard deviation, or 1 where that is 0, to seven digits."""
    means = tuple(float(f"{channel.mean:.7g}") for channel in channels)
    stds = tuple(float(f"{channel.std or 1:.7g}") for channel in channels)
    return f"vgg_value_range({means}, {stds})"
