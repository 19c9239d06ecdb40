"""Rows of tokens in TFRecord files of tf.train.Examples, and errors that name the file and the record."""

import importlib.util
import os
import shutil

import corpora
import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline.text import tfrecord_tokens

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs tensorflow")
RNG = np.random.default_rng(0)


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
