"""Options of `open_source` that every kind of data has: limit, cache, parts and folds, and errors about them.

Folds are disjoint, complete, of scikit-learn's sizes and stratification, and independent of the order of examples.
"""

import shutil

import image_datasets
import numpy as np
import pytest
from batches import assert_same_batches
from sklearn.model_selection import KFold, StratifiedKFold

import input_pipeline as ip
from input_pipeline import source as sources
from input_pipeline.shuffle import Blocks
from input_pipeline.source import rows_of_fold

FOLDS = 5


@pytest.mark.parametrize("kind", ["digits", "folder"])
def test_limit_selects_the_first_examples(kind, tmp_path):
    if kind == "folder":
        image_datasets.image_folder(tmp_path / "pets", train=3, val=1)
    options = {"data_dir": str(tmp_path / "pets")} if kind == "folder" else {}
    complete, limited = ip.open_source(kind, **options), ip.open_source(kind, limit=5, **options)
    assert len(limited) == 5
    assert limited.class_names == complete.class_names
    assert 0 < limited.nbytes() < complete.nbytes()
    for i in range(5):
        assert limited.describe(i) == complete.describe(i)
        np.testing.assert_array_equal(limited[i]["image"], complete[i]["image"])


@pytest.mark.slow
def test_cache_keeps_examples_in_memory_and_does_not_change_batches(caplog):
    caplog.set_level("INFO")
    pp = 'flip_lr|value_range(-1, 1)|onehot(10)|keep("image", "labels")'
    plain = ip.open_source("digits", split="test")
    cached = ip.open_source("digits", split="test", cache=True)
    assert "keeping 0.0 GB of stored examples in memory" in caplog.text
    streams = (ip.train_batches(source, pp, 120, 0) for source in (cached, plain))
    assert_same_batches(*streams, 4)
    assert len(cached.examples) == 360


def test_cache_larger_than_the_available_memory_is_refused(monkeypatch):
    monkeypatch.setattr(sources.memory, "available", lambda: 10_000)
    with pytest.raises(ip.InputError, match=r"cache=True would keep .* GB of stored examples in memory, but only 0\.0"):
        ip.open_source("digits", cache=True)


def test_parts_of_a_source_are_disjoint_and_complete():
    parts = [ip.open_source("digits", part=part) for part in ((0, 0.3), (0.3, 0.31), (0.31, 1.0))]
    whole = ip.open_source("digits")
    assert [part.describe(i) for part in parts for i in range(len(part))] == [
        whole.describe(i) for i in range(len(whole))
    ]
    np.testing.assert_array_equal(parts[1][0]["image"], whole[len(parts[0])]["image"])
    assert parts[0].nbytes() < whole.nbytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "digts"}, "did you mean 'digits'"),
        ({"kind": "digits", "split": "tset"}, "did you mean 'test'"),
        ({"kind": "digits", "limit": 0}, "limit=0 should be 1 or more"),
        ({"kind": "digits", "part": (0.5, 0.5)}, r"part=\(0.5, 0.5\) should be two increasing fractions"),
        ({"kind": "digits", "part": "fold 0 of 5"}, "part='fold 0 of 5' should be like \"fold 2 of 5\" or"),
        ({"kind": "synthetic", "part": "fold 1 of 2"}, "part='fold 1 of 2' is for images"),
        ({"kind": "digits", "part": "fold 1 of 1999"}, "expected at most as many folds as examples"),
    ],
)
def test_invalid_options_are_errors_that_name_the_option(options, message):
    with pytest.raises(ip.InputError, match=message):
        ip.open_source(**options)


def test_unknown_user_of_a_path_is_named():
    with pytest.raises(ip.InputError, match="~nosuchuser/x: there is no user 'nosuchuser'"):
        ip.open_source("folder", data_dir="~nosuchuser/x")


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
