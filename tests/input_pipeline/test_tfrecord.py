"""Index of TFRecord files: it is stored, used while the file is unchanged, and computed again after a change."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import corpora
import numpy as np
import pytest

from input_pipeline import tfrecord


@pytest.fixture
def path(tmp_path):
    """A TFRecord file without an index."""
    pytest.importorskip("tensorflow")
    return corpora.write_input_ids(tmp_path / "train.tfrecord-0", [bytes([i]) * 50 * i for i in range(8)])


def test_records_equal_those_of_tensorflows_reader(path):
    import tensorflow as tf

    expected = [record.numpy() for record in tf.data.TFRecordDataset(str(path))]
    file = tfrecord.open_records(str(path))
    assert [file.read(i) for i in range(len(file))] == expected


def test_many_threads_can_read_several_files(path, tmp_path):
    files = [tfrecord.TFRecordFile(str(shutil.copy(path, tmp_path / f"{i}.tfrecord"))) for i in range(8)]
    expected = [files[0].read(i) for i in range(5)]
    with ThreadPoolExecutor(8) as threads:
        jobs = [(file, number) for _ in range(40) for number in range(5) for file in files]
        for (_, number), data in zip(jobs, threads.map(lambda job: job[0].read(job[1]), jobs), strict=True):
            assert data == expected[number]


def test_index_is_stored_next_to_the_file_and_used(path, monkeypatch):
    first = tfrecord.TFRecordFile(str(path)).offsets
    assert path.with_name(path.name + ".offsets").is_file()
    monkeypatch.setattr(tfrecord, "_find_records", None)
    np.testing.assert_array_equal(tfrecord.TFRecordFile(str(path)).offsets, first)


def test_index_of_a_read_only_folder_is_stored_in_the_cache_folder(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path.with_name(path.name + ".offsets").mkdir()  # prevents writing the index, even for root
    first = tfrecord.TFRecordFile(str(path)).offsets
    assert len(list((tmp_path / "cache/dcvit").glob("*.offsets"))) == 1
    assert not list(path.parent.glob("*.offsets.*"))
    monkeypatch.setattr(tfrecord, "_find_records", None)
    np.testing.assert_array_equal(tfrecord.TFRecordFile(str(path)).offsets, first)


@pytest.mark.parametrize("change", ["shorter", "damaged index"])
def test_index_is_computed_again_after_a_change_of_the_file_or_the_index(path, change):
    before = tfrecord.TFRecordFile(str(path)).offsets
    index = path.with_name(path.name + ".offsets")
    if change == "shorter":
        os.truncate(path, int(before[-2]))
    else:
        index.write_bytes(index.read_bytes()[:24] + bytes(8))
    after = tfrecord.TFRecordFile(str(path)).offsets
    np.testing.assert_array_equal(after, before[:-1] if change == "shorter" else before)
