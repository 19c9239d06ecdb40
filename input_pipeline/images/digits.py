"""The embedded images: scikit-learn's copy of the UCI handwritten digits, 1,797 grey images of 8×8 pixels."""

from typing import Any

import numpy as np

from input_pipeline.errors import InputError, nearest
from input_pipeline.shuffle import permutation

SPLITS = {"train": slice(360, None), "test": slice(0, 360)}
SPLIT_SEED = 0


class Source:
    """1,437 training and 360 test images; which is which is fixed, and independent of a run's seed.

    An example is `image` (uint8, 8×8×1) and `label` (int32, 0 … 9).
    """

    class_names = tuple("0123456789")

    def __init__(self, split: str = "train"):
        if split not in SPLITS:
            raise InputError(f"digits has no split {split!r}; {nearest(split, SPLITS)}")
        from sklearn.datasets import load_digits

        self.split = split
        data = load_digits()
        chosen = permutation(len(data.images), SPLIT_SEED, 0)[SPLITS[split]]
        self.images = np.rint(data.images[chosen] * (255 / 16)).astype(np.uint8)[..., None]
        self.labels = data.target[chosen].astype(np.int32)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "label": self.labels[index]}

    def describe(self, index: int) -> str:
        """Which example this is."""
        return f"digits, split {self.split}, example {index}"

    def nbytes(self) -> int:
        """Bytes of all images."""
        return self.images.nbytes
