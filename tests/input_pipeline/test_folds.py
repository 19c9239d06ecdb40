"""Folds by name: disjoint, complete, of scikit-learn's sizes and stratification, and independent of the order."""

import shutil

import image_datasets
import numpy as np
import pytest
from sklearn.model_selection import KFold, StratifiedKFold

import input_pipeline as ip
from input_pipeline.folds import rows_of_fold
from input_pipeline.shuffle import Blocks

FOLDS = 5


def folds(names, labels, count=FOLDS):
    return [rows_of_fold(f"fold {i} of {count}", names, labels, "data") for i in range(1, count + 1)]


@pytest.mark.parametrize("size", [5, 23])
def test_without_labels_sizes_are_those_of_kfold(size):
    found = folds([str(i) for i in range(size)], None)
    assert sorted(np.concatenate(found)) == list(range(size))
    assert [len(rows) for rows in found] == [len(test) for _, test in KFold(FOLDS).split(np.zeros(size))]


def test_each_class_is_split_as_stratified_kfold_splits_it():
    labels = np.sort(np.random.default_rng(0).choice(4, 97, p=[0.5, 0.25, 0.15, 0.1]))
    found = folds([str(i) for i in range(97)], labels)
    assert sorted(np.concatenate(found)) == list(range(97))
    counts = [np.bincount(labels[rows], minlength=4).tolist() for rows in found]
    theirs = StratifiedKFold(FOLDS).split(np.zeros(97), labels)
    assert counts == [np.bincount(labels[test], minlength=4).tolist() for _, test in theirs]


def test_several_labels_are_stratified_by_their_combination():
    labels = np.random.default_rng(0).integers(-1, 2, (300, 3)).astype(np.int8)
    for rows in folds([str(i) for i in range(300)], labels):
        for row in np.unique(labels, axis=0):
            count, whole = ((part == row).all(axis=1).sum() for part in (labels[rows], labels))
            assert abs(count - whole / FOLDS) < 1


def test_folds_follow_names_and_not_their_order():
    names, labels = [f"{i}.jpg" for i in range(60)], np.arange(60) % 3
    order = np.random.default_rng(0).permutation(60)
    for rows, shuffled in zip(folds(names, labels), folds([names[i] for i in order], labels[order]), strict=True):
        assert {names[i] for i in rows} == {names[order[i]] for i in shuffled}


def test_the_others_are_the_complement_of_a_fold():
    names = [str(i) for i in range(33)]
    for i in range(1, 4):
        fold, others = (rows_of_fold(f"{words}fold {i} of 3", names, None, "") for words in ("", "all but "))
        assert sorted([*fold, *others]) == list(range(33))
        assert np.all(np.diff(others) > 0)


def test_a_folder_has_the_same_folds_at_another_place(tmp_path):
    image_datasets.image_folder(tmp_path / "pets", train=8, val=1)
    shutil.copytree(tmp_path / "pets", tmp_path / "copies" / "pets")
    part = [
        ip.open_source("folder", data_dir=str(root / "pets"), part="fold 2 of 4")
        for root in (tmp_path, tmp_path / "copies")
    ]
    files = [{source.describe(i)[len(str(root)) :] for i in range(len(source))} for source, root in
             zip(part, (tmp_path, tmp_path / "copies"), strict=True)]  # fmt: skip
    assert files[0] == files[1]
    np.testing.assert_array_equal(np.bincount(part[0].labels), [2, 2, 2])
    assert [part[0][i]["label"] for i in range(6)] == part[0].labels.tolist()
    assert part[0].class_names == ("cat", "dog", "fox")


def test_folds_of_a_source_batch_every_example_once():
    parts = [ip.open_source("digits", split="test", part=f"fold {i} of 3") for i in (1, 2, 3)]
    whole = ip.open_source("digits", split="test")
    found = sorted(part.describe(i) for part in parts for i in range(len(part)))
    assert found == sorted(whole.describe(i) for i in range(len(whole)))
    assert sum(part.nbytes() for part in parts) == whole.nbytes()


def test_blocks_of_some_examples_are_the_examples_of_each_block():
    blocks, rng = Blocks(np.array([3, 1, 4, 2]), 5), np.random.default_rng(0)
    owner = np.repeat(np.arange(4), blocks.sizes)
    for rows in (range(2, 7), range(10), np.array([0, 3, 9]), np.flatnonzero(rng.random(10) < 0.5)):
        counts = np.bincount(owner[np.asarray(rows)], minlength=4)
        np.testing.assert_array_equal(blocks.part(rows).sizes, counts[counts > 0])


def test_invalid_folds_are_refused():
    part = "fold 0 of 5"
    with pytest.raises(ip.InputError, match=f'part={part!r} should be like "fold 2 of 5" or "all but fold 2 of 5", or'):
        ip.open_source("digits", part=part)


def test_folds_of_text_and_of_too_few_examples_are_refused():
    with pytest.raises(ip.InputError, match=r"part='fold 1 of 2' is for images"):
        ip.open_source("synthetic", part="fold 1 of 2")
    with pytest.raises(
        ip.InputError, match=r"part='fold 1 of 361' of 360 example\(s\): expected at most as many folds"
    ):
        ip.open_source("digits", split="test", part="fold 1 of 361")
