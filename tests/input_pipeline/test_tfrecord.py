"""TFRecord files: their records, the index, which is computed again after a change, and rows of tokens in them."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import corpora
import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline import tfrecord
from input_pipeline.text import tfrecord_tokens

pytest.importorskip("tensorflow")
RNG = np.random.default_rng(0)


@pytest.fixture
def path(tmp_path):
    """A TFRecord file without an index."""
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


@pytest.mark.parametrize("high", [128, 2**31, 2**62])
def test_integers_of_any_size_are_read_as_tensorflow_wrote_them(high):
    for n in (1, 2, 300):
        for values in (RNG.integers(-high, high, n), RNG.integers(0, high, n)):
            record = corpora.example({"a": [1], "input_ids": values.tolist(), "z": []})
            assert tfrecord_tokens.read_input_ids(record).tolist() == values.tolist()
    assert tfrecord_tokens.read_input_ids(corpora.example({"input_ids": []})).tolist() == []


def test_unpacked_lists_are_read():
    def message(field, content):
        return bytes([field << 3 | 2, len(content)]) + content

    feature = message(3, b"".join(b"\x08" + value for value in (b"\x05", b"\xac\x02", b"\x00")))
    record = message(1, message(1, message(1, b"input_ids") + message(2, feature)))
    assert tfrecord_tokens.read_input_ids(record).tolist() == [5, 300, 0]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"input_ids": [1] * 17}, {"input_ids": [1] * 16 + [90]}], "0, record 1: token 90 is not in the vocab"),
        ([{"input_ids": [1] * 17}, {"inputs": [1] * 17}], "0, record 1: the record has no 'input_ids', but inputs"),
    ],
)
def test_invalid_records_are_named(tmp_path, records, message):
    corpora.write_input_ids(tmp_path / "train.tfrecord-0", [corpora.example(record) for record in records])
    with pytest.raises(ip.InputError, match=message):
        list(ip.eval_batches(ip.open_source("input_ids", path=str(tmp_path), context=16, vocab_size=90), "", 2))


def test_files_are_found_by_folder_or_glob_and_a_damaged_one_is_named(tmp_path):
    row = [corpora.example({"input_ids": [1] * 17})]
    for name in ("a/x.tfrecord-1", "a/x.tfrecord-0", "b/x"):
        corpora.write_input_ids(tmp_path / name, row)
    shutil.copy(tmp_path / "b" / "x", tmp_path / "a" / "notes")
    for _ in range(2):  # the second time, the index of each file exists
        source = ip.open_source("input_ids", path=str(tmp_path), context=16)
        found = [source.describe(i).split(",")[0] for i in range(len(source))]
        assert found == [str(tmp_path / "a" / f"x.tfrecord-{i}") for i in (0, 1)]
    assert source.vocab_size is source.end_of_text is source.token_bytes is None
    assert len(ip.open_source("input_ids", path=str(tmp_path / "?" / "x*"), context=16)) == 3
    os.truncate(tmp_path / "a" / "x.tfrecord-1", 20)
    with pytest.raises(ip.InputError, match=r"x\.tfrecord-1 is damaged or cut off in record 0"):
        ip.open_source("input_ids", path=str(tmp_path), context=16)
