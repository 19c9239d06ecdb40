"""Datasets prepared by tensorflow-datasets, read by name and split from TFRecord or ArrayRecord files.

Images stay encoded until they are preprocessed. Nothing is downloaded or generated.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from input_pipeline import stores
from input_pipeline.errors import InputError, MissingDataError, library_errors
from input_pipeline.files import expand, store_errors
from input_pipeline.optional import require
from input_pipeline.source import Example
from input_pipeline.tfrecord import Records, Shard, open_files

NAME = re.compile(r"\w[\w-]*(/\w[\w.-]*)?")
VERSION = re.compile(r"\d+\.\d+\.\d+")
TRUSTED_MODULES = "tensorflow_datasets."
MANUAL_DOWNLOADS = {
    "imagenet2012": "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, unextracted,",
    "imagenet2012_real": "ILSVRC2012_img_val.tar, unextracted,",
}


class Source(Records):
    """One split of a dataset that tensorflow-datasets has prepared.

    An example has the dataset's features, such as `image` (the bytes of a JPEG), `label` and `file_name`.
    """

    def __init__(self, name: str, split: str, data_dir: str | None = None):
        """
        Args:
          name: such as "imagenet2012", "imagenet2012:5.1.0" or "imagenet_v2/matched-frequency"; by default the newest
            prepared version.
          split: such as "train" or "train[:99%]".
          data_dir: folder of all datasets; by default $TFDS_DATA_DIR or ~/tensorflow_datasets.

        Raises:
          MissingDataError: the dataset is not prepared; the message contains the command that prepares it.
          InputError: the split is unknown, a file is damaged, or a file contradicts dataset_info.json.
        """
        tfds = require("tensorflow_datasets")
        root = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
        if "://" in root:
            stores.check_readable(root)
        folder = find_dataset(name, root.rstrip("/") if "://" in root else str(expand(root)))
        with library_errors(f"{folder} is damaged, prepare it again"), _descriptions(folder) as local:
            _check_features(folder, Path(local))
            info = tfds.builder_from_directory(local).info
        try:
            chosen = info.splits[split]
        except (KeyError, ValueError, AssertionError):
            known = ", ".join(f"{known} ({s.num_examples:,})" for known, s in info.splits.items())
            raise InputError(f"{folder}: no split {split!r}; known: {known}") from None
        self.features = info.features
        labels = (self.features[key] for key in ("label", "original_label") if key in self.features)
        self.class_names: tuple[str, ...] | None = next(
            (tuple(label.names) for label in labels if getattr(label, "names", None)), None
        )
        super().__init__(
            _open_shards(folder, local, chosen.file_instructions) if chosen.num_examples > 0 else [], folder
        )
        self.decoders = {
            key: tfds.decode.SkipDecoding()
            for key, feature in self.features.items()
            if isinstance(feature, tfds.features.Image)
        }

    def __getitem__(self, index: int) -> Example:
        record = self.read(index)
        with library_errors("the record does not match features.json"):
            example: Example = self.features.deserialize_example_np(record, decoders=self.decoders)
        return example


def find_dataset(name: str, root: str) -> str:
    """Return the folder root/NAME[/CONFIG]/VERSION of a prepared dataset.

    Args:
      name: NAME, NAME/CONFIG, or either followed by :VERSION; by default the newest version.
      root: folder of all datasets.

    Raises:
      MissingDataError: the dataset is not prepared; the message contains the command that prepares it.
      InputError: the name is invalid, or the dataset has several configs and the name contains none.
    """
    base, _, version = name.partition(":")
    if not NAME.fullmatch(base):
        raise InputError(f"{name!r} is not a dataset name; expected name, name/config or name:version")
    folder = f"{root}/{base}"
    inside = _subfolders(folder)
    versions = [v for v in inside if VERSION.fullmatch(v)]
    configs = [c for c in inside if not versions and not c.startswith((".", "incomplete"))]
    if len(configs) == 1:
        return find_dataset(f"{base}/{configs[0]}:{version}" if version else f"{base}/{configs[0]}", root)
    ready = [v for v in versions if _is_regular(f"{folder}/{v}/dataset_info.json") and version in ("", v)]
    if ready:
        return f"{folder}/{max(ready, key=lambda v: tuple(map(int, v.split('.'))))}"
    if configs:
        raise InputError(f"{folder} has several configs, name one: {', '.join(f'{base}/{c}' for c in configs)}")
    dataset = base.partition("/")[0]
    manual = MANUAL_DOWNLOADS.get(dataset)
    download = f"put {manual} in {root}/downloads/manual and then " if manual else ""
    existing = f"; existing versions: {', '.join(versions)}" if versions else ""
    prepare = f"tfds.builder({dataset!r}, data_dir={root!r}).download_and_prepare()"
    raise MissingDataError(
        f"no prepared dataset {name!r} in {root}{existing}; {download}run: "
        f'python -c "import tensorflow_datasets as tfds; {prepare}"'
    )


def _subfolders(folder: str) -> list[str]:
    """Return the names of the folders in a folder, which may be missing, sorted."""
    if "://" not in folder:
        return sorted(p.name for p in Path(folder).iterdir() if p.is_dir()) if Path(folder).is_dir() else []
    with store_errors(folder):
        try:
            entries = stores.filesystem(folder).ls(folder, detail=True)
        except FileNotFoundError:
            return []
    names = {PurePath(entry["name"]).name for entry in entries if entry["type"] == "directory"}
    return sorted(names - {PurePath(folder).name})  # some stores list an empty object of the folder, too


def _is_regular(path: str) -> bool:
    """Return True if a file exists and can be read; False for a local pipe, because reading it could block."""
    if "://" not in path:
        return Path(path).is_file()
    with store_errors(path):
        return bool(stores.filesystem(path).isfile(path))


@contextlib.contextmanager
def _descriptions(folder: str) -> Iterator[str]:
    """Yield a local folder with the files that describe a dataset: its folder, or copies of those in a store."""
    if "://" not in folder:
        yield folder
        return
    with tempfile.TemporaryDirectory() as local:
        with store_errors(folder):
            store = stores.filesystem(folder)
            for path in store.ls(folder, detail=False):
                if path.endswith((".json", ".txt")):
                    store.get_file(path, f"{local}/{PurePath(path).name}")
        yield local


def _check_features(folder: str, local: Path) -> None:
    """Raise InputError if a feature class is not from tensorflow-datasets, which would import its module by name.

    `folder` is that of the dataset, for messages, and `local` the one with its descriptions.
    """
    file = local / "features.json"
    if not file.is_file():
        raise FileNotFoundError(f"no regular file {file.name}")
    inside = [json.loads(file.read_bytes())]
    while inside:
        part = inside.pop()
        if isinstance(part, dict):
            named = [part[key] for key in ("pythonClassName", "python_class_name", "type") if key in part]
            for name in named:
                if isinstance(name, str) and "." in name and not name.startswith(TRUSTED_MODULES):
                    raise InputError(f"{folder}/features.json: {name} is not a feature of tensorflow-datasets")
        inside += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _open_shards(folder: str, local: str, instructions: Sequence[Any]) -> list[Shard]:
    """Open the files of a split, and check that each has the number of records that dataset_info.json gives.

    `instructions` are the `file_instructions` of the split, whose file names are in the folder `local`.
    """
    shards = []
    files = open_files(f"{folder}/{os.path.relpath(i.filename, local)}" for i in instructions)
    for file, instruction in zip(files, instructions, strict=True):
        if len(file) != instruction.examples_in_shard:
            raise InputError(
                f"{file.path} has {len(file)} records, but its dataset_info.json says {instruction.examples_in_shard}; "
                "copy or prepare it again"
            )
        take = len(file) - instruction.skip if instruction.take == -1 else instruction.take
        shards.append(Shard(file, instruction.skip, take))
    return shards
