"""Generated in-context tasks: every answer follows from the text, and rows are functions of seed, split and index."""

import calendar
import itertools
import string

import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline.shuffle import draws
from input_pipeline.text.synthetic import (
    CITIES,
    DRAWS,
    LONGEST,
    MEMBERS,
    OPPOSITES,
    PERSONS,
    TASKS,
    WORDS,
    Source,
    make_example,
)


def group_of(word, tables):
    return next((name for name, members in tables.items() if word in members.split()), None)


def neighbor(word, step):
    """The day or month before or after a word, by the calendar of Python's standard library."""
    cycle = next(names for names in (list(calendar.day_name), list(calendar.month_name)[1:]) if word in names)
    return cycle[(cycle.index(word) + step) % len(cycle)]


def opposite(word):
    (pair,) = (pair.split() for pair in OPPOSITES if word in pair.split())
    return pair[1 - pair.index(word)]


RELATIONS = {
    "the": lambda word: word,
    "initial": lambda word: next(letter for letter in string.ascii_lowercase if word.lower().startswith(letter)),
    "kind": lambda word: group_of(word, MEMBERS),
    "country": lambda word: group_of(word, CITIES),
    "before": lambda word: neighbor(word, -1),
    "after": lambda word: neighbor(word, 1),
    "opposite": opposite,
}


def naming(word):
    """The relation whose value stands for the group of a word in questions."""
    if group_of(word, MEMBERS):
        return ["kind"]
    if group_of(word, CITIES):
        return ["country"]
    return ["opposite"] if any(word in pair.split() for pair in OPPOSITES) else ["before"]


def answers(words):
    """Every answer that fits the facts and the question of an example, found from its text alone."""
    parts = [list(group) for dot, group in itertools.groupby(words, lambda word: word == ".") if not dot]
    *facts, (mode, relation, *question) = parts
    value, asked = RELATIONS[relation], question[:-2]
    if mode not in ("so", "not", "with", "without"):
        items = [word for (word,) in facts]
        if mode in ("first", "last"):
            assert not asked
            return {value(items[0 if mode == "first" else -1])}
        if mode == "odd":
            return {value(word) for word in items if items.count(word) == 1}
        fits = [word for word in items if any(asked == [RELATIONS[name](word)] for name in naming(word))]
        return {value(word) for word in items if (word in fits) == (mode == "in")}
    pairs = [sorted(fact, key=lambda word: word not in PERSONS) for fact in facts]
    return {
        "so": lambda: {value(word) for person, word in pairs if [person] == asked},
        "not": lambda: {value(word) for person, word in pairs if [person] != asked},
        "with": lambda: {person for person, word in pairs if [value(word)] == asked},
        "without": lambda: {person for person, word in pairs if [value(word)] != asked},
    }[mode]()


@pytest.mark.slow
def test_exactly_the_given_answer_follows_from_the_text():
    for task, index in itertools.product(TASKS, range(40)):
        words = make_example(task, draws(1, 0, index, DRAWS))
        assert words[-1] == ";", task
        assert answers(words) == {words[-2]}, (task, words)
        assert {*words} <= {*WORDS}, (task, words)
        assert len(words) <= LONGEST, (task, words)
        assert (task.reversed, words[0] in PERSONS) != (True, True), (task, words)


@pytest.mark.slow
def test_answers_come_from_every_fact_equally_often():
    source = ip.open_source("synthetic", tasks="same/cities/the", shots=0)
    places = []
    for index in range(1500):
        words = source.tokenizer.decode(source[index]["tokens"].tolist()).split()
        places.append(words.index(words[words.index(";") - 1]))
    counts = [places.count(place) for place in (1, 4, 7)]
    assert sum(counts) == 1500
    assert max(abs(count - 500) for count in counts) < 90  # five standard deviations


@pytest.mark.parametrize("shots", [0, 3])
def test_rows_hold_examples_of_one_task_whose_answers_are_the_targets(shots):
    source = ip.open_source("synthetic", shots=shots, tasks=["same/*", "odd/times/*"])
    assert isinstance(source, ip.TokenSource)
    assert source.context == LONGEST * (shots + 1) - 1
    for index in range(60):
        row = source[index]
        words = source.tokenizer.decode(row["tokens"].tolist()).split()
        ends = [i for i, word in enumerate(words) if word == ";"]
        assert np.flatnonzero(row["is_target"]).tolist() == [end - 1 for end in ends]
        assert len(ends) == shots + 1
        found = [words[start + 1 : end + 1] for start, end in itertools.pairwise([-1, *ends])]
        assert all(answers(example) == {example[-2]} for example in found)
        pattern, _, relation, *_ = source.task_names[row["task"]].split("/")
        assert {(example[-4 - (pattern == "same")], *{example[-3 - (pattern == "same")]}) for example in found} == {
            ({"same": "so", "odd": "odd"}[pattern], relation)
        }
        assert row["shots"][ends].tolist() == list(range(shots + 1))
        assert not row["tokens"][ends[-1] + 1 :].any()


def test_rows_are_a_function_of_seed_split_and_index():
    def rows(**options):
        source = ip.open_source("synthetic", **options)
        return [source[i]["tokens"].tobytes() for i in (5, 7, 5)]

    assert rows()[0] == rows()[2] != rows()[1]
    assert rows() == rows(examples=8)
    variants = [rows(), rows(seed=1), rows(split="validation"), rows(shots=1)]
    assert len({row for found in variants for row in found}) == 2 * len(variants)


@pytest.mark.exhaustive
@pytest.mark.parametrize("domain", ["things", "cities", "times", "traits"])
def test_splits_share_no_set_of_words_in_facts(domain):
    """Domains share no words. A random split would share many of the sets, which are at most some ten thousand."""

    def contents(split):
        source, found = ip.open_source("synthetic", tasks=f"*/{domain}/*", split=split), set()
        for index in range(150):
            text = source.tokenizer.decode(source[index]["tokens"].tolist())
            for example in text.split(";")[: source.count]:
                found.add(frozenset(example.rpartition(".")[0].split()) - {".", *PERSONS})
        return found

    train, validation = contents("train"), contents("validation")
    assert len(train) > 100
    assert len(validation) > 20
    assert not train & validation


def test_words_outside_of_the_vocabulary_are_errors_with_the_nearest_word():
    tokenizer = Source().tokenizer
    assert tokenizer.decode(tokenizer.encode("Ruth apple .")) == " Ruth apple ."
    assert tokenizer.decode([tokenizer.vocab_size, 10**6]) == ""  # tokens of a larger model
    with pytest.raises(ip.InputError, match="no word 'aple' in the vocabulary; did you mean 'apple'"):
        tokenizer.encode("Ruth aple .")
