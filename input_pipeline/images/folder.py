"""A folder of image files, one folder a class: DATA_DIR/{train,val}/CLASS/*.jpg, or DATA_DIR/CLASS/*.jpg."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from input_pipeline.errors import InputError, MissingDataError, ReadingError, nearest

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
MOST_BYTES = 1 << 30  # of a file: one of MAX_PIXELS with 6 bytes a pixel, the most there is, stored plainly
SPLITS = {"train", "val", "test", "validation"}


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
        folder = root if val_fraction is not None else root / split
        if val_fraction is not None and not 0 < val_fraction < 1:
            raise InputError(f"val_fraction={val_fraction} should be between 0 and 1")
        if val_fraction is not None and split not in ("train", "val"):
            raise InputError(f"no split {split!r} of {root} with val_fraction; {nearest(split, ('train', 'val'))}")
        if classes_from is not None:
            named = Path(classes_from).expanduser()
        else:
            named = root / "train" if val_fraction is None and (root / "train").is_dir() else folder
        self.class_names = tuple(_folders(named))
        if val_fraction is not None and set(self.class_names) <= SPLITS:
            raise InputError(f"{root} holds the folders {', '.join(self.class_names)}: take away val_fraction")
        self.files: list[str] = []  # of a million files, a Path each would weigh
        labels: list[int] = []
        for name in self.class_names if folder == named else _folders(folder):
            if name not in self.class_names:
                raise InputError(f"class {name!r} of {folder} is not among the {len(self.class_names)} of {named}")
            files = _images(folder / name)
            if val_fraction is not None:
                files = _part(files, split, val_fraction, root)
            self.files += files
            labels += [self.class_names.index(name)] * len(files)
        self.labels = np.array(labels, np.int32)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            with Path(self.files[index]).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > MOST_BYTES:
                    raise InputError(f"{size:,} bytes are no image; the largest has {MOST_BYTES:,}")
                return {"image": file.read(), "label": self.labels[index]}
        except OSError as e:
            raise ReadingError(e.strerror) from None

    def describe(self, index: int) -> str:
        """The file of an example."""
        return self.files[index]

    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(Path(file).stat().st_size for file in self.files)


def _folders(folder: Path) -> list[str]:
    """The classes in a folder, sorted. Raises MissingDataError where there is no folder, InputError for no class."""
    if not folder.is_dir():
        above = folder.parent
        inside = sorted(p.name for p in above.iterdir() if not p.name.startswith(".")) if above.is_dir() else []
        raise MissingDataError(f"no folder {folder} (beside it: {', '.join(inside[:10]) or 'nothing'})")
    try:
        names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as e:
        raise InputError(f"cannot read {folder}: {e.strerror}") from None
    if not names:
        raise InputError(f"{folder} holds no class folders")
    return names


def _images(folder: Path) -> list[str]:
    """The image files of a class, folders inside it included, sorted. Raises InputError for none."""

    def walk(inside: str) -> Iterator[str]:
        with os.scandir(inside) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from walk(entry.path)
                elif entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                    yield entry.path

    try:
        files = sorted(walk(str(folder)))
    except OSError as e:
        raise InputError(f"cannot read {e.filename}: {e.strerror}") from None
    if not files:
        raise InputError(f"class folder {folder} holds no images ({', '.join(SUFFIXES)})")
    return files


def _part(files: list[str], split: str, val_fraction: float, root: Path) -> list[str]:
    """The files of a class that are in a split: in "val" those whose names have the smallest hashes, so that files
    which are added or taken away later hardly change on which side the others are."""
    ranked = sorted(files, key=lambda file: hashlib.sha256(os.path.relpath(file, root).encode()).digest())
    held_out = max(1, round(val_fraction * len(files)))
    if held_out == len(files):
        raise InputError(f"{Path(files[0]).parent} has {len(files)} image(s), too few for train and val")
    return sorted(ranked[:held_out] if split == "val" else ranked[held_out:])
