"""Options of `open_source` that every kind of data has: limit, cache, and errors about invalid options."""

import image_datasets
import numpy as np
import pytest
from batches import assert_same_batches

import input_pipeline as ip
from input_pipeline import source as sources


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
    ],
)
def test_invalid_options_are_errors_that_name_the_option(options, message):
    with pytest.raises(ip.InputError, match=message):
        ip.open_source(**options)


def test_unknown_user_of_a_path_is_named():
    with pytest.raises(ip.InputError, match="~nosuchuser/x: there is no user 'nosuchuser'"):
        ip.open_source("folder", data_dir="~nosuchuser/x")
