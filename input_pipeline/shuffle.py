"""Shuffling as a pure function of (seed, epoch, position), so that a stream can start at any step.

The permutations use the raw bits of Philox, a counter-based generator (Salmon et al., 2011), which are the same on
every machine and in every version of numpy.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Int64

Item = TypeVar("Item")
Draw = Callable[[int], int]  # from n to a random number below n
EXAMPLE_STREAM = 1 << 63  # second key word of per-example generators; permutations use the epoch, which is smaller


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of consecutive examples that are read together, such as the row groups of a Parquet file.

    `sizes` has the number of examples of each block. Training shuffles all blocks, and the examples within `window`
    examples; see `permutation`.
    """

    sizes: Int64[np.ndarray, "blocks"]
    window: int

    def part(self, examples: range | np.ndarray) -> "Blocks":
        """Return the blocks of some of the examples, given by their increasing indices.

        Of a fold, which has some examples of every block, the window has as many examples less, so that it covers as
        many blocks as before.
        """
        sizes = np.diff(np.searchsorted(np.asarray(examples), np.cumsum(self.sizes)), prepend=0)
        between = int(examples[-1]) - int(examples[0]) + 1
        return Blocks(sizes[sizes > 0], max(1, self.window * len(examples) // between))


@functools.lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int, blocks: Blocks | None = None) -> Int64[np.ndarray, "{size}"]:
    """Return the order of the examples in one epoch, a permutation of 0 … size-1.

    With blocks, the blocks are permuted first. Then the examples are sorted by random numbers: those of a block that
    starts at position s are uniform between s and s + window. A reader that keeps about `window` examples therefore
    reads each block once per epoch. A window of `size` or more gives the order without blocks.
    """
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    keys = generator.random_raw(size)
    if blocks is not None and blocks.window < size:
        order = np.argsort(generator.random_raw(len(blocks.sizes)), kind="stable")
        starts = np.empty(len(order), np.uint64)
        starts[order] = np.cumsum(blocks.sizes[order]) - blocks.sizes[order]
        keys = (np.repeat(starts, blocks.sizes) << 32) + (keys >> 32) * np.uint64(blocks.window)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order


def example_at(position: int, size: int, seed: int, blocks: Blocks | None = None) -> tuple[int, int]:
    """Return (epoch, example index) at a position of the endless training stream over `size` examples."""
    epoch, offset = divmod(position, size)
    return epoch, int(permutation(size, seed, epoch, blocks)[offset])


def example_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the generator of all random choices about one example in one epoch."""
    key = np.array([seed, EXAMPLE_STREAM], np.uint64)
    counter = np.array([0, 0, index, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draws(seed: int, stream: int, index: int, count: int) -> Draw:
    """Return the function of a generated example that draws random integers: for n, an integer from 0 to n - 1.

    Args:
      seed: seed of the data.
      stream: number of an independent stream, such as one for each split.
      index: the index of the example.
      count: size of the internal buffer; it does not change the numbers.
    """
    key, counter = np.array([seed, stream], np.uint64), np.array([0, 0, index, 0], np.uint64)
    generator = np.random.Philox(key=key, counter=counter)
    bits = itertools.chain.from_iterable(iter(lambda: generator.random_raw(count).tolist(), None))
    return lambda n: int(next(bits) % n)


def take(items: Sequence[Item], count: int, draw: Draw) -> list[Item]:
    """Return `count` different items in random order, drawn with the random integers of `draw`."""
    rest = list(items)
    return [rest.pop(draw(len(rest))) for _ in range(count)]
