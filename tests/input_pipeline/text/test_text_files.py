"""Text files: order, splits and progress, and errors that name the file, the line and the byte."""

import importlib.util
import itertools

import corpora
import pytest
from refusals import refused

import input_pipeline as ip
from input_pipeline.text import documents, files, tokenizer

CONTEXT = 16
needs_zstd = pytest.mark.skipif(importlib.util.find_spec("zstandard") is None, reason="needs zstandard")


def open_text(path, **options):
    return ip.open_source("text", **{"path": str(path), "context": CONTEXT, **options})


def test_files_are_read_in_order_without_hidden_other_and_empty_ones(tmp_path):
    lines = '{"text": "3"}\n\n{"text": ""}\n{"text": "4"}'
    for name, text in {
        "b.txt": "2", "a/z.txt": "1", "c.jsonl": lines, ".d.txt": "5", ".e/f.txt": "6", "g.md": "7", "h.txt": "",
    }.items():  # fmt: skip
        corpora.write(tmp_path / name, text.encode())
    assert open_text(tmp_path).tokens.tolist() == [token for digit in b"1234" for token in (digit, 256)]


@pytest.mark.slow
def test_split_of_a_document_does_not_depend_on_other_documents(tmp_path, tokenizer_path):
    texts = [f"document {i}" for i in range(400)]
    path = corpora.write_jsonl(tmp_path / "a.jsonl", texts)
    opened = tokenizer.open_tokenizer(tokenizer_path and str(tokenizer_path))
    found = {}
    for split in ("train", "validation"):
        options = {"split": split, "validation_fraction": 0.1, "tokenizer": tokenizer_path and str(tokenizer_path)}
        stream = open_text(path, **options).tokens.tolist()
        assert stream.pop() == opened.end_of_text
        pieces = [list(g) for end, g in itertools.groupby(stream, lambda t: t == opened.end_of_text) if not end]
        found[split] = [opened.decode(piece) for piece in pieces]
    assert sorted(found["train"] + found["validation"]) == sorted(texts)
    assert 20 < len(found["validation"]) < 60
    corpora.write_jsonl(tmp_path / "a.jsonl", texts[:300])
    fewer = open_text(path, split="validation", validation_fraction=0.1).tokens
    assert (fewer == 256).sum() == sum(text in texts[:300] for text in found["validation"])


def test_names_of_a_globs_documents_do_not_depend_on_other_files(tmp_path):
    pattern = "*s/*/*.txt"
    corpora.write(tmp_path / "books/a/1.txt", b"one")
    found = [[d.name for d in documents.read_documents(documents.find_files(str(tmp_path / pattern)), ("text",))]]
    for name in ("books/b/2.txt", "texts/c/3.txt"):
        corpora.write(tmp_path / name, b"two")
        read = documents.read_documents(documents.find_files(str(tmp_path / pattern)), ("text",))
        found.append([document.name for document in read])
    assert found[0] == found[1][:1] == found[2][:1]
    assert found[1][1:]


@needs_zstd
def test_lines_do_not_depend_on_the_size_of_the_pieces_read(tmp_path, monkeypatch):
    texts = corpora.documents()
    paths = [corpora.write_jsonl(tmp_path / name, texts, key="body") for name in ("a.jsonl", "b.jsonl.zst")]
    for piece in (1, 7, 100):
        monkeypatch.setattr(documents, "PIECE_BYTES", piece)
        for path in paths:
            read = list(documents.read_documents(documents.find_files(str(path)), ("body",)))
            assert [document.texts[0] for document in read] == texts
            assert [document.location for document in read] == [f"{path}:{i + 1}" for i in range(len(texts))]
            assert read[-1].bytes_read <= path.stat().st_size


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', {}, r"a\.jsonl:2: not JSON: Expecting value"),
        ("a.txt", b"one\ntwo\nth\xc3(ree", {}, r"a\.txt:3: not UTF-8: invalid continuation byte at byte 3"),
    ],
)
def test_invalid_files_and_options_are_named(tmp_path, name, content, options, message):
    path = corpora.write(tmp_path / name, content)
    with refused(ip.InputError, match=message):
        open_text(**{"path": path, **options})


def test_missing_files_are_an_error(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "*.txt"):
        with pytest.raises(ip.MissingDataError, match="no files at "):
            open_text(path)


@pytest.mark.slow
@needs_zstd
def test_zstd_file_cut_off_anywhere_is_refused(tmp_path):
    lines, frames = b'{"text": "x"}\n' * 60, 3
    complete = corpora.write(tmp_path / "a.jsonl.zst", lines, frames).read_bytes()
    sizes = [len(complete) // frames * i for i in range(frames)][1:]  # a cut between two frames cannot be detected
    for end in {*range(len(complete))} - {*sizes}:
        path = tmp_path / "a.jsonl.zst"
        path.write_bytes(complete[:end])
        with pytest.raises(ip.InputError, match=rf"{path} is cut off at byte {end}: its last zstd frame is incomplete"):
            open_text(path)


@needs_zstd
def test_damaged_zstd_file_is_refused(tmp_path):
    complete = corpora.write_jsonl(tmp_path / "a.jsonl.zst", corpora.documents()).read_bytes()
    for at in range(0, len(complete), 17):
        (tmp_path / "a.jsonl.zst").write_bytes(complete[:at] + bytes([complete[at] ^ 255]) + complete[at + 1 :])
        with pytest.raises(ip.InputError, match=r"a\.jsonl\.zst"):
            open_text(tmp_path / "a.jsonl.zst")


def test_error_about_large_files_names_the_tokenize_command(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    with pytest.raises(ip.InputError, match=r"python -m dcvit\.tokenize --data .* kind='megatron'"):
        open_text(corpora.write(tmp_path / "a.txt", b"x" * 11))


def test_rows_of_parquet_files_are_documents(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"document {i} é" for i in range(700)] + ["", "last"]
    table = pa.table({"id": range(702), "body": texts})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    lines = corpora.write_jsonl(tmp_path / "b.jsonl", texts)
    found, expected = open_text(tmp_path / "a.parquet", key="body").tokens, open_text(lines).tokens
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("texts", "damage", "message"),
    [
        (["a"], lambda data: data[:-9], "a.parquet cannot be read as Parquet: "),
        (["a"], lambda data: data.replace(b"text", b"txet"), "a.parquet has no column 'text'; did you mean 'txet'?"),
    ],
)
def test_invalid_parquet_files_are_named(tmp_path, texts, damage, message):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, compression="none", store_schema=False)
    path.write_bytes(damage(path.read_bytes()))
    with refused(ip.InputError, message):
        open_text(path)
