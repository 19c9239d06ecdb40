"""A folder of image files, one folder a class: DATA_DIR/{train,val}/CLASS/*.jpg, or DATA_DIR/CLASS/*.jpg."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from input_pipeline.errors import InputError, MissingDataError, nearest
from input_pipeline.order import permutation

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
SPLIT_SEED = 0


class Source:
    """The image files of one split; an example is `image` (the bytes of the file) and `label` (int32).

    Classes are numbered in the order of their names. Files of other kinds, and hidden ones, are passed over.
    """

    class_names: tuple[str, ...]

    def __init__(
        self, data_dir: str, split: str = "train", val_fraction: float | None = None, classes_from: str | None = None
    ):
        """
        Args:
          data_dir: holds a folder for each split; or, with `val_fraction`, a folder for each class.
          split: the name of a folder; with `val_fraction`, "train" or "val".
          val_fraction: the share of each class that makes up "val", at least one image of it; which images these
            are follows from the names of the class's files alone.
          classes_from: the folder whose folders are the classes, where labels are to be numbered as there and not
            every class need be present, as with ImageNet-A; by default DATA_DIR/train where there is one.

        Raises:
          MissingDataError: no such folder.
          InputError: an empty class, a class that the training data lacks, a fraction without sense.
        """
        root = Path(data_dir).expanduser()
        if not root.is_dir():
            raise MissingDataError(f"no folder {root}")
        if val_fraction is not None and not 0 < val_fraction < 1:
            raise InputError(f"val_fraction={val_fraction} should be between 0 and 1")
        if val_fraction is not None and split not in ("train", "val"):
            raise InputError(f"no split {split!r} of {root} with val_fraction; {nearest(split, ('train', 'val'))}")
        folder = root if val_fraction is not None else root / split
        if not folder.is_dir():
            inside = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
            raise MissingDataError(
                f"no folder {folder} (there: {', '.join(inside[:10]) or 'none'}); or give val_fraction"
            )
        named = Path(classes_from).expanduser() if classes_from else root / "train"
        if (val_fraction is not None and not classes_from) or not named.is_dir():
            named = folder
        self.class_names = tuple(_folders(named))
        self.files: list[str] = []  # of a million files, a Path each would weigh
        labels: list[int] = []
        for name in _folders(folder):
            if name not in self.class_names:
                raise InputError(f"class {name!r} of {folder} is not among the {len(self.class_names)} of {named}")
            files = _images(folder / name)
            if val_fraction is not None:
                held_out = max(1, round(val_fraction * len(files)))
                order = permutation(len(files), SPLIT_SEED, 0)
                chosen = np.sort(order[:held_out] if split == "val" else order[held_out:])
                if not len(chosen):
                    raise InputError(f"{folder / name} has {len(files)} image(s), too few for train and val")
                files = [files[i] for i in chosen]
            self.files += files
            labels += [self.class_names.index(name)] * len(files)
        self.labels = np.array(labels, np.int32)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return {"image": Path(self.files[index]).read_bytes(), "label": self.labels[index]}
        except OSError as e:
            raise InputError(e.strerror) from None

    def describe(self, index: int) -> str:
        """The file of an example."""
        return self.files[index]

    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(Path(file).stat().st_size for file in self.files)


def _folders(folder: Path) -> list[str]:
    """The classes in a folder, sorted."""
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise InputError(f"{folder} holds no class folders")
    return names


def _images(folder: Path) -> list[str]:
    """The image files of a class, folders inside it included, sorted. Raises InputError for none."""
    files = [
        str(Path(inside, name))
        for inside, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    ]
    if not files:
        raise InputError(f"class folder {folder} holds no images ({', '.join(SUFFIXES)})")
    return sorted(files)
