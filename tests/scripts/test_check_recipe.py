"""The check of the ImageNet recipe passes on a small data set, and fails if a simulation or a class differs."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import check_recipe
import recipe_data
from image_datasets import imagenet_a, label_file

WORDS = ["input.batch_size=8", "total_epochs=3", "schedule.warmup_steps=4", "model.depth=1"]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A folder for a data set of 41 small images in 4 shards."""
    pytest.importorskip("tensorflow_datasets")
    monkeypatch.setattr(recipe_data, "RECORDS", 41)
    monkeypatch.setattr(recipe_data, "SHARDS", 4)
    monkeypatch.setattr(recipe_data, "SIZES", {(40, 60): 0.5, (60, 40): 0.5})
    monkeypatch.setattr(check_recipe, "TIMED", 2)
    return tmp_path


def test_the_shards_are_those_of_imagenet():
    lengths = recipe_data.shard_lengths()
    assert (len(lengths), sum(lengths)) == (1024, 1_281_167)
    assert set(lengths) == {1251, 1252}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("library_promotion")
def test_all_checks_pass_and_report_every_figure(small):
    result = check_recipe.check(small, words=WORDS)
    assert (result["records"], result["total_steps"]) == (41 * 99 // 100 + 1, 15)
    assert result["checked_steps"] == [0, 1, 5, 7, 10, 14]
    assert result["checked_rows"] == 6 * 8
    assert 0 < result["clipped_steps"] < 15
    assert set(result["labels"].values()) == {"names"}
    assert [one["step"] for one in result["input"]] == [0, 7, 12]
    assert all(one["images_per_second"] > 0 for one in result["input"])
    assert len(check_recipe.lines(result)) > 20


@pytest.mark.slow
@pytest.mark.usefixtures("library_promotion")
@pytest.mark.parametrize(
    ("name", "replaced", "message"),
    [
        ("order", lambda real: lambda size, seed, epoch: np.arange(size), "batch_ids has other records"),
        ("optimized", lambda real: lambda *x: (real(*x)[0], 0.9 * real(*x)[1]), "average_difference"),
        ("simulated_factor", lambda real: lambda step, total, warmup: step / total, "schedule_difference"),
        ("ALL_CLASSES", lambda real: (1000, "0"), "its labels are not ImageNet's"),
    ],
)
def test_a_difference_is_an_error(small, monkeypatch, name, replaced, message):
    monkeypatch.setattr(check_recipe, name, replaced(getattr(check_recipe, name)))
    with pytest.raises(check_recipe.FailedError, match=message):
        check_recipe.check(small, words=WORDS)


@pytest.mark.exhaustive
def test_classes_of_a_prepared_set_are_compared_with_the_published_ones(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets")
    imagenet_a(tmp_path)
    with pytest.raises(check_recipe.FailedError, match="imagenet_a: 6 classes, not the published ones"):
        check_recipe.check_labels(tmp_path)
    ids = label_file().read_text().split()
    present = (6, check_recipe.digest([ids[i] for i in sorted({0, 1, 207, 388, 812, 999})]))
    monkeypatch.setitem(check_recipe.EVALUATIONS, "imagenet_a", present)
    assert check_recipe.check_labels(tmp_path)["imagenet_a"] == "names and 6 classes of 10 images"
