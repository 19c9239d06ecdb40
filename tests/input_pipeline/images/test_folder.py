"""Folders of images: classes, splits, ignored files, and errors that name what is wrong."""

import itertools
import shutil
from pathlib import Path

import image_datasets
import numpy as np
import pytest
from PIL import Image

import input_pipeline as ip
from input_pipeline.images.folder import find_images


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory):
    """A folder with the splits train (8 images a class) and val (4) that no test changes."""
    root = tmp_path_factory.mktemp("folder") / "pets"
    image_datasets.image_folder(root)
    return root


@pytest.fixture
def root(shared_root, tmp_path):
    """A copy of the folder for tests that change it."""
    return shutil.copytree(shared_root, tmp_path / "pets")


def open_folder(data_dir, **options):
    return ip.open_source("folder", data_dir=str(data_dir), **options)


def locations(source):
    return [source.describe(i) for i in range(len(source))]


def test_subfolders_are_classes_in_the_order_of_their_names(shared_root):
    for split, n in (("train", 8), ("val", 4)):
        source = open_folder(shared_root, split=split)
        assert source.class_names == ("cat", "dog", "fox")
        files = sorted((shared_root / split).rglob("*.*"))
        assert locations(source) == list(map(str, files))
        assert [source[i]["label"] for i in range(3 * n)] == [0] * n + [1] * n + [2] * n
        assert all(source[i]["image"] == file.read_bytes() for i, file in enumerate(files))
        assert source.nbytes() == sum(file.stat().st_size for file in files)


def test_val_fraction_splits_each_class(shared_root):
    data_dir = shared_root / "train"
    splits = {split: open_folder(data_dir, split=split, val_fraction=0.25) for split in ("train", "val")}
    train, val = (set(locations(source)) for source in splits.values())
    assert not train & val
    assert train | val == {str(f) for f in data_dir.rglob("*.*")}
    assert np.bincount(splits["val"].labels).tolist() == [2, 2, 2]
    assert np.bincount(splits["train"].labels).tolist() == [6, 6, 6]


def test_folds_of_class_folders_without_splits_cover_all_images(shared_root):
    data_dir = shared_root / "train"
    folds = [locations(open_folder(data_dir, split=None, part=f"fold {i} of 3")) for i in (1, 2, 3)]
    assert sorted(itertools.chain(*folds)) == sorted(map(str, data_dir.rglob("*.*")))
    assert locations(open_folder(shared_root, split=None)) == locations(open_folder(shared_root))  # the folder train


def test_a_class_that_is_called_train_is_no_split(shared_root, root):
    (root / "train" / "cat").rename(root / "train" / "train")
    assert open_folder(root / "train", split=None).class_names == ("dog", "fox", "train")
    (root / "train" / "train" / "young").mkdir()
    with pytest.raises(ip.InputError, match="train may be a split, or a class beside dog: give split, or rename it"):
        open_folder(root / "train", split=None)


def test_classes_from_keeps_the_class_numbers_of_a_subset(root, tmp_path):
    shutil.copytree(root / "val", tmp_path / "a" / "test")
    shutil.rmtree(tmp_path / "a" / "test" / "cat")
    source = open_folder(tmp_path / "a", split="test", classes_from=str(root / "train"))
    assert sorted(set(source.labels.tolist())) == [1, 2]
    assert source.class_names == ("cat", "dog", "fox")


def test_adding_files_moves_at_most_one_file_out_of_the_validation_split(root):
    def held_out():
        return set(locations(open_folder(root / "train", split="val", val_fraction=0.5)))

    before = held_out()
    for name in ("000a.jpg", "zzz.jpg"):
        shutil.copy(root / "val" / "cat" / "000.jpg", root / "train" / "cat" / name)
    assert len(before - held_out()) <= 1


def test_hidden_files_other_suffixes_and_special_files_are_ignored(root):
    before = len(open_folder(root))
    cat = root / "train" / "cat"
    (cat / ".checkpoints").mkdir()
    shutil.copy(root / "val" / "cat" / "000.jpg", cat / ".checkpoints" / "000.jpg")
    (cat / "notes.txt").write_text("x")
    (cat / "._a.jpg").write_text("x")
    (root / "train" / ".cache").mkdir()
    assert len(open_folder(root)) == before


def test_training_and_prediction_take_the_same_files_and_count_the_others(tmp_path, caplog):
    for logger in ("dcvit", "input_pipeline"):  # another test may have silenced them
        caplog.set_level("INFO", logger)
    pixels = image_datasets.image_array(0)
    for name, images in {"cat": 10, "große Hunde": 2}.items():
        (tmp_path / "train" / name / "deep").mkdir(parents=True)
        for suffix in (".jpg", ".jfif", ".PNG", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".jpeg")[:images]:
            Image.fromarray(pixels).save(tmp_path / "train" / name / "deep" / f"a{suffix}", quality=95)
    for other in ("cat/.a.jpg", "cat/notes.txt", "cat/deep/b.TXT", "cat/README", "readme.txt"):
        (tmp_path / "train" / other).write_bytes(b"x")
    source = open_folder(tmp_path)
    decode = ip.Preprocess("decode(precise=True)")
    decoded = [decode(source[i], np.random.default_rng(0))["image"] for i in range(len(source))]
    assert all(np.abs(image.astype(int) - pixels).mean() < 12 for image in decoded)
    assert find_images([tmp_path / "train"], pytest.fail) == [Path(file) for file in locations(source)]
    trained, predicted = (record.getMessage().partition(": ")[2] for record in caplog.records)
    assert trained == (
        "12 images of 2 classes, from 2 of 'große Hunde' to 10 of 'cat'; "
        "skipped 4 file(s): 2 .txt, 1 beside the class folders, 1 without suffix"
    )
    assert predicted == "12 images; skipped 4 file(s): 3 .txt, 1 without suffix"


def rename_a_class(root):
    (root / "val" / "cat").rename(root / "val" / "emu")


def empty_a_class(root):
    for file in (root / "train" / "cat").iterdir():
        file.unlink()
    (root / "train" / "cat" / "IMG_1.HEIC").touch()


def join_splits(root):
    shutil.rmtree(root / "val")
    for folder in (root / "train").iterdir():
        folder.rename(root / folder.name)
    (root / "train").rmdir()


@pytest.mark.parametrize(
    ("damage", "options", "error", "message"),
    [
        (rename_a_class, {"split": "val"}, ip.InputError, "class 'emu' of .*val is not among the 3 classes of .*train"),
        (empty_a_class, {}, ip.InputError, r"class folder .*cat holds no images \(.*\); skipped 1 file\(s\): 1 .heic"),
        (None, {"part": (0, 0.5)}, ip.InputError, r"part=\(0, 0.5\) has 2 of 3 classes, because .* by class; use"),
        (None, {"split": "test"}, ip.MissingDataError, r"no folder .*test \(in .*pets: train, val\)"),
        (
            None,
            {"val_fraction": 0.25},
            ip.InputError,
            "has the folders train, val, which are splits: omit val_fraction",
        ),
        (
            lambda root: (root / "train").rename(root / "test"),
            {"split": None},
            ip.InputError,
            "has the folders test, val, which are splits: give split",
        ),
        (
            join_splits,
            {"val_fraction": 0.25, "part": "fold 1 of 2"},
            ip.InputError,
            "hold out images twice; folds cover all images: omit val_fraction and set split=None, or train with",
        ),
    ],
)
def test_invalid_folders_and_options_are_named(root, damage, options, error, message):
    if damage:
        damage(root)
    with pytest.raises(error, match=message):
        open_folder(**{"data_dir": root, **options})
