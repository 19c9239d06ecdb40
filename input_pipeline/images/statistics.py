"""Mean, standard deviation and range of each channel of a set of images."""

from __future__ import annotations

from collections.abc import Sequence
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

    All sums are float64. Two sets of n and m pixels, with a difference d of their means, are merged as by Chan et al.
    (1983), so that nothing cancels: their sums S of squared distances from the mean become S_n + S_m + d²·n·m/(n + m).
    """

    def __init__(self) -> None:
        """Start without images."""
        self.count = 0
        self.means = self.squares = self.least = self.most = np.zeros(0)  # of each channel; `squares` are the S above

    def add(self, image: Num[np.ndarray, "height width channels"]) -> None:
        """Add the pixels of an image. Raises InputError if it has other channels than those before."""
        pixels = image.reshape(-1, image.shape[-1])
        other = Statistics()
        other.count = len(pixels)
        other.means = np.array([channel.mean(dtype=np.float64) for channel in pixels.T])
        other.squares = np.array([channel.var(dtype=np.float64) for channel in pixels.T]) * len(pixels)
        other.least, other.most = pixels.min(axis=0), pixels.max(axis=0)
        self.update(other)

    def update(self, other: Statistics) -> None:
        """Add the images of another accumulator. Raises InputError if they have other channels."""
        if not other.count:
            return
        if not self.count:
            self.count, self.means, self.squares = other.count, other.means, other.squares
            self.least, self.most = other.least, other.most
            return
        if len(other.means) != len(self.means):
            raise InputError(f"the image has {len(other.means)} channels, others {len(self.means)}")
        total, apart = self.count + other.count, other.means - self.means
        self.means = self.means + apart * (other.count / total)
        self.squares = self.squares + other.squares + apart**2 * (self.count * other.count / total)
        self.least, self.most = np.minimum(self.least, other.least), np.maximum(self.most, other.most)
        self.count = total

    def channels(self) -> list[Channel]:
        """Return the statistics of each channel; empty without images."""
        stds = np.sqrt(self.squares / max(1, self.count))
        return [Channel(*map(float, found)) for found in zip(self.means, stds, self.least, self.most, strict=True)]


def value_range(channels: Sequence[Channel]) -> str:
    """Return the op `vgg_value_range` with mean and standard deviation, or 1 where that is 0, to seven digits."""
    means = tuple(float(f"{channel.mean:.7g}") for channel in channels)
    stds = tuple(float(f"{channel.std or 1:.7g}") for channel in channels)
    return f"vgg_value_range({means}, {stds})"
