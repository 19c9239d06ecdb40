"""Image files with one folder per class: DATA_DIR/{train,val}/CLASS/*.jpg or DATA_DIR/CLASS/*.jpg."""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from input_pipeline import source as base
from input_pipeline.errors import InputError, MissingDataError, nearest
from input_pipeline.files import OpenedFiles, expand, files_below, named_errors

logger = logging.getLogger(__name__)

# The suffixes of files that `decode` reads.
SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".npy")
SPLITS = {"train", "val", "test", "validation"}


class Source(base.Source):
    """Image files of one split. An example is `image` (the bytes of the file) and `label` (int32).

    Classes are numbered in the order of their names. Hidden files and files with other suffixes are skipped. The log
    has the numbers of skipped files, images and classes, and the smallest and the largest class.
    """

    class_names: tuple[str, ...]
    labels: np.ndarray
    opened: OpenedFiles

    def __init__(
        self,
        data_dir: str,
        split: str | None = "train",
        val_fraction: float | None = None,
        classes_from: str | None = None,
    ):
        """
        Args:
          data_dir: folder that contains one folder per split, or, with `val_fraction`, one folder per class.
          split: name of the split's folder; with `val_fraction`, "train" or "val". None: the folder train if there is
            one, or else all images of the class folders in DATA_DIR.
          val_fraction: fraction of each class that is in the split "val", at least one image. The images are chosen by
            a hash of their names.
          classes_from: folder whose subfolders define the class numbers; by default DATA_DIR/train if it exists. Set
            it for a dataset that has only some of the classes, such as ImageNet-A.

        Raises:
          MissingDataError: a folder does not exist.
          InputError: a class has no images or is missing in the training data, or the fraction is invalid.
        """
        root = expand(data_dir)
        if split is None and (root / "train").is_dir():
            split = _split_train(root)
        folder = root if val_fraction is not None or split is None else root / split
        if val_fraction is not None:
            _check_fraction(val_fraction, split, root)
        if classes_from is not None:
            class_folder = expand(classes_from)
        else:
            has_train = val_fraction is None and split is not None and (root / "train").is_dir()
            class_folder = root / "train" if has_train else folder
        self.class_names = tuple(_class_folders(class_folder))
        if folder == root and set(self.class_names) <= SPLITS:
            hint = "give split" if split is None else "omit val_fraction"
            raise InputError(f"{root} has the folders {', '.join(self.class_names)}, which are splits: {hint}")
        self.files: list[str] = []  # strings, because a million Path objects need much more memory
        labels: list[int] = []
        skipped = Counter({"beside the class folders": sum(entry.is_file() for entry in folder.glob("[!.]*"))})
        for name in self.class_names if folder == class_folder else _class_folders(folder):
            if name not in self.class_names:
                raise InputError(
                    f"class {name!r} of {folder} is not among the {len(self.class_names)} classes of {class_folder}"
                )
            files = image_files(folder / name, skipped)
            if not files:
                inside = Counter[str]()
                image_files(folder / name, inside)
                raise InputError(
                    f"class folder {folder / name} holds no images ({', '.join(SUFFIXES)}){describe_skipped(inside)}"
                )
            if val_fraction is not None:
                files = _split_files(files, val_fraction, root, held_out=split == "val")
            self.files += files
            labels += [self.class_names.index(name)] * len(files)
        self.labels = np.array(labels, np.int32)
        self.opened = OpenedFiles(self.files, folder)
        place = str(folder) if val_fraction is None else f"{folder}, {split}"
        counts = np.bincount(self.labels, minlength=len(self.class_names))
        logger.info("%s: %s%s", place, describe_classes(len(self), counts, self.class_names), describe_skipped(skipped))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> base.Example:
        return {"image": self.opened.read(index), "label": self.labels[index]}

    def describe(self, index: int) -> str:
        """Return the file of an example."""
        return self.files[index]

    def name(self, index: int) -> str:
        """Return the path of an example relative to the folder of its split."""
        return self.opened.name(index)


def describe_classes(images: int, counts: np.ndarray, names: Sequence[str]) -> str:
    """Return a text with the numbers of images and classes, and of images in the smallest and the largest class.

    Args:
      images: number of all images.
      counts: number of images of each class; classes without images are left out.
      names: names of the classes.
    """
    ranked = Counter({name: int(n) for name, n in zip(names, counts, strict=True) if n}).most_common()
    (largest, most), (smallest, least) = ranked[0], ranked[-1]
    spread = f"from {least:,} of {smallest!r} to {most:,} of {largest!r}"
    return f"{images:,} images of {len(ranked):,} classes, {spread if least < most else f'{most:,} of each'}"


def _split_train(root: Path) -> str | None:
    """Return "train" if ROOT/train is a split, and None if it is a class; raise InputError if it may be both."""
    others = [name for name in _class_folders(root) if name not in SPLITS]
    if not others:
        return "train"
    if any(path.is_dir() for path in (root / "train").iterdir()):
        raise InputError(f"{root}/train may be a split, or a class beside {others[0]}: give split, or rename it")
    return None


def _class_folders(folder: Path) -> list[str]:
    """Return the sorted names of the class folders in a folder. Raises InputError if there are none."""
    if not folder.is_dir():
        parent = folder.parent
        names = sorted(p.name for p in parent.iterdir() if not p.name.startswith(".")) if parent.is_dir() else []
        classes = "; for a folder of classes, give val_fraction=0.1, or train with --folds 5"
        hint = classes if folder.name == "train" and names else ""
        raise MissingDataError(f"no folder {folder} (in {parent}: {', '.join(names[:10]) or 'nothing'}){hint}")
    with named_errors(folder):
        names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise InputError(f"{folder} holds no class folders, each with the images of one class")
    return names


def image_files(folder: str | Path, skipped: Counter[str]) -> list[str]:
    """Return the sorted image files in a folder and its subfolders.

    Args:
      folder: the folder.
      skipped: the number of other files of each suffix, to which those in the folder are added.
    """
    files = []
    for file in files_below(folder):
        if file.lower().endswith(SUFFIXES):
            files.append(file)
        else:
            skipped[Path(file).suffix.lower() or "without suffix"] += 1
    return sorted(files)


def describe_skipped(skipped: Counter[str]) -> str:
    """Return a text about skipped files, such as "; skipped 3 file(s): 2 .txt, 1 .pdf"; empty if there are none."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in skipped.most_common(10) if count)
    return f"; skipped {skipped.total():,} file(s): {kinds}" if kinds else ""


def _check_fraction(val_fraction: float, split: str | None, root: Path) -> None:
    """Raise InputError if `val_fraction` is no fraction, or makes no split of this name."""
    if not 0 < val_fraction < 1:
        raise InputError(f"val_fraction={val_fraction} should be between 0 and 1")
    if split not in ("train", "val"):
        raise InputError(f"no split {split!r} of {root} with val_fraction; {nearest(str(split), ('train', 'val'))}")


def _split_files(files: list[str], val_fraction: float, root: Path, *, held_out: bool) -> list[str]:
    """Return the files of a class that are in the split "val" if `held_out`, or else those in "train".

    The files with the smallest hashes of their names are in "val", so that adding or removing a file moves at most a
    few other files to the other split.
    """
    ranked = sorted(files, key=lambda file: hashlib.sha256(os.fsencode(os.path.relpath(file, root))).digest())
    count = max(1, round(val_fraction * len(files)))
    if count == len(files):
        raise InputError(
            f"{Path(files[0]).parent} has {len(files)} image(s), too few for train and val: add images or omit it"
        )
    return sorted(ranked[:count] if held_out else ranked[count:])


def find_images(paths: Sequence[Path], on_error: Callable[[str], None]) -> list[Path]:
    """Return the given files, and the image files below the given folders in sorted order, as training finds them.

    The number of other files in the folders is logged.

    Args:
      paths: files and folders.
      on_error: called with one line for each folder without image files, if other paths give files.

    Raises:
      InputError: folders are given and no path gives a file, or a folder cannot be read.
    """
    found: list[Path] = []
    empty: list[str] = []
    for path in paths:
        if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises errors, which reading the file will report
            found.append(path)
            continue
        skipped = Counter[str]()
        images = image_files(path, skipped)
        found += map(Path, images)
        if skipped:
            logger.info("%s: %s images%s", path, f"{len(images):,}", describe_skipped(skipped))
        if not images:
            empty.append(f"no image files ({', '.join(SUFFIXES)}) in {path}")
    if empty and not found:
        raise InputError("; ".join(empty))
    for line in empty:
        on_error(line)
    return found
