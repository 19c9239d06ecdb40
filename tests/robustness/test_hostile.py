"""Data from strangers: files that announce what is not there, packed bombs, and readers that fail in odd ways.

What is refused is refused in one line, before memory is taken, and nothing waits for ever or is passed over in silence.
"""

import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from pathlib import Path

import corpora
import datasets
import numpy as np
import pytest
from PIL import Image

import input_pipeline as ip
from input_pipeline import memory, tfrecord
from input_pipeline.images import decode, folder, tfds
from input_pipeline.text import documents, megatron, tokenizer


@contextlib.contextmanager
def takes_less_than(nbytes):
    """Asserts how much memory is taken at most, by Python, numpy and zstandard's output."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


GIGA = 60_000  # pixels of a side


def riff(kind, content):
    """A WebP of one chunk."""
    chunk = kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def gif(screen, frame):
    """A GIF that announces a screen and one frame of other sides, and holds three pixels."""
    picture = b"," + struct.pack("<HHHH", 0, 0, frame, frame) + b"\0\2\2\x4c\1\0;"
    return b"GIF89a" + struct.pack("<HH", screen, screen) + b"\x80\0\0" + bytes(6) + picture


def tiff(side, tile=None):
    """A TIFF of one deflated strip, or of a tile of other sides than the image's."""
    place = (322, 323, 324, 325) if tile else (None, 278, 273, 279)
    tags = {256: side, 257: side, 258: 8, 259: 8, 262: 1, 277: 1}
    tags |= dict(zip(place, (tile, tile or side, 200, 64), strict=True))
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted((t, v) for t, v in tags.items() if t)]
    head = b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(4)
    return head.ljust(200, b"\0") + zlib.compress(bytes(1000)).ljust(64, b"\0")


def masked_jpeg():
    """A JPEG of gigapixels with a frame header of 8×8 where one is found by a reader that takes every marker to have a
    length: FF 01 has none, and the marker after it stands where its length would be."""
    masked = bytearray((b"\xff\xd8\xff\x01" + datasets.bomb_jpeg(65_000)[2:]).ljust(70_000, b"\0"))
    at = 4 + int.from_bytes(masked[4:6], "big")
    masked[at : at + 19] = b"\xff\xc0\0\x11\x08\0\x08\0\x08\x03" + bytes(9)
    return bytes(masked)


BOMBS = {
    "png": datasets.bomb_png(GIGA),
    "jpeg": datasets.bomb_jpeg(65_000),
    "masked jpeg": masked_jpeg(),
    "gif": gif(GIGA, GIGA),
    "gif of a larger frame": gif(8, GIGA),
    "bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, GIGA, GIGA, 1, 24, 0, 0, 0, 0, 0, 0) + bytes(50),
    "tiff": tiff(GIGA),
    "tiff of a larger tile": tiff(8, GIGA),
    "webp": riff(b"VP8 ", b"\x10\0\0\x9d\x01\x2a" + struct.pack("<HH", 16383, 16383) + bytes(20)),
    "lossless webp": riff(b"VP8L", b"\x2f" + struct.pack("<I", 16383 << 14 | 16383) + bytes(20)),
    "extended webp": riff(b"VP8X", bytes(4) + (GIGA - 1).to_bytes(3, "little") * 2),
}
PEAK = """
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


class TestImages:
    def test_gigapixels_in_a_small_file_take_no_memory(self, tmp_path):
        """Of Pillow's readers and of what stands before TensorFlow's, in a process of which nothing else grows."""
        small = {name: data for name, data in BOMBS.items() if name != "masked jpeg"}
        for name, data in small.items():
            assert len(data) < 3000
            (tmp_path / name).write_bytes(data)
        done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, timeout=60)
        told = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
        assert done.returncode == 0, done.stderr
        assert [name for name, _, _ in told] == [name for name in sorted(small) for _ in range(2)]
        assert max(int(grown) for _, grown, _ in told) < 64
        assert {lines for _, _, lines in told} == {"1"}
        assert "tensorflow" not in done.stderr

    @pytest.mark.parametrize("spec", ["decode", "decode(precise=True)", "decode(exif=True)", "decode(1)",
                                      "decode_jpeg_and_inception_crop(8)"])  # fmt: skip
    @pytest.mark.parametrize("name", BOMBS)
    def test_every_decoder_refuses_them_in_one_line(self, name, spec):
        with pytest.raises(ip.InputError, match=r"exceeds limit|broken image|not an image") as error:
            ip.Preprocess(spec)({"image": BOMBS[name]}, np.random.default_rng(0))
        assert len(str(error.value).splitlines()) == 1

    @pytest.mark.parametrize("name", ["png", "gif", "gif of a larger frame", "bmp", "tiff", "jpeg"])
    def test_the_limit_holds_where_another_library_took_pillows_away(self, name, monkeypatch):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        with pytest.raises(ip.InputError, match=r"the image announces .* exceeds limit of 178956970"):
            decode.decode(BOMBS[name], precise=True)

    def test_a_frame_header_is_not_passed_over_with_a_marker_that_has_no_length(self):
        with pytest.raises(ip.InputError, match="65000x65000"):
            decode.jpeg_size(BOMBS["masked jpeg"])

    def test_imagenets_largest_would_pass(self):
        data = datasets.bomb_jpeg(1)
        at = data.index(b"\xff\xc0") + 5
        assert decode.jpeg_size(data[:at] + struct.pack(">HH", 9331, 6530) + data[at + 4 :]) == (9331, 6530)

    def test_a_file_too_large_for_an_image_is_not_read(self, tmp_path):
        datasets.image_folder(tmp_path, train=2, val=1)
        source = ip.open_source("folder", data_dir=str(tmp_path))
        os.truncate(source.describe(0), folder.MOST_BYTES + 1)  # a hole: it takes no room on the disk
        with takes_less_than(1 << 20), pytest.raises(ip.InputError, match="1,073,741,825 bytes are no image"):
            source[0]


def frame(content, times=1, window_log=None):
    """A zstd frame of the same bytes many times, which does not announce its length."""
    zstandard = pytest.importorskip("zstandard")
    options = {"window_log": window_log} if window_log else {}
    packer = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(1, **options)
    ).compressobj()
    return b"".join(packer.compress(content) for _ in range(times)) + packer.flush()


def opened_text(path, kind="text", **options):
    return ip.open_source(kind, path=str(path), context=8, **options)


class TestText:
    @pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
    def test_a_line_without_end_is_refused_where_the_limit_is(self, tmp_path, monkeypatch, name):
        monkeypatch.setattr(documents, "LONGEST", 1 << 21)
        line = b"x" * (1 << 20)
        packed = frame(line, 2048) if name.endswith("zst") else line * 8
        (tmp_path / name).write_bytes(b"\n" + packed if name == "a.jsonl" else frame(b"\n") + packed)
        with (
            takes_less_than(128 << 20),
            pytest.raises(ip.InputError, match=rf"{name}:2: a line of more than 2,097,152 bytes") as error,
        ):
            opened_text(tmp_path / name)
        assert len(str(error.value).splitlines()) == 1

    def test_blocks_of_four_bytes_unpack_a_little_at_a_time(self, tmp_path):
        """zstd's best ratio, written by hand: blocks of 128 KiB of one repeated byte."""
        pytest.importorskip("zstandard")
        block = (0b010 | (128 << 10) << 3).to_bytes(3, "little") + b"x"
        packed = b"\x28\xb5\x2f\xfd\x00\x38" + block * 50_000  # 6.5 GB
        (tmp_path / "a.jsonl.zst").write_bytes(packed)
        with (
            takes_less_than(documents.LONGEST + (128 << 20)),
            pytest.raises(ip.InputError, match=r"a\.jsonl\.zst:1: a line of more than 134,217,728 bytes"),
        ):
            opened_text(tmp_path / "a.jsonl.zst")

    def test_a_window_beyond_the_memory_left_is_refused(self, tmp_path, monkeypatch):
        (tmp_path / "a.jsonl.zst").write_bytes(frame(b'{"text": "some words of text"}\n', window_log=27))
        assert len(opened_text(tmp_path / "a.jsonl.zst"))
        monkeypatch.setattr(memory, "available", lambda: 64 << 20)
        with pytest.raises(ip.InputError, match=r"a\.jsonl\.zst: a zstd frame needs a window of more than 33,554,432"):
            opened_text(tmp_path / "a.jsonl.zst")

    @pytest.mark.parametrize(("kind", "line"), [("text", b'{"text": "some words"}\n'),
                                                ("spans", b'{"inputs": "a", "targets": "b"}\n')])  # fmt: skip
    def test_short_lines_that_unpack_beyond_the_memory_left_are_refused(self, tmp_path, monkeypatch, kind, line):
        (tmp_path / "a.jsonl.zst").write_bytes(frame(line * 1000, 20))
        assert len(opened_text(tmp_path / "a.jsonl.zst", kind))
        monkeypatch.setattr(memory, "available", lambda: 300_000)
        with pytest.raises(ip.InputError, match=r"a\.jsonl\.zst: its tokens do not fit"):
            opened_text(tmp_path / "a.jsonl.zst", kind)

    def test_empty_documents_are_not_gathered_without_end(self):
        """Those without a single character are tokenised together with others, but not all of them."""
        read = 0

        def endless():
            nonlocal read
            while True:
                read += 1
                yield documents.Document(("", ""), "a.jsonl:1", "a.jsonl:1", 0)

        next(documents.encoded(endless(), tokenizer.ByteTokenizer()))
        assert read <= documents.BATCH

    def test_a_text_file_larger_than_memory_is_not_read(self, tmp_path, monkeypatch):
        (tmp_path / "a.txt").write_bytes(b"x" * 1000)
        monkeypatch.setattr(memory, "available", lambda: 1999)
        with pytest.raises(ip.InputError, match=r"a\.txt: one document of"):
            opened_text(tmp_path / "a.txt")

    @pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' + "[" * 100_000, '{"text": ' + "9" * 10_000])
    def test_json_that_stops_pythons_parser_is_one_line(self, tmp_path, line):
        (tmp_path / "a.jsonl").write_text(line)
        with pytest.raises(ip.InputError, match=r"a\.jsonl:1: not JSON") as error:
            opened_text(tmp_path / "a.jsonl")
        assert len(str(error.value).splitlines()) == 1


class TestTokens:
    @pytest.mark.parametrize("counts", [(1 << 63, 1 << 63), (2**64 - 1, 0), (1 << 40, 1), (0, 1 << 50)])
    def test_an_index_of_absurd_counts_is_refused_unread(self, tmp_path, counts):
        prefix = corpora.write_megatron(tmp_path / "a", [[1, 2, 3], [4, 5]])
        content = prefix.with_suffix(".idx").read_bytes()
        prefix.with_suffix(".idx").write_bytes(content[:18] + struct.pack("<QQ", *counts) + content[34:])
        with (
            takes_less_than(1 << 20),
            pytest.raises(ip.InputError, match=r"a\.idx has \d+ bytes, its header needs [\d,]+"),
        ):
            megatron.read_index(str(prefix))

    def test_bytes_that_are_no_whole_tokens_are_refused(self, tmp_path):
        index = b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 3, 5, 0, 1, 0, 1, 2)
        (tmp_path / "a.idx").write_bytes(index)
        (tmp_path / "a.bin").write_bytes(bytes(11))
        with pytest.raises(ip.InputError, match=r"a\.bin has 11 bytes, which are no tokens of 2 bytes each"):
            opened_text(tmp_path / "a", "megatron")

    @pytest.mark.parametrize(
        ("about", "match"),
        [
            ("[" * 100_000, r"cannot read .*a\.json"),
            ('{"vocab_size": %s}' % ("9" * 5000), r"cannot read .*a\.json"),
            ('{"vocab_size": 1000000000000000}', r"a vocabulary of 1,000,000,000,000,000 tokens"),
            ('{"vocab_size": -1}', r"a vocabulary of -1 tokens"),
        ],
    )
    def test_a_description_that_is_absurd_is_one_line(self, tmp_path, about, match):
        prefix = corpora.write_megatron(tmp_path / "a", [[1, 2, 3], [4, 5]])
        prefix.with_suffix(".json").write_text(about)
        with pytest.raises(ip.InputError, match=match) as error:
            opened_text(prefix, "megatron")
        assert len(str(error.value).splitlines()) == 1

    def test_a_tokenizer_that_numbers_its_tokens_absurdly_is_refused(self, tmp_path):
        pytest.importorskip("tokenizers")
        file = corpora.train_tokenizer(tmp_path / "tokenizer.json")
        content = json.loads(file.read_text())
        content["model"]["vocab"]["absurd"] = 2**32 - 1
        file.write_text(json.dumps(content))
        with pytest.raises(ip.InputError, match=r"tokenizer\.json numbers a token 4,294,967,295"):
            tokenizer.open_tokenizer(str(file))

    def test_a_tokenizer_that_fails_on_a_text_is_named(self, tmp_path):
        pytest.importorskip("tokenizers")
        file = corpora.train_tokenizer(tmp_path / "tokenizer.json", "words")
        content = json.loads(file.read_text())
        content["model"]["unk_token"] = "absent"
        file.write_text(json.dumps(content))
        (tmp_path / "a.txt").write_text("unheard of")
        with pytest.raises(ip.InputError, match=r"tokenizer\.json cannot tokenise: "):
            opened_text(tmp_path / "a.txt", tokenizer=str(file))


def write_tfrecord(path, length, content=b""):
    """A TFRecord file of one record whose length has a valid checksum, whatever it is."""
    head = struct.pack("<Q", length)
    path.write_bytes(head + tfrecord._checksum(head) + content)
    return path


class TestRecords:
    @pytest.fixture(autouse=True)
    def _checksums(self):
        pytest.importorskip("google_crc32c")

    @pytest.mark.parametrize("length", [2**64 - 1, 1 << 63, 1 << 50, 100])
    def test_a_record_longer_than_its_file_is_refused(self, tmp_path, length):
        with pytest.raises(ip.InputError, match="damaged or cut off in record 0"):
            tfrecord.TFRecordFile(str(write_tfrecord(tmp_path / "a.tfrecord", length, b"some")))

    def test_a_record_in_a_hole_of_a_terabyte_is_refused(self, tmp_path):
        path = write_tfrecord(tmp_path / "a.tfrecord", 1 << 40)
        try:
            os.truncate(path, (1 << 40) + 16)
        except OSError:
            pytest.skip("no files of that size here")
        with pytest.raises(ip.InputError, match="record 0 has 1,099,511,627,776 bytes"):
            tfrecord.TFRecordFile(str(path))

    @pytest.mark.parametrize("middle", [1, 30, -(1 << 62), 1 << 62])
    def test_an_index_from_elsewhere_is_believed_only_where_it_can_be(self, tmp_path, middle):
        path = write_tfrecord(tmp_path / "a.tfrecord", 16, b"sixteen of bytes")
        path.write_bytes(path.read_bytes() + tfrecord._checksum(b"sixteen of bytes"))
        state = tfrecord._stat(str(path))
        kept = struct.pack("<2q", *state) + np.array([0, middle, state[0]], "<i8").tobytes()
        (tmp_path / "a.tfrecord.offsets").write_bytes(kept)
        file = tfrecord.TFRecordFile(str(path))
        assert (len(file), file.read(0)) == (1, b"sixteen of bytes")

    @pytest.mark.parametrize("key", ["pythonClassName", "type"])
    def test_features_of_a_prepared_set_import_no_module_of_their_choice(self, tmp_path, monkeypatch, key):
        pytest.importorskip("tensorflow_datasets")
        place = tmp_path / "pets/1.0.0"
        place.mkdir(parents=True)
        (tmp_path / "hostile_features.py").write_text("raise SystemExit('executed')")
        monkeypatch.syspath_prepend(tmp_path)
        (place / "dataset_info.json").write_text('{"name": "pets", "version": "1.0.0"}')
        hostile = {key: "hostile_features.Image"}
        features = {"pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
                    "featuresDict": {"features": {"image": hostile}}}  # fmt: skip
        (place / "features.json").write_text(json.dumps(features))
        with pytest.raises(ip.InputError, match=r"hostile_features\.Image is no feature of tensorflow-datasets"):
            tfds.Source("pets", "train", str(tmp_path))


class Broken:
    """A source whose example `bad` raises; the others are the numbers of theirs."""

    class_names = None

    def __init__(self, error, bad=5, size=12):
        self.error, self.bad, self.size = error, bad, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.bad:
            raise self.error
        return {"image": np.int64(index)}

    def describe(self, index):
        return f"/data/{index}.jpg"

    def nbytes(self):
        return 0


def streams(source, **options):
    """Training and evaluation, both to the end of the data."""
    yield lambda: [b for _, b in zip(range(4), ip.train_batches(source, "", 4, seed=0, **options), strict=False)]
    yield lambda: list(ip.eval_batches(source, "", 4, **options))


ERRORS = {
    "MemoryError": MemoryError(),
    "OSError: [Errno 5] Input/output error": OSError(5, "Input/output error"),
    "ValueError: the first line": ValueError("the first line\nand another"),
    "RuntimeError": RuntimeError(),
    "StopIteration": StopIteration(),
}


class TestErrors:
    @pytest.mark.parametrize("threads", [0, 1, 3])
    @pytest.mark.parametrize("policy", ["fail", "skip"])
    @pytest.mark.parametrize("told", ERRORS)
    def test_what_the_data_is_not_to_blame_for_names_the_example_and_is_never_skipped(self, told, policy, threads):
        for stream in streams(Broken(ERRORS[told]), corrupt=ip.CorruptPolicy(policy), threads=threads):
            with pytest.raises(ip.ReadingError) as error:
                stream()
            assert str(error.value) == f"/data/5.jpg: {told}"

    def test_what_the_data_is_to_blame_for_is_skipped_as_before(self, caplog):
        for stream in streams(Broken(ip.InputError("broken image")), corrupt=ip.CorruptPolicy("skip")):
            assert 5 not in np.concatenate([batch["image"] for batch in stream()])
        assert "skipped /data/5.jpg: broken image" in caplog.text

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("threads", [0, 2])
    def test_what_ends_the_program_passes_through(self, error, threads):
        for stream in streams(Broken(error()), threads=threads):
            with pytest.raises(error):
                stream()

    def test_a_file_that_cannot_be_read_is_not_skipped(self, tmp_path):
        datasets.image_folder(tmp_path, train=4, val=1)
        source = ip.open_source("folder", data_dir=str(tmp_path))
        gone = source.describe(7)
        Path(gone).unlink()
        stream = ip.train_batches(
            source, "decode(precise=True)|resize_pillow(8)", 12, 0, corrupt=ip.CorruptPolicy("skip")
        )
        with pytest.raises(ip.ReadingError, match=f"{gone}: No such file"):
            next(stream)

    def test_an_error_of_an_op_is_not_skipped_and_one_of_its_data_is(self, caplog):
        class Odd(Broken):
            def __getitem__(self, index):
                return {"image": np.zeros((4, 4, 3), np.uint8) if index != self.bad else self.error}

        corrupt = ip.CorruptPolicy("skip")
        with pytest.raises(ip.ReadingError, match=r"/data/5\.jpg: preprocessing: \w+Error: "):
            list(ip.eval_batches(Odd("text"), "resize_pillow(2)", 4, corrupt=corrupt))
        small = Odd(np.zeros((1, 1, 3), np.uint8))
        assert sum(batch["_mask"].sum() for batch in ip.eval_batches(small, "random_crop(2)", 4, corrupt=corrupt)) == 11
        assert "skipped /data/5.jpg" in caplog.text

    def test_memory_that_is_short_while_decoding_is_not_damage(self, monkeypatch):
        def short(*_, **__):
            raise MemoryError

        monkeypatch.setattr(Image.Image, "convert", short)
        with pytest.raises(MemoryError):
            decode.decode(datasets.jpeg(0), precise=True)


class TestWatching:
    def test_what_every_thread_reads_is_told_while_it_does(self):
        class Stalled(Broken):
            def __getitem__(self, index):
                if index in (3, 8):
                    arrived.release()
                    assert going_on.wait(30)
                return super().__getitem__(index)

        arrived, going_on = threading.Semaphore(0), threading.Event()
        source = Stalled(None, bad=-1)
        assert ip.active_reads() == []
        got = []
        consumer = threading.Thread(target=lambda: got.extend(ip.eval_batches(source, "", 4, threads=2)))
        consumer.start()
        try:
            assert arrived.acquire(timeout=30)
            assert arrived.acquire(timeout=30)
            told = ip.active_reads()
        finally:
            going_on.set()
            consumer.join(30)
        assert [line.partition(": ")[0] for line in told] == ["input_0", "input_1"]
        assert sorted(line.partition(": ")[2] for line in told) == [f"/data/{i}.jpg (for 0 s)" for i in (3, 8)]
        assert len(got) == 3
        assert ip.active_reads() == []

    def test_it_tells_for_how_long(self, monkeypatch):
        now = time.monotonic()
        told = []

        class Slow(Broken):
            def __getitem__(self, index):
                monkeypatch.setattr(time, "monotonic", lambda: now + 12)
                told.extend(ip.active_reads())
                return super().__getitem__(index)

        monkeypatch.setattr(time, "monotonic", lambda: now)
        next(ip.eval_batches(Slow(None, bad=-1), "", 1, threads=0))
        assert told[0] == "MainThread: /data/0.jpg (for 12 s)"

    def test_an_example_that_failed_is_not_told_any_more(self):
        for stream in streams(Broken(ValueError())):
            with pytest.raises(ip.InputError):
                stream()
        assert ip.active_reads() == []

    @pytest.mark.parametrize("step", [0, 1, 2, 7])
    def test_batch_ids_are_those_of_the_batch(self, step):
        source = Broken(None, bad=-1, size=10)
        batch = next(ip.train_batches(source, "", 4, seed=3, start_step=step))
        told = ip.batch_ids(source, 4, 3, step)
        assert [row["index"] for row in told] == batch["image"].tolist()
        assert [row["id"] for row in told] == [f"/data/{index}.jpg" for index in batch["image"]]
        assert [(row["row"], row["epoch"]) for row in told] == [(i, (step * 4 + i) // 10) for i in range(4)]
        json.dumps(told)

    @pytest.mark.parametrize(("size", "step"), [(0, 0), (4, -1)])
    def test_a_batch_that_does_not_exist_has_none(self, size, step):
        with pytest.raises(ip.InputError, match="no batch at step"):
            ip.batch_ids(Broken(None), size, 0, step)


def test_memory_left_is_that_of_the_container_with_the_cache_of_files_counted_as_free(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    machine = memory.available()
    assert machine is None or 0 < machine < 1 << 50
    for name, content in {"max": "1000\n", "current": "700\n", "stat": "anon 500\ninactive_file 150\n"}.items():
        (tmp_path / f"memory.{name}").write_text(content)
    assert memory.available() == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert abs((memory.available() or 0) - (machine or 0)) < 4 << 30
    monkeypatch.setattr(memory, "MACHINE", tmp_path / "none")
    assert memory.available() is None
