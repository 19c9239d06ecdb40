"""Rows of tokens: the same from every form of the data, each token once, and what is wrong with data named."""

import itertools
import json
import pickle
import subprocess
import sys
import sysconfig
from pathlib import Path

import corpora
import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline import source as source_module
from input_pipeline.text import documents, megatron, tokenizer
from input_pipeline.text import files as text_kind

CONTEXT = 16


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """A trained tokenizer.json of bytes."""
    return corpora.train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(params=["bytes", "trained"])
def spelt(request, gpt):
    """The tokenizer of a source: None for bytes, or a file."""
    return None if request.param == "bytes" else gpt


def rows(source):
    return [{key: value.tolist() for key, value in source[i].items()} for i in range(len(source))]


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key])


def forms(tmp_path, path, texts, context=CONTEXT):
    """The same documents as every kind of data that can hold them; their tokens fill whole rows."""
    sequences, end = corpora.oracle(path, texts)
    stream = [token for sequence in sequences for token in (*sequence, end)]
    assert len(stream) % (context + 1) == 0
    opened = tokenizer.open_tokenizer(path and str(path))
    corpora.write_jsonl(tmp_path / "a.jsonl", texts)
    corpora.write_jsonl(tmp_path / "b.jsonl.zst", texts)
    for i, text in enumerate(texts):
        corpora.write(tmp_path / "txt" / f"{i:03}.txt", text.encode())
    with megatron.Writer(str(tmp_path / "written"), opened.vocab_size, end) as writer:
        for sequence in sequences:
            writer.add([*sequence, end])
    chunks = [stream[i : i + context + 1] for i in range(0, len(stream), context + 1)]
    corpora.write_megatron(tmp_path / "rows", chunks)
    half = len(chunks) // 2
    for name, part in (("0", chunks[:half]), ("1", chunks[half:])):
        records = [corpora.example({"input_ids": chunk, "other": [1, 2]}) for chunk in part]
        corpora.write_input_ids(tmp_path / "records" / f"pile.tfrecord-{name}", records)
    read = {"context": context, "tokenizer": path and str(path)}
    known = {"context": context, "vocab_size": opened.vocab_size, "end_of_text": end}
    return {
        "jsonl": ip.open_source("text", path=str(tmp_path / "a.jsonl"), **read),
        "zst": ip.open_source("text", path=str(tmp_path / "*.zst"), **read),
        "txt": ip.open_source("text", path=str(tmp_path / "txt"), **read),
        "written": ip.open_source("megatron", path=str(tmp_path / "written"), context=context),
        "rows": ip.open_source("megatron", path=str(tmp_path / "rows.bin"), **known),
        "input_ids": ip.open_source("input_ids", path=str(tmp_path / "records"), **known),
    }


def filled(path, texts, context=CONTEXT):
    """The texts, the last one such that their tokens fill whole rows."""
    sequences, _ = corpora.oracle(path, texts)
    missing = -(sum(map(len, sequences)) + len(sequences)) % (context + 1)
    return [*texts, "\x01" * (missing - 1 if missing > 1 else missing + context)] if missing else texts


class TestForms:
    @pytest.fixture
    def sources(self, tmp_path, spelt):
        pytest.importorskip("tensorflow")
        return forms(tmp_path, spelt, filled(spelt, corpora.documents()))

    def test_all_hold_the_rows_of_plain_packing(self, sources, spelt):
        texts = filled(spelt, corpora.documents())
        expected = corpora.packed(*corpora.oracle(spelt, texts), CONTEXT)
        vocab_size = tokenizer.open_tokenizer(spelt and str(spelt)).vocab_size
        for name, source in sources.items():
            assert rows(source) == expected, name
            assert (source.context, source.vocab_size, source.class_names) == (CONTEXT, vocab_size, None)
            assert source.end_of_text == corpora.oracle(spelt, [""])[1]
            assert (source[0]["tokens"].dtype, source[0]["is_target"].dtype) == (np.int32, bool)
            with pytest.raises(IndexError):
                source[len(source)]

    def test_training_batches_are_the_same_resumed_anywhere_and_for_any_number_of_hosts(self, sources):
        whole = list(itertools.islice(ip.train_batches(sources["txt"], "", 8, seed=3), 12))
        for source in sources.values():
            for one, other in zip(ip.train_batches(source, "", 8, seed=3), whole, strict=False):
                assert_same(one, other)
            for start in (1, 5, 11):
                assert_same(next(ip.train_batches(source, "", 8, seed=3, start_step=start)), whole[start])
            for hosts in (2, 4):
                shares = np.split(np.arange(8), hosts)
                parts = [next(ip.train_batches(source, "", 8, 3, 2, rows=rows.tolist())) for rows in shares]
                assert_same({k: np.concatenate([part[k] for part in parts]) for k in parts[0]}, whole[2])

    def test_wrapped_or_not_they_say_what_they_are(self, sources):
        for source in sources.values():
            wrapped = source_module._CachedSource(source_module._LimitedSource(source, 5))
            for name in ("context", "vocab_size", "end_of_text", "class_names"):
                assert getattr(wrapped, name) == getattr(source, name)
            assert (len(wrapped), rows(wrapped)) == (5, rows(source)[:5])
            assert not hasattr(wrapped, "no_such_attribute")
            assert isinstance(wrapped, ip.Source)
            assert len(pickle.loads(pickle.dumps(wrapped.source))) == 5


@pytest.mark.parametrize("tokens", [2, 16, 17, 18, 19, 33, 34, 35, 36])
def test_evaluation_counts_every_token_once(tmp_path, tokens):
    """But the first of each row, which nothing precedes; a single token that is left over makes no row."""
    text = "".join(chr(33 + i) for i in range(tokens - 1))
    source = ip.open_source("text", path=str(corpora.write(tmp_path / "a.txt", text.encode())), context=CONTEXT)
    assert rows(source) == corpora.packed([list(text.encode())], 256, CONTEXT)
    batches = list(ip.eval_batches(source, "", 2))
    counted = np.concatenate([batch["tokens"][batch["is_target"]] for batch in batches]).tolist()
    stream = [*text.encode(), 256]
    assert counted == [token for i, token in enumerate(stream) if i % (CONTEXT + 1)]


class TestStdlib:
    def test_the_splits_share_no_file_and_are_text(self):
        splits = {split: ip.open_source("stdlib", split=split) for split in ("train", "validation")}
        files = {split: set(source.files) for split, source in splits.items()}
        assert not files["train"] & files["validation"]
        assert "json/decoder.py" in files["train"] | files["validation"]
        assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in set.union(*files.values()))
        assert 0.02 < len(files["validation"]) / len(files["train"]) < 0.1
        for source in splits.values():
            assert source.vocab_size == source.tokens.max() + 1 == 257
            assert (source.tokens == 256).sum() == len(source.files)
            assert source.tokens[-1] == 256
            assert source.nbytes() == 2 * len(source.tokens)
            bytes.decode(bytes(source.tokens[source.tokens < 256].tolist()[:10_000]))

    def test_its_rows_are_those_of_the_same_files_read_as_text(self, tmp_path):
        source = ip.open_source("stdlib", split="validation", context=256)
        for i, name in enumerate(source.files):
            corpora.write(tmp_path / f"{i:05}.txt", (Path(sysconfig.get_path("stdlib")) / name).read_bytes())
        same = ip.open_source("text", path=str(tmp_path), context=256)
        assert len(same) == len(source)
        for one, other in itertools.islice(
            zip(ip.train_batches(same, "", 32, 0), ip.train_batches(source, "", 32, 0), strict=True), 3
        ):
            assert_same(one, other)
        assert source.describe(0).endswith(f"row 0, {source.files[0]}")

    @pytest.mark.parametrize(("options", "message"), [
        ({"split": "test"}, "no split 'test'"), ({"context": 0}, "context=0 should be 1 or more"),
    ])  # fmt: skip
    def test_what_is_wrong_is_named(self, options, message):
        with pytest.raises(ip.InputError, match=message):
            ip.open_source("stdlib", **options)


class TestTokenizers:
    @pytest.mark.parametrize("spelling", ["bytes", "nested", "text"])
    def test_token_bytes_add_up_to_the_text_and_decoding_returns_it(self, tmp_path, spelling):
        opened = tokenizer.open_tokenizer(str(corpora.train_tokenizer(tmp_path / "tokenizer.json", spelling)))
        assert opened.token_bytes.shape == (opened.vocab_size,)
        assert opened.token_bytes.dtype == np.int32
        assert opened.token_bytes[opened.end_of_text] == 0
        for text in corpora.documents():
            ids = opened.encode(text)
            assert opened.end_of_text not in ids
            assert opened.token_bytes[ids].sum() == len(text.encode())
            assert opened.decode([*ids, opened.end_of_text]) == text
            assert opened.encode_batch([text, "x"])[0].tolist() == ids

    def test_bytes_are_their_own_tokens(self):
        opened = tokenizer.open_tokenizer(None)
        for text in corpora.documents():
            ids = opened.encode(text)
            assert ids == list(text.encode())
            assert opened.token_bytes[[*ids, 256]].sum() == len(ids)
            assert opened.decode([*ids, 256]) == text

    def test_a_character_cut_short_decodes_to_a_mark(self, gpt):
        for opened in (tokenizer.open_tokenizer(None), tokenizer.open_tokenizer(str(gpt))):
            ids = opened.encode("a🧪")
            shown = [opened.decode(ids[:n]) for n in range(1, len(ids) + 1)]
            assert shown == ["a", *["a\ufffd"] * (len(ids) - 2), "a🧪"]
            assert len(ids) > 3

    def test_what_is_not_known_is_none(self, tmp_path):
        path = corpora.train_tokenizer(tmp_path / "tokenizer.json", "words")
        assert tokenizer.open_tokenizer(str(path)).token_bytes is None

    def test_a_template_and_truncation_of_the_file_are_not_applied(self, tmp_path, gpt):
        from tokenizers import Tokenizer, processors

        changed = Tokenizer.from_file(str(gpt))
        changed.post_processor = processors.TemplateProcessing(
            single=f"{corpora.END} $A", special_tokens=[(corpora.END, 1)]
        )
        changed.enable_truncation(4)
        changed.enable_padding(length=9)
        changed.save(str(tmp_path / "tokenizer.json"))
        one, other = (tokenizer.open_tokenizer(str(path)) for path in (gpt, tmp_path))
        for text in corpora.documents():
            assert one.encode(text) == other.encode(text) == other.encode_batch([text])[0].tolist()

    def test_what_is_wrong_is_named(self, tmp_path, gpt):
        with pytest.raises(ip.MissingDataError, match=r"no tokenizer .*nowhere: give a tokenizer\.json"):
            tokenizer.open_tokenizer(str(tmp_path / "nowhere"))
        broken = corpora.write(tmp_path / "tokenizer.json", b'{"model": 3}')
        with pytest.raises(ip.InputError, match=r"tokenizer\.json is no tokenizer\.json: "):
            tokenizer.open_tokenizer(str(broken))
        with pytest.raises(ip.InputError, match=r"no special token '<\|endoftex\|>' .*did you mean '<\|endoftext\|>'"):
            tokenizer.open_tokenizer(str(gpt), "<|endoftex|>")
        content = json.loads(gpt.read_text())
        for token in content["added_tokens"]:
            token["special"] = False
        broken.write_text(json.dumps(content))
        with pytest.raises(ip.InputError, match="has no special token"):
            tokenizer.open_tokenizer(str(broken))

    @pytest.mark.parametrize("module", ["tokenizers", "zstandard"])
    def test_what_is_not_installed_is_named_with_its_extra(self, monkeypatch, tmp_path, gpt, module):
        path = corpora.write_jsonl(tmp_path / "a.jsonl.zst", ["x"])
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ip.InputError, match=r'not installed: pip install "dcvit\[lm\]"'):
            ip.open_source("text", path=str(path), context=4, tokenizer=str(gpt))


class TestText:
    def open(self, path, **options):
        return ip.open_source("text", **{"path": str(path), "context": CONTEXT, **options})

    def test_files_come_in_order_and_hidden_other_and_empty_ones_not_at_all(self, tmp_path):
        lines = '{"text": "3"}\n\n{"text": ""}\n{"text": "4"}'
        for name, text in {
            "b.txt": "2", "a/z.txt": "1", "c.jsonl": lines, ".d.txt": "5", ".e/f.txt": "6", "g.md": "7", "h.txt": "",
        }.items():  # fmt: skip
            corpora.write(tmp_path / name, text.encode())
        assert self.open(tmp_path).tokens.tolist() == [token for digit in b"1234" for token in (digit, 256)]

    def test_a_split_is_chosen_by_document(self, tmp_path, spelt):
        texts = [f"document {i}" for i in range(400)]
        path = corpora.write_jsonl(tmp_path / "a.jsonl", texts)
        opened = tokenizer.open_tokenizer(spelt and str(spelt))
        found = {}
        for split in ("train", "validation"):
            options = {"split": split, "validation_fraction": 0.1, "tokenizer": spelt and str(spelt)}
            stream = self.open(path, **options).tokens.tolist()
            assert stream.pop() == opened.end_of_text
            pieces = [list(g) for end, g in itertools.groupby(stream, lambda t: t == opened.end_of_text) if not end]
            found[split] = [opened.decode(piece) for piece in pieces]
        assert sorted(found["train"] + found["validation"]) == sorted(texts)
        assert 20 < len(found["validation"]) < 60
        corpora.write_jsonl(tmp_path / "a.jsonl", texts[:300])
        fewer = self.open(path, split="validation", validation_fraction=0.1).tokens
        assert (fewer == 256).sum() == sum(text in texts[:300] for text in found["validation"])

    def test_lines_are_whole_wherever_the_file_is_cut_into_pieces(self, tmp_path, monkeypatch):
        texts = corpora.documents()
        paths = [corpora.write_jsonl(tmp_path / name, texts, key="body") for name in ("a.jsonl", "b.jsonl.zst")]
        for piece in (1, 7, 100):
            monkeypatch.setattr(documents, "PIECE", piece)
            for path in paths:
                read = list(documents.read_documents(documents.find_files(str(path)), ("body",)))
                assert [document.texts[0] for document in read] == texts
                assert [document.where for document in read] == [f"{path}:{i + 1}" for i in range(len(texts))]
                assert read[-1].read <= path.stat().st_size

    @pytest.mark.parametrize(
        ("name", "content", "options", "message"),
        [
            ("a.jsonl", b'{"text": "x"}\n{"text": \n', {}, r"a\.jsonl:2: not JSON: Expecting value at character"),
            ("a.jsonl", b'\n\n{"text": "x\xff"}', {}, r"a\.jsonl:3: not UTF-8: invalid start byte at byte 12"),
            ("a.jsonl", b'{"txet": "x"}', {}, r"a\.jsonl:1: no key 'text'; did you mean 'txet'"),
            ("a.jsonl", b'{"text": ["x"]}', {}, r"a\.jsonl:1: 'text' is list, expected a string"),
            ("a.jsonl", b'["text"]', {}, r"a\.jsonl:1: list instead of a JSON object"),
            ("a.jsonl", b'{"text": "\\ud800"}', {}, r"a\.jsonl:1: 'text' is not Unicode: surrogates not allowed"),
            ("a.jsonl", b"[" * 100_000, {}, r"a\.jsonl:1: not JSON of a document"),
            ("a.jsonl", b'{"text": "x", "n": ' + b"1" * 5000 + b"}", {}, r"a\.jsonl:1: not JSON of a document"),
            ("a.jsonl.zst", b'{"text": "x"}\nno', {}, r"a\.jsonl\.zst:2: not JSON"),
            ("a.txt", b"one\ntwo\nth\xc3(ree", {}, r"a\.txt:3: not UTF-8: invalid continuation byte at byte 3"),
            ("a.txt", b"", {}, "holds no text, of split 'train'"),
            (
                "a.txt",
                b"x",
                {"validation_fraction": 1e-9, "split": "validation"},
                "holds no text, of split 'validation'",
            ),
            ("a.txt", b"x", {"split": "validation"}, "is empty without a validation_fraction"),
            ("a.txt", b"x", {"split": "test"}, "no split 'test'"),
            ("a.txt", b"x", {"validation_fraction": 1.5}, "at least 0 and below 1"),
            ("a.txt", b"x", {"context": 0}, "context=0"),
            ("a.md", b"x", {}, r"a\.md: expected a name ending in \.txt, \.jsonl, \.jsonl\.zst"),
            ("a.txt", b"x", {"path": "s3://a/b"}, "only local files"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path, name, content, options, message):
        path = corpora.write(tmp_path / name, content)
        with pytest.raises(ip.InputError, match=message) as error:
            self.open(**{"path": path, **options})
        assert "\n" not in str(error.value)

    def test_no_files_are_said(self, tmp_path):
        for path in (tmp_path, tmp_path / "nowhere", tmp_path / "*.txt"):
            with pytest.raises(ip.MissingDataError, match="no files at "):
                self.open(path)

    @pytest.mark.parametrize("frames", [1, 3])
    def test_a_zst_cut_off_anywhere_is_refused(self, tmp_path, frames):
        lines = b'{"text": "x"}\n' * 60
        whole = corpora.write(tmp_path / "a.jsonl.zst", lines, frames).read_bytes()
        sizes = [len(whole) // frames * i for i in range(frames)][1:]  # where a frame ends, nothing can be noticed
        for end in {*range(len(whole))} - {*sizes}:
            path = tmp_path / "a.jsonl.zst"
            path.write_bytes(whole[:end])
            with pytest.raises(ip.InputError, match=rf"{path} is cut off at byte {end}: its last zstd frame"):
                self.open(path)

    def test_a_damaged_zst_is_refused(self, tmp_path):
        whole = corpora.write_jsonl(tmp_path / "a.jsonl.zst", corpora.documents()).read_bytes()
        for at in range(0, len(whole), 17):
            (tmp_path / "a.jsonl.zst").write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
            with pytest.raises(ip.InputError, match=r"a\.jsonl\.zst"):
                self.open(tmp_path / "a.jsonl.zst")

    def test_too_much_is_referred_to_the_command(self, tmp_path, monkeypatch):
        monkeypatch.setattr(text_kind, "MOST_BYTES", 10)
        with pytest.raises(ip.InputError, match=r"python -m dcvit\.tokenize --data .* kind='megatron'"):
            self.open(corpora.write(tmp_path / "a.txt", b"x" * 11))

    def test_progress_is_said_where_it_takes_long(self, tmp_path, monkeypatch, caplog):
        caplog.set_level("INFO")
        path = corpora.write(tmp_path / "a.txt", b"x" * 50)
        self.open(path)
        assert not caplog.messages
        monkeypatch.setattr(text_kind, "SILENT_SECONDS", -1.0)
        self.open(path)
        assert caplog.messages == [f"tokenising {path}: 0 of 0 MB"]


def test_a_library_that_only_tokens_need_is_not_imported_for_others():
    code = "import sys, input_pipeline as ip; ip.open_source('stdlib', split='validation'); "
    code += "sys.exit(any(m in sys.modules for m in ('tokenizers', 'zstandard', 'tensorflow', 'jax')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
