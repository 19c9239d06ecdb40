"""Rows of tokens: equal for every kind of text, resumable, and with every token in exactly one row."""

import corpora
import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline.text import tokenizer

CONTEXT = 16


def texts_of_full_rows(path):
    """Texts whose tokens fill complete rows; a last text of single-byte tokens makes up the missing tokens."""
    texts = corpora.documents()
    sequences, _ = corpora.oracle(path, texts)
    missing = -(sum(map(len, sequences)) + len(sequences)) % (CONTEXT + 1)
    return [*texts, "\x01" * (missing - 1 if missing > 1 else missing + CONTEXT)] if missing else texts


def write_kinds(folder, path, texts):
    """Write the same documents in every form; return the options of `open_source` for each."""
    sequences, end = corpora.oracle(path, texts)
    stream = [token for sequence in sequences for token in (*sequence, end)]
    assert len(stream) % (CONTEXT + 1) == 0
    vocab_size = tokenizer.open_tokenizer(path and str(path)).vocab_size
    corpora.write_jsonl(folder / "a.jsonl", texts)
    corpora.write_jsonl(folder / "b.jsonl.zst", texts)
    for i, text in enumerate(texts):
        corpora.write(folder / "txt" / f"{i:03}.txt", text.encode())
    corpora.written_megatron(folder / "written", [[*sequence, end] for sequence in sequences], vocab_size, end)
    chunks = [stream[i : i + CONTEXT + 1] for i in range(0, len(stream), CONTEXT + 1)]
    corpora.write_megatron(folder / "rows", chunks)
    half = len(chunks) // 2
    for name, part in (("0", chunks[:half]), ("1", chunks[half:])):
        records = [corpora.example({"input_ids": chunk, "other": [1, 2]}) for chunk in part]
        corpora.write_input_ids(folder / "records" / f"pile.tfrecord-{name}", records)
    text = {"kind": "text", "context": CONTEXT, "tokenizer": path and str(path)}
    tokens = {"context": CONTEXT, "vocab_size": vocab_size, "end_of_text": end}
    return {
        "jsonl": {**text, "path": str(folder / "a.jsonl")},
        "zst": {**text, "path": str(folder / "*.zst")},
        "txt": {**text, "path": str(folder / "txt")},
        "written": {"kind": "megatron", "path": str(folder / "written"), "context": CONTEXT},
        "rows": {"kind": "megatron", "path": str(folder / "rows.bin"), **tokens},
        "input_ids": {"kind": "input_ids", "path": str(folder / "records"), **tokens},
    }


@pytest.fixture(scope="module", params=["bytes", "trained"])
def kinds(request, tmp_path_factory):
    """(tokenizer, source of each form) of the same documents."""
    pytest.importorskip("tensorflow")
    path = None if request.param == "bytes" else request.getfixturevalue("tokenizer_json")
    options = write_kinds(tmp_path_factory.mktemp("kinds"), path, texts_of_full_rows(path))
    return path, {name: ip.open_source(**given) for name, given in options.items()}


@pytest.mark.slow
def test_every_kind_has_the_rows_of_plain_packing(kinds):
    path, sources = kinds
    sequences, end = corpora.oracle(path, texts_of_full_rows(path))
    expected = corpora.packed(sequences, end, CONTEXT)
    vocab_size = tokenizer.open_tokenizer(path and str(path)).vocab_size
    for name, source in sources.items():
        assert corpora.rows(source) == expected, name
        assert isinstance(source, ip.TokenSource)
        assert (source.context, source.vocab_size, source.class_names) == (CONTEXT, vocab_size, None)
        assert source.end_of_text == end
        assert (source[0]["tokens"].dtype, source[0]["is_target"].dtype) == (np.int32, bool)
        with pytest.raises(IndexError):
            source[len(source)]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["bytes"], indirect=True)
def test_limited_and_cached_sources_keep_the_properties_of_the_tokens(kinds):
    wrapped = ip.open_source("stdlib", split="validation", context=CONTEXT, limit=5, cache=True)
    assert isinstance(wrapped, ip.TokenSource)
    for source in kinds[1].values():
        limited = type(wrapped)(source, range(5))
        for name in ("context", "vocab_size", "end_of_text", "class_names"):
            assert getattr(limited, name) == getattr(source, name)
        assert corpora.rows(limited) == corpora.rows(source)[:5]


@pytest.mark.parametrize("tokens", [2, 17, 18, 34, 35])
def test_evaluation_counts_every_token_once_except_the_first_of_each_row(tmp_path, tokens):
    """A single remaining token makes no row."""
    text = "".join(chr(33 + i) for i in range(tokens - 1))
    source = ip.open_source("text", path=str(corpora.write(tmp_path / "a.txt", text.encode())), context=CONTEXT)
    assert corpora.rows(source) == corpora.packed([list(text.encode())], 256, CONTEXT)
    batches = list(ip.eval_batches(source, "", 2))
    counted = np.concatenate([batch["tokens"][batch["is_target"]] for batch in batches]).tolist()
    stream = [*text.encode(), 256]
    assert counted == [token for i, token in enumerate(stream) if i % (CONTEXT + 1)]
