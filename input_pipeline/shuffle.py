"""Shuffling as a pure function of (seed, epoch, position), so that a stream can start at any step.

The permutations use the raw bits of Philox, a counter-based generator (Salmon et al., 2011), which are the same on
every machine and in every version of numpy.
"""

import functools
import itertools
from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

Draw = Callable[[int], int]  # from n to a random number below n
EXAMPLE_STREAM = 1 << 63  # second key word of per-example generators; permutations use the epoch, which is smaller


@functools.lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> Int64[np.ndarray, "{size}"]:
    """Return the order of the examples in one epoch, a permutation of 0 … size-1."""
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    order = np.argsort(bits, kind="stable")
    order.setflags(write=False)
    return order


def example_at(position: int, size: int, seed: int) -> tuple[int, int]:
    """Return (epoch, example index) at a position of the endless training stream over `size` examples."""
    epoch, offset = divmod(position, size)
    return epoch, int(permutation(size, seed, epoch)[offset])


def example_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the generator of all random choices about one example in one epoch."""
    key = np.array([seed, EXAMPLE_STREAM], np.uint64)
    counter = np.array([0, 0, index, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draws(seed: int, stream: int, index: int, count: int) -> Draw:
    """Return the random numbers of one generated example, from raw bits of Philox.

    Args:
      seed: seed of the data.
      stream: another number gives other examples, as for the splits of data.
      index: the example.
      count: how many bits are drawn at a time, which changes no number.
    """
    key, counter = np.array([seed, stream], np.uint64), np.array([0, 0, index, 0], np.uint64)
    generator = np.random.Philox(key=key, counter=counter)
    bits = itertools.chain.from_iterable(iter(lambda: generator.random_raw(count).tolist(), None))
    return lambda n: int(next(bits) % n)
