"""Rows of in-context examples with marked answers, in the format of the authors' synthetic data set."""

import json

import corpora
import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline.text import answers, files
from input_pipeline.text.tokenizer import ByteTokenizer

# Made like the authors' data: eight examples, of which the last six have marks.
FACTS = [
    ("Vera has a cello. Hugo has wine. Hugo has an otter. >. Hugo does not own a kind of", "instrument"),
    ("Nora has a scarf. Nora has cake. Paul has a grape. >. Nora does not own a kind of", "fruit"),
    ("Liam likes Saint-Étienne. Edith likes Oslo. >. Who likes Oslo?", "Edith"),
    ("There are 2017, 2011, 2017. Which is different? The year just after", "2010"),
]


def authors_text():
    examples = [f"< {facts} {answer if i < 2 else f'[ {answer} ]'}" for i, (facts, answer) in enumerate(FACTS * 2)]
    return "\n" + "\n".join(examples) + "\n"


def write(folder, *lines):
    return str(corpora.write(folder / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode()))


def marked(row):
    """The runs of targets as lists of tokens, each with the number of shots of its first token."""
    runs = []
    for at, target in enumerate(row["is_target"]):
        if target and not row["is_target"][at - 1]:
            runs.append(([], int(row["shots"][at])))
        if target:
            runs[-1][0].append(int(row["tokens"][at]))
    return runs


def test_answers_are_targets_and_their_brackets_are_removed(tmp_path):
    path = write(
        tmp_path,
        {"task_id": "task7", "texts": authors_text()},
        {"task_id": "task0", "texts": "\nA b [ c ]\n"},
        {"task_id": "task7", "texts": authors_text()},
    )
    source = ip.open_source("answers", path=path, context=900)
    assert isinstance(source, ip.TokenSource)
    row = source[0]
    assert marked(row) == [(list(f" {answer}".encode()), 2 + i) for i, (_, answer) in enumerate((FACTS * 2)[2:])]
    plain = authors_text().replace("[ ", "").replace(" ]", "").encode()
    assert bytes(row["tokens"].tolist()) == plain + bytes(901 - len(plain))
    assert source.task_names == ("task7", "task0")
    assert [int(source[i]["task"]) for i in range(3)] == [0, 1, 0]
    assert marked(source[1]) == [([*b" c"], 0)]
    assert source.describe(1) == f"{path}:2"


def test_answers_of_a_tokenizer_are_its_tokens_of_the_words(tmp_path, tokenizer_json):
    path = write(tmp_path, {"task_id": "a", "texts": authors_text()})
    source = ip.open_source("answers", path=path, context=900, tokenizer=str(tokenizer_json))
    expected, _ = corpora.oracle(tokenizer_json, [f" {answer}" for _, answer in (FACTS * 2)[2:]])
    assert [tokens for tokens, _ in marked(source[0])] == [list(tokens) for tokens in expected]
    whole, _ = corpora.oracle(tokenizer_json, [authors_text().replace("[ ", "").replace(" ]", "")])
    assert source[0]["tokens"][: len(whole[0])].tolist() == list(whole[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"task_id": "a", "texts": "no mark"}, r"a\.jsonl:2: no answer between"),
        ({"task_id": "a", "texts": "a [ 23456789 ]"}, r"a\.jsonl:2: 10 tokens are more than the 9 of a row"),
        ({"task_id": "a", "texts": "a [ b ] [ c ]"}, r"a\.jsonl:2: two answers without text between them would count"),
    ],
)
def test_invalid_lines_are_named(tmp_path, line, message):
    path = write(tmp_path, {"task_id": "a", "texts": "a [ b ]"}, line)
    with pytest.raises(ip.InputError, match=message):
        ip.open_source("answers", path=path, context=8)


def test_a_tokenizer_that_joins_an_answer_with_its_surroundings_is_an_error(tmp_path, monkeypatch):
    class Pairs(ByteTokenizer):
        """Two bytes make one token, wherever a word begins."""

        def encode_batch(self, texts):
            return [np.array([sum(t.encode()[i : i + 2]) for i in range(0, len(t), 2)]) for t in texts]

    monkeypatch.setattr(files, "open_tokenizer", lambda *_: Pairs())
    path = write(tmp_path, {"task_id": "a", "texts": "ab [ c ] d"})
    assert len(marked(ip.open_source("answers", path=path, context=8)[0])) == 1
    path = write(tmp_path, {"task_id": "a", "texts": "a [ bc ] d"})
    with pytest.raises(ip.InputError, match=r"a\.jsonl:1: the tokenizer joins an answer with the text around it"):
        ip.open_source("answers", path=path, context=8)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\n\na [ b ]\n\nc[ d ] e", [(" b", 0), ("d", 2)]),
        ("x [ y\nz [ w ] [ v", [(" w", 1)]),
    ],
)
def test_marks_of_one_line_are_answers(text, found):
    marked = answers.read_marks(text, "a:1")
    assert [(marked.text[start:end], shots) for start, end, shots in marked.answers] == found
