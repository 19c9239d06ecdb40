"""Which example stands where: a pure function of (seed, epoch, position), so any step can be the first.

Built on Philox, a counter-based generator (Salmon et al., 2011), read as raw bits: the same on every
machine and for every numpy version.
"""

import functools

import numpy as np

EXAMPLE_STREAM = 1 << 63  # the second key word of per-example streams; epochs, far smaller, key the orders


@functools.lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: a permutation of 0 … size-1, int64 of shape (size,)."""
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    order = np.argsort(bits, kind="stable")
    order.setflags(write=False)
    return order


def example_at(position: int, size: int, seed: int) -> tuple[int, int]:
    """(epoch, example index) at a position of the endless training stream."""
    epoch, offset = divmod(position, size)
    return epoch, int(permutation(size, seed, epoch)[offset])


def example_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator behind every random choice about one example in one epoch."""
    key = np.array([seed, EXAMPLE_STREAM], np.uint64)
    counter = np.array([0, 0, index, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
