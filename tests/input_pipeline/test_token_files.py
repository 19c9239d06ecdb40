"""Tokens that are in files already, and rows of inputs and targets: opened quickly, checked, bad ones named."""

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys

import corpora
import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline.text import megatron, tfrecord_tokens

CONTEXT = 16
RNG = np.random.default_rng(0)


def rows(source):
    return [{key: value.tolist() for key, value in source[i].items()} for i in range(len(source))]


def sequences(n=30, longest=40, high=60_000):
    return [RNG.integers(1, high, RNG.integers(1, longest)).tolist() for _ in range(n)]


def opened(path, **options):
    return ip.open_source("megatron", **{"path": str(path), "context": CONTEXT, "vocab_size": 65_536, **options})


def written(prefix, stored, vocab_size=10, end_of_text=None):
    with megatron.Writer(str(prefix), vocab_size, end_of_text) as writer:
        for sequence in stored:
            writer.add(sequence)


class TestMegatron:
    @pytest.mark.parametrize(
        ("code", "dtype", "high"),
        [(1, "u1", 256), (2, "i1", 128), (3, "<i2", 2**15), (4, "<i4", 2**20), (5, "<i8", 2**20), (8, "<u2", 2**16)],
    )
    def test_documents_of_every_dtype_are_packed_as_they_stand(self, tmp_path, code, dtype, high):
        stored = sequences(high=high)
        prefix = corpora.write_megatron(tmp_path / "pile", [[*s, 0] for s in stored], code, dtype)
        for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
            source = opened(path, vocab_size=high, end_of_text=0)
            assert rows(source) == corpora.packed(stored, 0, CONTEXT)
            assert (source.vocab_size, source.end_of_text, source.token_bytes) == (high, 0, None)
            assert source.describe(3) == f"{prefix}.bin, row 3"

    def test_a_folder_of_one_pair_is_that_pair(self, tmp_path):
        prefix = corpora.write_megatron(tmp_path / "pile", sequences())
        assert rows(opened(tmp_path)) == rows(opened(prefix))
        corpora.write_megatron(tmp_path / "another", sequences())
        with pytest.raises(ip.MissingDataError, match=r"expected one \.bin file in it, found another\.bin, pile\.bin"):
            opened(tmp_path)

    def test_a_vocabulary_below_that_of_the_files_is_refused(self, tmp_path):
        written(tmp_path / "pile", [[1, 2, 3]] * 20, vocab_size=500)
        with pytest.raises(ip.InputError, match=r"pile\.json tells of 500 tokens, vocab_size=499"):
            opened(tmp_path / "pile", vocab_size=499)

    def test_rows_are_chosen_as_by_a_slice(self, tmp_path):
        prefix = corpora.write_megatron(tmp_path / "pile", RNG.integers(0, 9, (50, CONTEXT + 1)).tolist())
        whole = rows(opened(prefix))
        assert len(whole) == 50
        for chosen in ((0, -7), (-7, None), (None, 7), (3, 30), (0, 10**9)):
            source = opened(prefix, rows=chosen)
            assert rows(source) == whole[slice(*chosen)]
            assert source.describe(0).endswith(f"row {range(50)[slice(*chosen)][0]}")
            assert source.nbytes() == 2 * (CONTEXT + 1) * len(source)

    def test_the_tokenizer_tells_what_tokens_stand_for_in_a_padded_vocabulary(self, tmp_path):
        path = corpora.train_tokenizer(tmp_path / "tokenizer.json")
        prefix = corpora.write_megatron(tmp_path / "pile", [[1, 2, 3] * 9, [5, 1]])
        source = opened(prefix, tokenizer=str(path), vocab_size=None)
        assert (len(source.token_bytes), source.end_of_text) == (source.vocab_size, 1)
        padded = opened(prefix, tokenizer=str(path), vocab_size=512, end_of_text=2)
        assert (padded.vocab_size, padded.end_of_text) == (512, 2)
        np.testing.assert_array_equal(padded.token_bytes[: source.vocab_size], source.token_bytes)
        assert not padded.token_bytes[source.vocab_size :].any()

    def test_a_token_out_of_the_vocabulary_is_named_at_once_or_when_it_is_read(self, tmp_path):
        stored = [[1] * (CONTEXT + 1) for _ in range(5)]
        stored[3][7] = 700
        prefix = corpora.write_megatron(tmp_path / "pile", stored)
        with pytest.raises(ip.InputError, match=r"pile\.bin, row 3: token 700 is not in the vocabulary of 700"):
            list(ip.eval_batches(opened(prefix, vocab_size=700), "", 2))
        with pytest.raises(ip.InputError, match=r"pile\.bin, row 3: token 700"):
            opened(prefix, vocab_size=700, rows=(3, None))
        assert len(list(ip.eval_batches(opened(prefix, vocab_size=701), "", 5))) == 1
        negative = corpora.write_megatron(tmp_path / "negative", [[1, -1, 2]], 4, "<i4")
        with pytest.raises(ip.InputError, match=r"negative\.bin, row 0: token -1"):
            opened(negative, vocab_size=None)

    @pytest.mark.parametrize(
        ("harm", "message"),
        [
            (lambda b, i: (b, b"MMIDIDY" + i[7:]), r"pile\.idx is no index of Megatron's"),
            (lambda b, i: (b, i[:20]), r"pile\.idx is no index of Megatron's"),
            (lambda b, i: (b, i[:9] + struct.pack("<Q", 2) + i[17:]), r"pile\.idx: version 2, expected 1"),
            (lambda b, i: (b, i[:17] + b"\x06" + i[18:]), r"pile\.idx: dtype code 6 \(floats\)"),
            (lambda b, i: (b, i[:17] + b"\x63" + i[18:]), r"pile\.idx: dtype code 99 \(unknown\)"),
            (lambda b, i: (b, i[:17] + b"\x04" + i[18:]), r"pile\.bin has .* bytes, .*pile\.idx needs"),
            (lambda b, i: (b, i[:-8]), r"pile\.idx has [\d,]+ bytes, its header needs [\d,]+: cut off"),
            (lambda b, i: (b, i[:18] + bytes(16)), r"pile\.idx holds no sequences, or .*pile\.bin no tokens"),
            (lambda b, i: (b[:-2], i), r"pile\.bin has .* bytes, .*pile\.idx needs .*: cut off, or not of one pair"),
            (lambda b, i: (b + b"\0\0", i), r"pile\.bin has .* bytes, .*pile\.idx needs"),
            (lambda b, i: (b"", i), r"or .*pile\.bin no tokens"),
            (lambda b, i: (None, i), r"no file .*pile\.bin: expected"),
            (lambda b, i: (b, None), r"no file .*pile\.idx: expected"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_with_the_pair_is_named(self, tmp_path, harm, message):
        prefix = corpora.write_megatron(tmp_path / "pile", sequences())
        files = [prefix.with_suffix(suffix) for suffix in (".bin", ".idx")]
        for file, content in zip(files, harm(*(file.read_bytes() for file in files)), strict=True):
            file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(ip.InputError, match=message) as error:
            opened(prefix)
        assert "\n" not in str(error.value)

    def test_rows_that_do_not_fit_the_context_are_refused(self, tmp_path):
        prefix = corpora.write_megatron(tmp_path / "pile", np.ones((9, 2049), int).tolist())
        with pytest.raises(ip.InputError, match="rows of 2049 tokens, the config's context 1024 needs 1025"):
            opened(prefix, context=1024)
        assert len(opened(prefix, context=2048)) == 9
        for chosen, message in (((9, None), "holds 9 rows, of which"), ((1,), "should be two numbers")):
            with pytest.raises(ip.InputError, match=message):
                opened(prefix, context=2048, rows=chosen)

    @pytest.mark.slow
    @pytest.mark.parametrize("equal", [True, False])
    def test_two_gigabytes_open_at_once_and_in_little_memory(self, tmp_path, equal):
        length, count = 2049, 524_288
        sizes = np.full(count, length, "<i4")
        sizes[:2] += [0, 0] if equal else [-1, 1]
        starts = np.cumsum(np.concatenate([[0], sizes[:-1]]), dtype="<i8") * 2
        header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1)
        order = np.arange(count + 1, dtype="<i8")
        (tmp_path / "pile.idx").write_bytes(header + sizes.tobytes() + starts.tobytes() + order.tobytes())
        with (tmp_path / "pile.bin").open("wb") as file:
            file.truncate(2 * int(sizes.sum()))
        assert (tmp_path / "pile.bin").stat().st_size > 2e9
        code = (
            "import time, input_pipeline as ip, input_pipeline.text.megatron\n"
            "def rss(): return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
            "before, start = rss(), time.monotonic()\n"
            f"source = ip.open_source('megatron', path={str(tmp_path / 'pile')!r}, context=2048, vocab_size=50304)\n"
            "source[len(source) // 2]; source[len(source) - 1]\n"
            "print(time.monotonic() - start, rss() - before, len(source))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        seconds, kilobytes, n = map(float, done.stdout.split())
        assert (n, seconds < 1, kilobytes < 50_000) == (count, True, True), done.stdout + done.stderr


class TestWriter:
    @pytest.mark.parametrize(("vocab_size", "code", "dtype"), [(65_536, 8, "<u2"), (65_537, 4, "<i4")])
    def test_it_writes_the_format_byte_for_byte(self, tmp_path, monkeypatch, vocab_size, code, dtype):
        monkeypatch.setattr(megatron, "CHUNK", 7)
        stored = sequences(high=vocab_size)
        written(tmp_path / "new" / "pile", stored, vocab_size, 0)
        expected = corpora.write_megatron(tmp_path / "expected", stored, code, dtype)
        for suffix in (".bin", ".idx"):
            assert (tmp_path / f"new/pile{suffix}").read_bytes() == expected.with_suffix(suffix).read_bytes()
        about = json.loads((tmp_path / "new/pile.json").read_bytes())
        tokens = sum(map(len, stored))
        assert about == {"vocab_size": vocab_size, "end_of_text": 0, "documents": len(stored), "tokens": tokens}
        source = ip.open_source("megatron", path=str(tmp_path / "new/pile"), context=CONTEXT)
        assert (source.vocab_size, source.end_of_text) == (vocab_size, 0)

    def test_a_description_of_another_pair_or_none_is_refused(self, tmp_path):
        written(tmp_path / "pile", [[1, 2, 3], [4, 5]])
        about = tmp_path / "pile.json"
        for content, message in (
            (about.read_text().replace('"documents": 2', '"documents": 3'), "json tells of 3 documents, the .idx 2"),
            (
                about.read_text().replace('"vocab_size": 10', '"vocab_size": "10"'),
                "expected a JSON object with numbers",
            ),
            (about.read_text().replace('"end_of_text": null', '"end_of_text": 10'), "end_of_text=10 is not in the voc"),
            ("{", r"cannot read .*pile\.json: "),
        ):
            about.write_text(content)
            with pytest.raises(ip.InputError, match=message):
                ip.open_source("megatron", path=str(tmp_path / "pile"), context=CONTEXT)

    def test_documents_of_one_length_are_documents(self, tmp_path):
        written(tmp_path / "pile", [[1, 2, 3]] * 20)
        source = ip.open_source("megatron", path=str(tmp_path / "pile"), context=CONTEXT)
        assert (len(source), source.end_of_text) == (4, None)

    def test_what_fails_leaves_nothing(self, tmp_path):
        for stored, message in (([[1, 2], [10]], "token 10 is not in the vocabulary of 10"), ([], "no documents to")):
            with pytest.raises(ip.InputError, match=message):
                written(tmp_path / "a", stored)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
    def test_it_overwrites_nothing(self, tmp_path, suffix):
        (tmp_path / f"a{suffix}").write_text("mine")
        with pytest.raises(ip.InputError, match=rf"a\{suffix} is there already"):
            megatron.Writer(str(tmp_path / "a"), 10)
        assert (tmp_path / f"a{suffix}").read_text() == "mine"

    def test_a_full_disk_is_said_in_one_line(self, tmp_path):
        (tmp_path / "a.bin.new").symlink_to("/dev/full")
        with pytest.raises(ip.InputError, match=r"^cannot write .*a\.bin: No space left on device$"):
            written(tmp_path / "a", [[1] * 100_000])
        assert not list(tmp_path.iterdir())

    def test_a_kill_leaves_nothing_that_opens(self, tmp_path):
        code = (
            "import sys, numpy as np, input_pipeline.text.megatron as m\n"
            f"with m.Writer({str(tmp_path / 'a')!r}, 10) as writer:\n"
            "    while True: writer.add(np.ones(1000, int)); print('x', flush=True)\n"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            process.stdout.read(100)
            process.send_signal(signal.SIGKILL)
        with pytest.raises(ip.MissingDataError, match="no file"):
            opened(tmp_path / "a")
        written(tmp_path / "a", [[1, 2]])
        assert len(opened(tmp_path / "a")) == 1
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.json"]


class TestInputIds:
    @pytest.fixture(autouse=True)
    def _tensorflow(self):
        pytest.importorskip("tensorflow")

    @pytest.mark.parametrize("high", [2, 128, 20_000, 2**31, 2**62])
    def test_numbers_are_read_as_tensorflow_wrote_them(self, high):
        for n in (1, 2, 300):
            for values in (RNG.integers(-high, high, n), RNG.integers(0, high, n)):
                record = corpora.example({"a": [1], "input_ids": values.tolist(), "z": []})
                assert tfrecord_tokens.read_input_ids(record).tolist() == values.tolist()
        assert tfrecord_tokens.read_input_ids(corpora.example({"input_ids": []})).tolist() == []

    def test_lists_that_are_not_packed_are_read_too(self):
        def message(field, content):
            return bytes([field << 3 | 2, len(content)]) + content

        feature = message(3, b"".join(b"\x08" + value for value in (b"\x05", b"\xac\x02", b"\x00")))
        record = message(1, message(1, message(1, b"input_ids") + message(2, feature)))
        assert tfrecord_tokens.read_input_ids(record).tolist() == [5, 300, 0]

    def test_any_bytes_are_numbers_or_refused(self):
        record = corpora.example({"input_ids": list(range(200))})
        for at in range(len(record)):
            for changed in (record[:at], record[:at] + bytes([record[at] ^ 1 << at % 8]) + record[at + 1 :]):
                with contextlib.suppress(ip.InputError):
                    assert tfrecord_tokens.read_input_ids(changed).dtype == np.int64

    @pytest.mark.parametrize(
        ("records", "message"),
        [
            ([{"input_ids": [1] * 17}, {"input_ids": [1] * 16}], "0, record 1: a row of 16 tokens, .* 16 needs 17"),
            ([{"input_ids": [1] * 17}, {"input_ids": [1] * 16 + [90]}], "0, record 1: token 90 is not in the vocab"),
            ([{"input_ids": [1] * 17}, {"inputs": [1] * 17}], "0, record 1: the record has no 'input_ids', but inputs"),
            ([{"input_ids": [1] * 2049}], "0, record 0: a row of 2049 tokens, the config's context 16 needs 17"),
            ([], "holds no examples"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path, records, message):
        corpora.write_input_ids(tmp_path / "train.tfrecord-0", [corpora.example(record) for record in records])
        with pytest.raises(ip.InputError, match=message):
            list(ip.eval_batches(ip.open_source("input_ids", path=str(tmp_path), context=16, vocab_size=90), "", 2))

    def test_files_are_found_by_folder_or_glob_and_damaged_ones_named(self, tmp_path):
        row = [corpora.example({"input_ids": [1] * 17})]
        for name in ("a/x.tfrecord-1", "a/x.tfrecord-0", "b/x"):
            corpora.write_input_ids(tmp_path / name, row)
        shutil.copy(tmp_path / "b" / "x", tmp_path / "a" / "notes")
        for _ in range(2):  # the second time, the index of each is there
            source = ip.open_source("input_ids", path=str(tmp_path), context=16)
            found = [source.describe(i).split(",")[0] for i in range(len(source))]
            assert found == [str(tmp_path / "a" / f"x.tfrecord-{i}") for i in (0, 1)]
        assert source.vocab_size is source.end_of_text is source.token_bytes is None
        assert len(ip.open_source("input_ids", path=str(tmp_path / "?" / "x*"), context=16)) == 3
        os.truncate(tmp_path / "a" / "x.tfrecord-1", 20)
        with pytest.raises(ip.InputError, match=r"x\.tfrecord-1 is damaged or cut off in record 0"):
            ip.open_source("input_ids", path=str(tmp_path), context=16)


class TestSpans:
    def open(self, folder, lines, **options):
        file = corpora.write(folder / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
        return ip.open_source("spans", **{"path": str(file), "context": 8} | options)

    @pytest.mark.parametrize(
        ("inputs", "targets", "tokens", "first"),
        [
            ("ab", "cd", [97, 98, 99, 100, 256], 2),
            ("", "cd", [256, 99, 100, 256], 1),
            ("abcdefgh", "xyz", [*b"defgh", *b"xyz", 256], 5),
            ("abcdefgh", "1234567", [*b"h1234567", 256], 1),
            ("", "1234567", [256, *b"1234567", 256], 1),
        ],
    )
    def test_the_loss_counts_the_targets_and_their_end(self, tmp_path, inputs, targets, tokens, first):
        source = self.open(tmp_path, [{"inputs": inputs, "targets": targets}])
        filling = 9 - len(tokens)
        assert rows(source) == [
            {
                "tokens": tokens + [0] * filling,
                "is_target": [False] * first + [True] * (len(tokens) - first) + [False] * filling,
            }
        ]
        assert (source.context, source.vocab_size, source.end_of_text) == (8, 257, 256)

    def test_each_line_is_a_row_and_named(self, tmp_path):
        path = corpora.train_tokenizer(tmp_path / "tokenizer.json")
        texts = corpora.documents(20)
        lines = [{"q": text, "a": text[::-1][:20]} for text in texts]
        source = self.open(tmp_path, lines, inputs="q", targets="a", context=64, tokenizer=str(path))
        assert source.describe(7) == f"{tmp_path / 'a.jsonl'}:8"
        (answers, end) = corpora.oracle(path, [line["a"] for line in lines])
        for row, answer in zip(rows(source), answers, strict=True):
            assert [t for t, target in zip(*row.values(), strict=True) if target] == [*answer, end]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ({"inputs": "ab", "targets": ""}, r"a\.jsonl:2: 'targets' is empty"),
            ({"inputs": "", "targets": ""}, r"a\.jsonl:2: 'targets' is empty"),
            ({"inputs": "", "targets": "12345678"}, r"a\.jsonl:2: targets of 8 tokens; .* context of 8 has room for 7"),
            ({"inputs": "x"}, r"a\.jsonl:2: no key 'targets'"),
            ({"inputs": 3, "targets": "x"}, r"a\.jsonl:2: 'inputs' is int, expected a string"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path, line, message):
        with pytest.raises(ip.InputError, match=message):
            self.open(tmp_path, [{"inputs": "a", "targets": "b"}, line])
        with pytest.raises(ip.InputError, match="holds no lines"):
            self.open(tmp_path, [])
        with pytest.raises(ip.InputError, match=r"a\.txt: expected a name ending in \.jsonl"):
            self.open(tmp_path, [], path=str(corpora.write(tmp_path / "a.txt", b"x")))
