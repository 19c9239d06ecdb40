"""Rows of inputs and targets: which tokens the loss counts, and errors that name the line."""

import json

import corpora
import pytest

import input_pipeline as ip


def open_lines(folder, lines, **options):
    file = corpora.write(folder / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    return ip.open_source("spans", **{"path": str(file), "context": 8} | options)


@pytest.mark.parametrize(
    ("inputs", "targets", "tokens", "first"),
    [
        ("ab", "cd", [97, 98, 99, 100, 256], 2),
        ("", "cd", [256, 99, 100, 256], 1),
        ("abcdefgh", "xyz", [*b"defgh", *b"xyz", 256], 5),
        ("abcdefgh", "1234567", [*b"h1234567", 256], 1),
    ],
)
def test_loss_counts_only_the_targets_and_their_end_of_text(tmp_path, inputs, targets, tokens, first):
    source = open_lines(tmp_path, [{"inputs": inputs, "targets": targets}])
    filling = 9 - len(tokens)
    assert corpora.rows(source) == [
        {
            "tokens": tokens + [0] * filling,
            "is_target": [False] * first + [True] * (len(tokens) - first) + [False] * filling,
        }
    ]
    assert (source.context, source.vocab_size, source.end_of_text) == (8, 257, 256)


def test_each_line_is_a_row_located_by_its_line(tmp_path, tokenizer_json):
    texts = corpora.documents(20)
    lines = [{"q": text, "a": text[::-1][:20]} for text in texts]
    source = open_lines(tmp_path, lines, inputs="q", targets="a", context=64, tokenizer=str(tokenizer_json))
    assert source.describe(7) == f"{tmp_path / 'a.jsonl'}:8"
    (answers, end) = corpora.oracle(tokenizer_json, [line["a"] for line in lines])
    for row, answer in zip(corpora.rows(source), answers, strict=True):
        assert [t for t, target in zip(*row.values(), strict=True) if target] == [*answer, end]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"inputs": "ab", "targets": ""}, r"a\.jsonl:2: 'targets' is empty"),
        ({"inputs": "x"}, r"a\.jsonl:2: no key 'targets'"),
    ],
)
def test_invalid_lines_and_files_are_named(tmp_path, line, message):
    with pytest.raises(ip.InputError, match=message):
        open_lines(tmp_path, [{"inputs": "a", "targets": "b"}, line])
