"""Places of images, cut into different numbers of patches, in packed rows of tokens (NaViT; Dehghani et al., 2023)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SPREAD = 4  # a row has room for this multiple of the mean number of images in a row


class Packing(NamedTuple):
    """The rows that a batch of images of different sizes fills: each group of images is packed into its own rows.

    Fields:
      images: number of consecutive images of a batch that form a group.
      rows: number of rows of a group.
      tokens: number of tokens of a row.
    """

    images: int
    rows: int
    tokens: int

    def most(self) -> int:
        """Return the largest number of images in a row."""
        return min(self.images, SPREAD * math.ceil(self.images / self.rows))


def place(sizes: Sequence[int], packing: Packing) -> np.ndarray:
    """Return the place of each image of a batch in the rows of its group, which is packed by itself, int32 of (B, 4).

    The columns are the row; the first token of the image in the row; the number of images before it in the row; and the
    number of its tokens that the row holds. The images with most tokens come first, and an image goes to the first row
    that has room for it (first-fit decreasing). If not all images of a group find room, no image keeps more than c
    tokens, where c is the largest number, found by bisection, with which all do; so only the longest lose tokens.

    Args:
      sizes: number of tokens of each image, at most `packing.tokens`; complete groups.
      packing: the rows.
    """
    starts = range(0, len(sizes), packing.images)
    return np.concatenate([_place_group(sizes[at : at + packing.images], packing) for at in starts])


def _place_group(sizes: Sequence[int], packing: Packing) -> np.ndarray:
    """Return the places of the images of one group."""
    places = _first_fit(sizes, packing)
    if places is None:
        fits, fails = packing.tokens // math.ceil(packing.images / packing.rows), max(sizes)
        places = _first_fit([min(size, fits) for size in sizes], packing)
        while fails - fits > 1:
            middle = (fits + fails) // 2
            found = _first_fit([min(size, middle) for size in sizes], packing)
            if found is None:
                fails = middle
            else:
                places, fits = found, middle
    assert places is not None  # equal images of `fits` tokens fill every row with as many as a row needs to hold
    return places


def _first_fit(sizes: Sequence[int], packing: Packing) -> np.ndarray | None:
    """Return the places of the images of a group, which keep all their tokens; None if one of them finds no room."""
    starts, counts = [0] * packing.rows, [0] * packing.rows
    places = np.zeros((len(sizes), 4), np.int32)
    for image in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[image]
        room = (r for r in range(packing.rows) if starts[r] + size <= packing.tokens and counts[r] < packing.most())
        row = next(room, None)
        if row is None:
            return None
        places[image] = row, starts[row], counts[row], size
        starts[row] += size
        counts[row] += 1
    return places
