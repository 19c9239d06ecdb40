"""Hostile files are refused with a one-line error before memory is allocated for the sizes that they announce."""

import json
import os
import struct
import subprocess
import sys
import time
import zlib

import corpora
import hostile_files as hostile
import image_datasets
import numpy as np
import pytest
from hostile_files import BOMBS
from PIL import Image
from refusals import refused

import input_pipeline as ip
from input_pipeline import files, memory, tfrecord
from input_pipeline.images import decode, limits, tfds
from input_pipeline.text import documents, megatron_format, tokenizer

MEASURE_PEAK = """
import pathlib, resource, sys
import input_pipeline
from input_pipeline.images import decode as images
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    for precise in (True, False):
        try:
            images.decode(path.read_bytes(), precise=precise)
        except input_pipeline.InputError as e:
            print(path.name, peak() - before, len(str(e).splitlines()))
"""


def open_text(path, kind="text", **options):
    return ip.open_source(kind, path=str(path), context=8, **options)


class TestImages:
    @pytest.mark.slow
    def test_small_file_of_gigapixels_takes_no_memory(self, tmp_path):
        """Check Pillow's readers and the checks before TensorFlow's, in a process that does nothing else."""
        small = {name: data for name, data in BOMBS.items() if name != "masked jpeg"}
        for name, data in small.items():
            assert len(data) < 3000
            (tmp_path / name).write_bytes(data)
        process = subprocess.run([sys.executable, "-c", MEASURE_PEAK, str(tmp_path)], capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        lines = [line.rsplit(" ", 2) for line in process.stdout.splitlines()]
        assert [name for name, _, _ in lines] == [name for name in sorted(small) for _ in range(2)]
        assert max(int(megabytes) for _, megabytes, _ in lines) < 64
        assert {lines_of_error for _, _, lines_of_error in lines} == {"1"}
        assert "tensorflow" not in process.stderr

    @pytest.mark.parametrize(
        "spec",
        ["decode", "decode(precise=True)", "decode(exif=True)", "decode(1)", "decode_jpeg_and_inception_crop(8)"],
    )
    @pytest.mark.parametrize("name", BOMBS)
    def test_every_decoder_refuses_gigapixels(self, name, spec):
        with refused(ip.InputError, match=r"exceeds (the )?limit|broken image|not an image") as error:
            ip.Preprocess(spec)({"image": BOMBS[name]}, np.random.default_rng(0))
        assert not isinstance(error.value, ip.ReadingError)  # it may be skipped

    @pytest.mark.parametrize("name", ["png", "gif", "gif of a larger frame", "bmp", "tiff", "jpeg"])
    def test_limit_holds_after_another_library_removed_pillows_limit(self, name, monkeypatch):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        with refused(ip.InputError, "exceeds the limit of 178956970"):
            decode.decode(BOMBS[name], precise=True)

    def test_frame_header_after_a_marker_without_length_is_found(self):
        with refused(ip.InputError, "65000x65000"):
            limits.jpeg_size(BOMBS["masked jpeg"])

    @pytest.mark.parametrize("between", [b"", b"\xff\xfe\0\4\xff\xd9", b"\xff\xff"])  # a comment with an end marker
    @pytest.mark.parametrize("spec", ["decode", "decode(precise=True)", "decode_jpeg_and_inception_crop(8)"])
    def test_jpeg_of_many_scans_is_refused_before_decoding(self, spec, between):
        with refused(ip.InputError, "13000x13000 pixels in 1000 scans, which exceeds the limit"):
            ip.Preprocess(spec)({"image": hostile.scans_jpeg(13_000, 1000, between)}, np.random.default_rng(0))

    def test_progressive_jpeg_of_the_largest_size_is_accepted(self):
        assert limits.jpeg_size(hostile.scans_jpeg(13_000, 10)) == (13_000, 13_000)
        thumbnails = b"\xff\xe1\xff\xff" + (b"\xff\xda" * 40_000)[:0xFFFD]
        file = hostile.scans_jpeg(13_000, 10)
        assert limits.jpeg_size(file[:2] + thumbnails + file[2:] + thumbnails) == (13_000, 13_000)

    @pytest.mark.parametrize("spec", ["decode", "decode(precise=True)"])
    def test_jpeg_of_many_segments_is_refused(self, spec):
        data = b"\xff\xd8" + b"\xff\xe0\0\2" * 1_000_000 + image_datasets.jpeg(0)[2:]
        with refused(ip.InputError, "65,536 segments"):
            ip.Preprocess(spec)({"image": data}, np.random.default_rng(0))

    def test_file_that_takes_time_without_pixels_is_refused(self, monkeypatch):
        """Each color profile of a kilobyte unpacks to a megabyte."""
        profile = (b"iCCP", b"a\0\0" + zlib.compress(bytes(1_000_000)))
        monkeypatch.setattr(limits, "MAX_SECONDS", 0.05)
        started = time.thread_time()
        with refused(ip.InputError, "takes more than the limit of 0.05 s"):
            decode.decode(image_datasets.bomb_png(1, 1, *[profile] * 2000))
        assert time.thread_time() - started < 1

    def test_largest_image_of_imagenet_is_accepted(self):
        data = image_datasets.bomb_jpeg(1)
        offset = data.index(b"\xff\xc0") + 5
        assert limits.jpeg_size(data[:offset] + struct.pack(">HH", 9331, 6530) + data[offset + 4 :]) == (9331, 6530)

    def test_file_too_large_for_an_image_is_not_read(self, tmp_path):
        image_datasets.image_folder(tmp_path, train=2, val=1)
        source = ip.open_source("folder", data_dir=str(tmp_path))
        os.truncate(source.describe(0), files.MAX_BYTES + 1)  # a sparse file: it takes no space on the disk
        source = ip.open_source("folder", data_dir=str(tmp_path))
        with refused(ip.InputError, "1,073,741,825 bytes", most_bytes=1 << 20):
            source[0]


class TestText:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
    def test_line_longer_than_the_limit_is_refused(self, tmp_path, monkeypatch, name):
        monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1 << 21)
        line = b"x" * (1 << 20)
        content = (
            hostile.zstd_frame(b"\n") + hostile.zstd_frame(line, 2048) if name.endswith("zst") else b"\n" + line * 8
        )
        (tmp_path / name).write_bytes(content)
        with refused(ip.InputError, f"{name}:2:", "2,097,152 bytes", most_bytes=128 << 20):
            open_text(tmp_path / name)

    @pytest.mark.slow
    def test_zstd_of_the_best_ratio_is_decompressed_piecewise(self, tmp_path):
        """Every block of four bytes unpacks to 128 KiB of one repeated byte, 6.5 GB in all."""
        pytest.importorskip("zstandard")
        block = (0b010 | (128 << 10) << 3).to_bytes(3, "little") + b"x"
        (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00\x38" + block * 50_000)
        with refused(
            ip.InputError, "a.jsonl.zst:1:", "134,217,728 bytes", most_bytes=documents.MAX_LINE_BYTES + (128 << 20)
        ):
            open_text(tmp_path / "a.jsonl.zst")

    def test_zstd_window_larger_than_the_free_memory_is_refused(self, tmp_path, monkeypatch):
        (tmp_path / "a.jsonl.zst").write_bytes(hostile.zstd_frame(b'{"text": "some words of text"}\n', window_log=27))
        assert len(open_text(tmp_path / "a.jsonl.zst"))
        monkeypatch.setattr(memory, "available", lambda: 64 << 20)
        with refused(ip.InputError, "a.jsonl.zst", "window", "33,554,432"):
            open_text(tmp_path / "a.jsonl.zst")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("kind", "line"),
        [
            ("text", b'{"text": "some words"}\n'),
            ("spans", b'{"inputs": "a", "targets": "b"}\n'),
            ("answers", b'{"task_id": "a", "texts": "a [ b ]"}\n'),
        ],
    )
    def test_short_lines_that_decompress_beyond_the_free_memory_are_refused(self, tmp_path, monkeypatch, kind, line):
        (tmp_path / "a.jsonl.zst").write_bytes(hostile.zstd_frame(line * 100, 20))
        assert len(open_text(tmp_path / "a.jsonl.zst", kind))
        monkeypatch.setattr(memory, "available", lambda: 30_000)
        with refused(ip.InputError, "a.jsonl.zst", "tokens"):
            open_text(tmp_path / "a.jsonl.zst", kind)

    @pytest.mark.slow
    def test_empty_documents_are_tokenized_in_bounded_batches(self):
        read = 0

        def endless():
            nonlocal read
            while True:
                read += 1
                yield documents.Document(("", ""), "a.jsonl:1", "a.jsonl:1", 0)

        next(documents.encode_documents(endless(), tokenizer.ByteTokenizer()))
        assert read <= documents.BATCH_CHARACTERS

    def test_text_file_larger_than_the_free_memory_is_not_read(self, tmp_path, monkeypatch):
        (tmp_path / "a.txt").write_bytes(b"x" * 1000)
        monkeypatch.setattr(memory, "available", lambda: 1999)
        with refused(ip.InputError, "a.txt", "one document"):
            open_text(tmp_path / "a.txt")


class TestTokens:
    @pytest.mark.parametrize("counts", [(1 << 63, 1 << 63), (2**64 - 1, 0), (1 << 40, 1), (0, 1 << 50)])
    def test_index_that_announces_more_sequences_than_it_holds_is_refused(self, tmp_path, counts):
        prefix = corpora.write_megatron(tmp_path / "a", [[1, 2, 3], [4, 5]])
        content = prefix.with_suffix(".idx").read_bytes()
        prefix.with_suffix(".idx").write_bytes(content[:18] + struct.pack("<QQ", *counts) + content[34:])
        with refused(ip.InputError, "a.idx", f"{len(content)} bytes", most_bytes=1 << 20):
            megatron_format.read_index(str(prefix))

    @pytest.mark.parametrize(
        ("starts", "documents", "fact"),
        [((2, 8), (0, 1, 2), "sequence 0 has 3 tokens from byte 2, expected from byte 0"),
         ((-2, 4), (0, 1, 2), "sequence 0 has 3 tokens from byte -2"),
         ((-(1 << 63), 1 << 62), (0, 1, 2), "sequence 0 has 3 tokens from byte -9,223,372,036,854,775,808"),
         ((0, 4), (0, 1, 2), "sequence 1 has 2 tokens from byte 4, expected from byte 6"),
         ((0, 1 << 40), (0, 1, 2), "sequence 1 has 2 tokens from byte 1,099,511,627,776"),
         ((0, 6), (1, 1, 2), "document 0 begins with sequence 1"),
         ((0, 6), (0, 2, 1), "document 2 begins with sequence 1"),
         ((0, 6), (0, -1, 2), "document 1 begins with sequence -1"),
         ((0, 6), (0, 1, 3), "document 2 begins with sequence 3")],
    )  # fmt: skip
    def test_offsets_that_do_not_ascend_within_the_tokens_are_refused(self, tmp_path, starts, documents, fact):
        index = b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 3, 2, *starts, *documents)
        (tmp_path / "a.idx").write_bytes(index)
        (tmp_path / "a.bin").write_bytes(bytes(10))
        with refused(ip.InputError, f"{tmp_path / 'a.idx'} is damaged: {fact}"):
            open_text(tmp_path / "a", "megatron", vocab_size=10)

    def test_last_offsets_of_a_long_index_are_checked(self, tmp_path, monkeypatch):
        monkeypatch.setattr(megatron_format, "CHECKED", 2)
        prefix = corpora.write_megatron(tmp_path / "a", [[1, 2, 3], [4], [5, 6], [7, 8]])
        assert len(open_text(prefix, "megatron", vocab_size=10)) == 1
        content = prefix.with_suffix(".idx").read_bytes()
        at = 34 + 4 * 4 + 8 * 3
        prefix.with_suffix(".idx").write_bytes(content[:at] + struct.pack("<q", 10) + content[at + 8 :])
        with refused(ip.InputError, "sequence 3 has 2 tokens from byte 10"):
            open_text(prefix, "megatron", vocab_size=10)

    def test_file_size_that_is_not_a_multiple_of_the_token_size_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(megatron_format, "CHECKED", 1)
        index = b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 3, 5, 0, 1, 0, 1, 2)
        (tmp_path / "a.idx").write_bytes(index)
        (tmp_path / "a.bin").write_bytes(bytes(11))
        with refused(ip.InputError, "a.bin", "11 bytes", "2 bytes"):
            open_text(tmp_path / "a", "megatron")


class TestTokenizers:
    @pytest.fixture(autouse=True)
    def _library(self):
        pytest.importorskip("tokenizers")

    def test_huge_token_number_is_refused(self, tmp_path):
        file = corpora.train_tokenizer(tmp_path / "tokenizer.json")
        content = json.loads(file.read_text())
        content["model"]["vocab"]["absurd"] = 2**32 - 1
        file.write_text(json.dumps(content))
        with refused(ip.InputError, "tokenizer.json", "4,294,967,295"):
            tokenizer.open_tokenizer(str(file))

    def test_error_names_the_file(self, tmp_path):
        file = corpora.train_tokenizer(tmp_path / "tokenizer.json", "words")
        content = json.loads(file.read_text())
        content["model"]["unk_token"] = "absent"
        file.write_text(json.dumps(content))
        (tmp_path / "a.txt").write_text("unheard of")
        with refused(ip.InputError, "tokenizer.json cannot tokeni"):
            open_text(tmp_path / "a.txt", tokenizer=str(file))

    @pytest.mark.parametrize(
        "content",
        ["[" * 100_000, '{"x": %s}' % ("[" * 100_000), '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "x": %s}'
         % ("9" * 10_000), '{"decoder": [1]}', "[]", "\ud800"],
    )  # fmt: skip
    def test_content_that_is_not_a_tokenizer_is_refused(self, tmp_path, content):
        (tmp_path / "tokenizer.json").write_text(content, errors="surrogatepass")
        with refused(ip.InputError, "tokenizer.json is not a valid tokenizer.json: "):
            tokenizer.open_tokenizer(str(tmp_path))

    def test_unknown_keys_of_a_part_are_ignored(self, tmp_path):
        part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "decoders": 5, "pretokenizers": 5}
        opened = tokenizer.open_tokenizer(str(hostile.tokenizer_file(tmp_path / "tokenizer.json", pre_tokenizer=part)))
        assert opened.decode(opened.encode("the")) == "the"

    def test_failure_of_a_regular_expression_is_one_line_and_the_next_text_is_encoded(self, tmp_path):
        file = hostile.tokenizer_file(tmp_path / "tokenizer.json", pre_tokenizer=hostile.split_at("(a+)+$"))
        opened = tokenizer.open_tokenizer(str(file))
        with refused(ip.InputError, "tokenizer.json cannot tokenize: ", "retry-limit"):
            opened.encode("a" * 30 + "!")
        assert opened.decode(opened.encode("a")) == "a"

    def test_replacements_that_multiply_a_text_are_refused(self, tmp_path):
        normalizer = hostile.replacements("normalizers", 32, 32)
        opened = tokenizer.open_tokenizer(
            str(hostile.tokenizer_file(tmp_path / "tokenizer.json", normalizer=normalizer))
        )
        with refused(ip.InputError, "tokenizer.json cannot tokenize: ", "30 bytes of text become 30,720 tokens"):
            opened.encode("a" * 30)

    def test_decoder_that_fails_is_refused(self, tmp_path):
        decoder = {"type": "Strip", "content": "a", "start": 0, "stop": 9}
        opened = tokenizer.open_tokenizer(str(hostile.tokenizer_file(tmp_path / "tokenizer.json", decoder=decoder)))
        with refused(ip.InputError, "tokenizer.json cannot decode: ", "index out of bounds"):
            opened.decode(opened.encode("a"))


class TestRecords:
    @pytest.fixture(autouse=True)
    def _checksums(self):
        pytest.importorskip("google_crc32c")

    @pytest.mark.parametrize("length", [2**64 - 1, 1 << 63, 1 << 50, 100])
    def test_record_longer_than_its_file_is_refused(self, tmp_path, length):
        with refused(ip.InputError, "a.tfrecord", "record 0"):
            tfrecord.TFRecordFile(str(hostile.write_tfrecord(tmp_path / "a.tfrecord", length, b"some")))

    def test_record_of_a_terabyte_in_a_sparse_file_is_refused(self, tmp_path):
        path = hostile.write_tfrecord(tmp_path / "a.tfrecord", 1 << 40)
        try:
            os.truncate(path, (1 << 40) + 16)
        except OSError:
            pytest.skip("the file system has no sparse files of this size")
        with refused(ip.InputError, "record 0", "1,099,511,627,776 bytes"):
            tfrecord.TFRecordFile(str(path))

    @pytest.mark.parametrize("middle", [1, 30, -(1 << 62), 1 << 62])
    def test_saved_offsets_that_contradict_the_file_are_not_used(self, tmp_path, middle):
        path = hostile.write_tfrecord(tmp_path / "a.tfrecord", 16, b"sixteen of bytes")
        path.write_bytes(path.read_bytes() + tfrecord._checksum(b"sixteen of bytes"))
        state = tfrecord.file_state(str(path))[1:3]
        offsets = struct.pack("<2q", *state) + np.array([0, middle, state[0]], "<i8").tobytes()
        (tmp_path / "a.tfrecord.offsets").write_bytes(offsets)
        file = tfrecord.TFRecordFile(str(path))
        assert (len(file), file.read(0)) == (1, b"sixteen of bytes")

    @pytest.mark.parametrize("name", ["features.json", "dataset_info.json"])
    def test_pipe_in_a_prepared_data_set_is_not_opened(self, tmp_path, name):
        pytest.importorskip("tensorflow_datasets")
        folder = tmp_path / "pets/1.0.0"
        folder.mkdir(parents=True)
        (folder / "dataset_info.json").write_text('{"name": "pets", "version": "1.0.0"}')
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with refused(
            ip.InputError, "no regular file features.json" if name == "features.json" else "no prepared dataset"
        ):
            tfds.Source("pets", "train", str(tmp_path))

    @pytest.mark.parametrize("key", ["pythonClassName", "type"])
    def test_prepared_data_set_cannot_import_a_module(self, tmp_path, monkeypatch, key):
        pytest.importorskip("tensorflow_datasets")
        folder = tmp_path / "pets/1.0.0"
        folder.mkdir(parents=True)
        (tmp_path / "hostile_features.py").write_text("raise SystemExit('executed')")
        monkeypatch.syspath_prepend(tmp_path)
        (folder / "dataset_info.json").write_text('{"name": "pets", "version": "1.0.0"}')
        features = {
            "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
            "featuresDict": {"features": {"image": {key: "hostile_features.Image"}}},
        }
        (folder / "features.json").write_text(json.dumps(features))
        with refused(ip.InputError, "hostile_features.Image"):
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
