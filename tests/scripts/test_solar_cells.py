"""Class folders of photographs: classes by probability, and a split of every class."""

import re

import pytest
import solar_cells
from image_datasets import solar_cell_package
from PIL import Image

from input_pipeline.images.folder import Source


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Generated photographs in the layout of elpv-dataset."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return solar_cell_package(tmp_path, 40)


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["solar_cells.py", *map(str, words)])
    solar_cells.main()


def test_photographs_are_in_the_folders_of_their_class_and_split(package, tmp_path, monkeypatch, capsys):
    run(monkeypatch, tmp_path / "out", "--size", "24")
    train, val = (Source(str(tmp_path / "out"), split) for split in ("train", "val"))
    assert train.class_names == val.class_names == ("defective", "functional")
    assert len(train) + len(val) == 40
    assert 4 <= len(val) <= 16
    for source in (train, val):
        for path, label in zip(source.files, source.labels, strict=True):
            name = path.rpartition("/")[2]
            assert (package[name] > 0.5) == (source.class_names[label] == "defective")
            with Image.open(path) as image:
                assert (image.size, image.mode) == ((24, 24), "L")
    counts = {folder: int(n) for folder, n in re.findall(r"(\w+/\w+): (\d+)$", capsys.readouterr().out, re.MULTILINE)}
    assert sum(counts.values()) == 40
