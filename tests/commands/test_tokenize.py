"""The tokenize command: the rows of the text itself, errors of one line, and no files of a failed run."""

import json

import corpora
import numpy as np
import pytest

import input_pipeline as ip
from dcvit import tokenize
from dcvit.cli import run

CONTEXT = 24


def command(tmp_path, *words):
    return run(tokenize.main, ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out" / "pile"), *words])


@pytest.mark.slow
def test_files_have_the_rows_of_the_text(tmp_path, tokenizer_path, capsys):
    path = tokenizer_path and str(tokenizer_path)
    words = ["--tokenizer", path] if path else []
    texts = corpora.documents(60)
    corpora.write_jsonl(tmp_path / "data" / "a.jsonl.zst", texts[:30], key="body")
    corpora.write_jsonl(tmp_path / "data" / "b.jsonl", texts[30:], key="body")
    assert command(tmp_path, *words, "--key", "body") == 0
    source = ip.open_source("megatron", path=str(tmp_path / "out" / "pile"), context=CONTEXT)
    read = {"context": CONTEXT, "tokenizer": path, "key": "body"}
    expected = ip.open_source("text", path=str(tmp_path / "data"), **read)
    assert (source.vocab_size, source.end_of_text) == (expected.vocab_size, expected.end_of_text)
    assert len(source) == len(expected)
    for i in range(len(source)):
        for key in ("tokens", "is_target"):
            np.testing.assert_array_equal(source[i][key], expected[i][key])
    description = json.loads((tmp_path / "out" / "pile.json").read_bytes())
    nbytes = sum(len(text.encode()) for text in texts)
    assert description == {
        "vocab_size": source.vocab_size, "end_of_text": source.end_of_text, "tokenizer": path,
        "bytes": nbytes, "documents": 60, "tokens": len(expected.tokens),
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert shown.startswith(f"60 documents, {nbytes:,} bytes of text, {len(expected.tokens):,} tokens in ")
    assert "tokens/s)" in shown
    assert f"vocab_size {source.vocab_size}, end_of_text {source.end_of_text}" in shown
    known = ip.open_source("megatron", path=str(tmp_path / "out" / "pile"), context=CONTEXT, tokenizer=path)
    np.testing.assert_array_equal(known.token_bytes, expected.token_bytes)


@pytest.mark.parametrize(
    ("name", "content", "words", "message"),
    [
        ("a.jsonl.zst", None, [], "a.jsonl.zst is cut off at byte "),
        ("a.txt", b"x", ["--out", "/proc/nothing/x"], "cannot write /proc/nothing/x.bin: No such file or directory"),
    ],
)
def test_error_is_one_line_and_no_files_are_left(tmp_path, capsys, name, content, words, message):
    path = corpora.write(tmp_path / "data" / name, b'{"text": "x"}\n' * 50 if content is None else content)
    if content is None:
        path.write_bytes(path.read_bytes()[:-3])
    assert command(tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("out/*"))
