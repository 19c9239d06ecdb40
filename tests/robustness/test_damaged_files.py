"""Damaged files of tokens, text, tokenizers and records end in one line that names them."""

import json
import struct

import pytest
from refusals import refused

import input_pipeline as ip
from input_pipeline import memory, tfrecord
from input_pipeline.images import tfds


def open_text(path, kind="text", **options):
    return ip.open_source(kind, path=str(path), context=8, **options)


class TestTokens:
    @pytest.mark.parametrize(("sizes", "starts"), [((3, 2), (2, 8)), ((3, 2), (0, 8)), ((6, -1), (0, 12))])
    def test_sequences_that_do_not_follow_each_other_are_refused(self, tmp_path, sizes, starts):
        index = b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, *sizes, *starts, 0, 1, 2)
        (tmp_path / "a.idx").write_bytes(index)
        (tmp_path / "a.bin").write_bytes(bytes(10))
        with refused(ip.InputError, f"{tmp_path / 'a.idx'} is damaged: its sequences do not follow each other"):
            open_text(tmp_path / "a", "megatron", vocab_size=10)


class TestRecords:
    @pytest.fixture(autouse=True)
    def _checksums(self):
        pytest.importorskip("google_crc32c")

    def test_record_longer_than_its_file_is_refused(self, tmp_path):
        head = struct.pack("<Q", 100)
        (tmp_path / "a.tfrecord").write_bytes(head + tfrecord.record_checksum(head) + b"some")
        with refused(ip.InputError, "a.tfrecord", "record 0"):
            tfrecord.TFRecordFile(str(tmp_path / "a.tfrecord"))

    def test_prepared_data_set_cannot_import_a_module(self, tmp_path, monkeypatch):
        pytest.importorskip("tensorflow_datasets")
        folder = tmp_path / "pets/1.0.0"
        folder.mkdir(parents=True)
        (tmp_path / "other_features.py").write_text("raise SystemExit('executed')")
        monkeypatch.syspath_prepend(tmp_path)
        (folder / "dataset_info.json").write_text('{"name": "pets", "version": "1.0.0"}')
        features = {
            "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
            "featuresDict": {"features": {"image": {"pythonClassName": "other_features.Image"}}},
        }
        (folder / "features.json").write_text(json.dumps(features))
        with refused(ip.InputError, "other_features.Image"):
            tfds.Source("pets", "train", str(tmp_path))


@pytest.mark.slow
def test_free_memory_is_that_of_the_container_and_counts_the_file_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    machine = memory.available()
    assert machine is None or 0 < machine < 1 << 50
    for name, content in {"max": "1000\n", "current": "700\n", "stat": "anon 500\ninactive_file 150\n"}.items():
        (tmp_path / f"memory.{name}").write_text(content)
    assert memory.available() == 450
    (tmp_path / "memory.max").write_text("max\n")
    without_limit = memory.available()
    assert (without_limit is None) == (machine is None)
    assert without_limit is None or without_limit > 1 << 20
    monkeypatch.setattr(memory, "MACHINE", tmp_path / "none")
    assert memory.available() is None
