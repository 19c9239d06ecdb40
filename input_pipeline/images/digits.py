"""Embedded images: scikit-learn's copy of the UCI handwritten digits, 1,797 gray images of 8×8 pixels."""

import functools
import gzip

import numpy as np

from input_pipeline import source as base
from input_pipeline.errors import check_split
from input_pipeline.optional import folder_of
from input_pipeline.shuffle import permutation

SPLITS = {"train": slice(360, None), "test": slice(0, 360)}
SPLIT_SEED = 0


@functools.cache
def read_digits() -> np.ndarray:
    """Return the rows of scikit-learn's file, 64 pixels of 0 … 16 and the label. Its import would take seconds."""
    with gzip.open(folder_of("sklearn") / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        return np.loadtxt(file, delimiter=",")


class Source(base.Source):
    """Handwritten digits: 1,437 training and 360 test images.

    An example is `image` (uint8, 8×8×1) and `label` (int32, 0 … 9). The split does not depend on a run's seed.
    """

    class_names = tuple("0123456789")

    def __init__(self, split: str = "train"):
        """
        Args:
          split: "train" or "test".

        Raises:
          InputError: the split is unknown.
        """
        check_split("digits", split, SPLITS)
        self.split = split
        rows = read_digits()
        chosen = rows[permutation(len(rows), SPLIT_SEED, 0)[SPLITS[split]]]
        self.images: np.ndarray = np.rint(chosen[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
        self.labels: np.ndarray = chosen[:, -1].astype(np.int32)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> base.Example:
        return {"image": self.images[index], "label": self.labels[index]}

    def describe(self, index: int) -> str:
        """Return the split and the number of an example."""
        return f"digits, split {self.split}, example {index}"

    def nbytes(self) -> int:
        """Return the size of all images in bytes."""
        return self.images.nbytes
