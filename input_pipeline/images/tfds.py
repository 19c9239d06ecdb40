"""Datasets that tensorflow-datasets has prepared, by name and split, from TFRecord or ArrayRecord files.

Images stay encoded until preprocessing decodes them. What is prepared is read from its own folder; nothing is
downloaded or generated here.
"""

import bisect
import itertools
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from input_pipeline.errors import InputError, MissingDataError, first_line
from input_pipeline.optional import require
from input_pipeline.tfrecord import RecordFile, open_records

NAME = re.compile(r"\w[\w-]*(/\w[\w.-]*)?")
VERSION = re.compile(r"\d+\.\d+\.\d+")
OWN = "tensorflow_datasets."
MANUAL = {
    "imagenet2012": "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, unextracted,",
    "imagenet2012_real": "ILSVRC2012_img_val.tar, unextracted,",
}


class Source:
    """One split of a prepared dataset.

    An example is what the dataset's features say, such as `image` (the bytes of a JPEG), `label` and `file_name`.
    """

    def __init__(self, name: str, split: str, data_dir: str | None = None):
        """
        Args:
          name: "imagenet2012", "imagenet2012:5.1.0" or "imagenet_v2/matched-frequency"; the newest version there.
          split: such as "train[:99%]".
          data_dir: the folder of all datasets; by default $TFDS_DATA_DIR or ~/tensorflow_datasets.

        Raises:
          MissingDataError: the dataset was not prepared; the message says how to.
          InputError: no such split, or files that are damaged or do not hold what dataset_info.json says.
        """
        tfds = require("tensorflow_datasets")
        root = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
        folder = find(name, root if "://" in root else str(Path(root).expanduser()))
        try:
            _check_features(folder)
            info = tfds.builder_from_directory(folder).info
        except InputError:
            raise
        except Exception as e:  # whatever its files' parsers raise
            raise InputError(f"{folder} is damaged, prepare it again: {first_line(e)}") from None
        try:
            chosen = info.splits[split]
        except (KeyError, ValueError, AssertionError):
            known = ", ".join(f"{known} ({s.num_examples:,})" for known, s in info.splits.items())
            raise InputError(f"{folder}: no split {split!r}; known: {known}") from None
        self.features = info.features
        labels = (self.features[key] for key in ("label", "original_label") if key in self.features)
        self.class_names = next((tuple(label.names) for label in labels if getattr(label, "names", None)), None)
        self.parts = _open_parts(chosen.file_instructions) if chosen.num_examples > 0 else []
        self.ends = list(itertools.accumulate(take for _, _, take in self.parts))
        self.decoders = {
            key: tfds.decode.SkipDecoding()
            for key, feature in self.features.items()
            if isinstance(feature, tfds.features.Image)
        }

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, number = self._place(index)
        record = file.read(number)
        try:
            example: dict[str, Any] = self.features.deserialize_example_np(record, decoders=self.decoders)
        except Exception as e:
            raise InputError(f"the record is not what features.json says: {first_line(e)}") from None
        return example

    def describe(self, index: int) -> str:
        """Where an example lies: file and record."""
        file, number = self._place(index)
        return f"{file.path}, record {number}"

    def nbytes(self) -> int:
        """Bytes of all records of the split."""
        return sum(file.nbytes(skip, skip + take) for file, skip, take in self.parts)

    def _place(self, index: int) -> tuple[RecordFile, int]:
        part = bisect.bisect_right(self.ends, index)
        file, skip, take = self.parts[part]
        return file, skip + index - (self.ends[part] - take)


def find(name: str, root: str) -> str:
    """The folder root/NAME[/CONFIG]/VERSION of a dataset, of its newest version where none is named.

    Raises:
      MissingDataError: there is none; the message says how to prepare it.
    """
    base, _, version = name.partition(":")
    if not NAME.fullmatch(base):
        raise InputError(f"{name!r} is no name of a dataset; expected name, name/config or name:version")
    epath = require("etils.epath")
    folder = epath.Path(root) / base
    inside = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    versions = [v for v in inside if VERSION.fullmatch(v)]
    configs = [c for c in inside if not versions and not c.startswith((".", "incomplete"))]
    if len(configs) == 1:
        return find(f"{base}/{configs[0]}:{version}" if version else f"{base}/{configs[0]}", root)
    ready = [v for v in versions if (folder / v / "dataset_info.json").exists() and version in ("", v)]
    if ready:
        return str(folder / max(ready, key=lambda v: tuple(map(int, v.split(".")))))
    if configs:
        raise InputError(f"{folder} has several configs, name one: {', '.join(f'{base}/{c}' for c in configs)}")
    dataset = base.partition("/")[0]
    tars = f"put {MANUAL[dataset]} in {root}/downloads/manual and then " if dataset in MANUAL else ""
    there = f"; there: {', '.join(versions)}" if versions else ""
    raise MissingDataError(
        f"no prepared dataset {name!r} in {root}{there}; {tars}run: tfds build {dataset} --data_dir {root}"
    )


def _check_features(folder: str) -> None:
    """Raises InputError where a feature is of a class that is not tfds' own: its module would be imported by name."""
    inside = [json.loads((require("etils.epath").Path(folder) / "features.json").read_text())]
    while inside:
        part = inside.pop()
        if isinstance(part, dict):
            named = [part[key] for key in ("pythonClassName", "python_class_name", "type") if key in part]
            for name in named:
                if isinstance(name, str) and "." in name and not name.startswith(OWN):
                    raise InputError(f"{folder}/features.json: {name} is no feature of tensorflow-datasets' own")
        inside += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _open_parts(instructions: Sequence[Any]) -> list[tuple[RecordFile, int, int]]:
    """(file, records to skip, records to take) of each file of a split, their counts checked."""
    with ThreadPoolExecutor(16) as threads:  # a new TFRecord's offsets are found by reading it
        files = list(threads.map(open_records, (str(i.filename) for i in instructions)))
    parts = []
    for file, instruction in zip(files, instructions, strict=True):
        if len(file) != instruction.examples_in_shard:
            raise InputError(
                f"{file.path} holds {len(file)} records, its dataset_info.json says {instruction.examples_in_shard}; "
                "copy or prepare it again"
            )
        take = len(file) - instruction.skip if instruction.take == -1 else instruction.take
        parts.append((file, instruction.skip, take))
    return parts
