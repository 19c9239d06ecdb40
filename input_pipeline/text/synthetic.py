"""Rows of in-context examples, generated from a seed, of tasks that combine attention with a transformation.

The tasks follow Section 4.3 and Table 11 of the DCMHA paper; words and templates are this project's own. An example of
the task `same/things/kind`, whose pattern finds the thing of the same person and whose relation transforms it:

    Ruth apple . Carol wolf . John cello . so kind Carol animal ;

The answer is the word before `;`. Every task is a product of

  a pattern    same      what a person has                 so kind Carol animal ;
               other     what the other person has         not kind Carol instrument ;
               with      who has it                        with kind animal Carol ;
               without   who has the other one             without kind animal John ;
               first     the first word of a list          apple . wolf . cello . first kind fruit ;
               last      the last one                      apple . wolf . cello . last kind instrument ;
               in        the one of a group                apple . wolf . cello . in initial animal w ;
               unlike    the one of another group          goat . wolf . cello . unlike initial animal c ;
               odd       the one that occurs once          wolf . wolf . cello . odd the cello ;
  a domain     things, cities, times or traits
  a relation   `the` (the word itself), `initial` (its first letter), or one of the domain, such as `kind`
  an order     of the words in a fact: "Ruth apple ." or, with the suffix /reversed, "apple Ruth ."
"""

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from input_pipeline.errors import InputError, check_split, nearest
from input_pipeline.shuffle import Draw, draws, take
from input_pipeline.source import Example, TokenSource
from input_pipeline.text import documents
from input_pipeline.text.tokenizer import WordTokenizer

SPLITS = ("train", "validation")
LONGEST = 14  # words of an example
DRAWS = 16  # `make_example` calls `Draw` at most this often
FACTS = 3  # in every example
MEMBERS = {
    "fruit": "apple cherry lemon plum",
    "animal": "camel goat otter wolf",
    "garment": "coat hat scarf skirt",
    "drink": "cocoa juice milk tea",
    "vehicle": "bus ferry train van",
    "instrument": "cello drum flute harp",
}
CITIES = {
    "Austria": "Graz Linz",
    "Brazil": "Recife Salvador",
    "Egypt": "Aswan Luxor",
    "France": "Lyon Nantes",
    "Japan": "Kobe Nagoya",
    "Spain": "Bilbao Seville",
}
CYCLES = (
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "January February March April May June July August September October November December",
)
OPPOSITES = ("big small", "hot cold", "old young", "fast slow", "rich poor", "loud quiet", "happy sad", "wet dry")
PERSONS = ("Alan", "Bella", "Carol", "Daniel", "Edith", "Frank", "Greta", "Hugo", "Irene", "John", "Paula", "Ruth")
NO_CONTENT = {".", *PERSONS}  # parts of facts besides the words of a domain
VALIDATION_FRACTION = 0.2  # approximate, of the sets of words
PERSON_PATTERNS = {"same": "so", "other": "not", "with": "with", "without": "without"}  # first word of the question
LIST_PATTERNS = ("first", "last", "in", "unlike", "odd")
PATTERNS = {**PERSON_PATTERNS, **{name: name for name in LIST_PATTERNS}}


class Domain(NamedTuple):
    """Words of one sort, such as cities: pools of groups of words, and relations, dicts from each word to its value."""

    pools: tuple[tuple[tuple[str, ...], ...], ...]  # an example takes words of different groups of one pool
    relations: Mapping[str, Mapping[str, str]]  # relation -> word -> its value
    asking: str  # the relation whose value is the group that a question names


class Task(NamedTuple):
    """A task: find a word of `domain` in facts by `pattern`, answer with its value under `relation`; see the module."""

    pattern: str
    domain: str
    relation: str
    reversed: bool = False  # each fact has its word before the person

    @property
    def name(self) -> str:
        """The name of the task, its parts with "/" between them: "same/things/kind" or "with/cities/the/reversed"."""
        return "/".join((self.pattern, self.domain, self.relation)) + "/reversed" * self.reversed


def _domain(pools: Sequence[Sequence[Sequence[str]]], **relations: Mapping[str, str]) -> Domain:
    frozen = tuple(tuple(tuple(group) for group in pool) for pool in pools)
    words = [word for pool in frozen for group in pool for word in group]
    every = {"the": {word: word for word in words}, "initial": {word: word[0].lower() for word in words}}
    return Domain(frozen, {**every, **relations}, next(iter(relations)))


def _groups(members: Mapping[str, str]) -> tuple[list[list[str]], dict[str, str]]:
    """Return the words of each group, and each word's group; `members` has the words of each group, as one text."""
    return [text.split() for text in members.values()], {
        word: name for name, text in members.items() for word in text.split()
    }


def _shifted(by: int) -> dict[str, str]:
    """Return a dict from each word of `CYCLES` to the word `by` places later in its cycle."""
    cycles = [text.split() for text in CYCLES]
    return {word: cycle[(i + by) % len(cycle)] for cycle in cycles for i, word in enumerate(cycle)}


_THINGS, _KIND = _groups(MEMBERS)
_CITIES, _COUNTRY = _groups(CITIES)
_PAIRS = [pair.split() for pair in OPPOSITES]
DOMAINS = {
    "things": _domain([_THINGS], kind=_KIND),
    "cities": _domain([_CITIES], country=_COUNTRY),
    "times": _domain([[[word] for word in text.split()] for text in CYCLES], before=_shifted(-1), after=_shifted(1)),
    "traits": _domain([_PAIRS], opposite={a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}),
}
TASKS = (
    *(
        Task(pattern, domain, relation, turned)
        for pattern in PERSON_PATTERNS
        for domain in DOMAINS
        for relation in DOMAINS[domain].relations
        for turned in (False, True)
        if relation != "initial" or pattern in ("same", "other")  # two words may have the same initial
    ),
    *(
        Task(pattern, domain, relation)
        for pattern in LIST_PATTERNS
        for domain in DOMAINS
        for relation in DOMAINS[domain].relations
        if pattern != "unlike" or domain in ("things", "cities")  # whose groups have several words
    ),
)
WORDS = tuple(
    dict.fromkeys(
        [
            ".", ";", *PATTERNS.values(), *PERSONS,
            *(name for domain in DOMAINS.values() for name in domain.relations),
            *(word for domain in DOMAINS.values() for values in domain.relations.values() for word in values),
            *(word for domain in DOMAINS.values() for values in domain.relations.values() for word in values.values()),
        ]
    )
)  # fmt: skip


def make_example(task: Task, draw: Draw) -> list[str]:
    """Return the words of a random example of a task. The last word is `;`, and the one before it is the answer."""
    domain = DOMAINS[task.domain]
    value = domain.relations[task.relation]
    words = _different_words(domain, draw)
    at = draw(FACTS)  # the fact that the answer comes from
    if task.pattern in LIST_PATTERNS:
        return _list_example(task, words, at, draw)
    persons = take(PERSONS, FACTS, draw)
    first, second = (i for i in range(FACTS) if i != at)
    if task.pattern == "other":
        persons[second] = persons[first]
    elif task.pattern == "without":
        words[second] = words[first]
    asked = value[words[first if task.pattern == "without" else at]]
    question = {
        "same": [persons[at], value[words[at]]],
        "other": [persons[first], value[words[at]]],
        "with": [asked, persons[at]],
        "without": [asked, persons[at]],
    }[task.pattern]
    facts: list[str] = []
    for person, word in zip(persons, words, strict=True):
        facts += [word, person, "."] if task.reversed else [person, word, "."]
    return [*facts, PATTERNS[task.pattern], task.relation, *question, ";"]


def in_validation(example: Sequence[str]) -> bool:
    """Return True if an example is in the validation split, by a hash of the set of words in its facts.

    Examples of all tasks, orders and persons with the same words are therefore in the same split.
    """
    end = max(i for i, word in enumerate(example) if word == ".")
    return _hashed_to_validation(frozenset(example[:end]) - NO_CONTENT)


@functools.cache
def _hashed_to_validation(content: frozenset[str]) -> bool:
    return documents.in_validation(" ".join(sorted(content)), VALIDATION_FRACTION)


def _list_example(task: Task, words: list[str], at: int, draw: Draw) -> list[str]:
    """Return an example whose facts are single words; `at` selects the answer's word if the pattern does not."""
    domain = DOMAINS[task.domain]
    group = domain.relations[domain.asking]
    at = {"first": 0, "last": FACTS - 1}.get(task.pattern, at)
    first, second = (i for i in range(FACTS) if i != at)
    asked = {"in": [group[words[at]]], "unlike": [group[words[first]]]}.get(task.pattern, [])
    if task.pattern == "odd":
        words[second] = words[first]
    elif task.pattern == "unlike":
        (members,) = (members for members in domain.pools[0] if words[first] in members)
        words[second] = take([word for word in members if word != words[first]], 1, draw)[0]
    facts = [part for word in words for part in (word, ".")]
    answer = domain.relations[task.relation][words[at]]
    return [*facts, PATTERNS[task.pattern], task.relation, *asked, answer, ";"]


def _different_words(domain: Domain, draw: Draw) -> list[str]:
    """Return a random word for each fact, of different groups, so that all relations but `initial` tell them apart."""
    groups = take(domain.pools[draw(len(domain.pools))], FACTS, draw)
    return [group[draw(len(group))] for group in groups]


class Source(TokenSource):
    """Rows of in-context examples, each row of one task. A token is a word, and the loss counts only the answers.

    Row i is an example of task i modulo the number of tasks, and a function of (seed, split, i) only. Besides `tokens`
    and `is_target`, a row has

        task: int32, the number of its task in `task_names`
        shots: int32 of shape (context + 1,), the number of examples before the one that a token belongs to
    """

    def __init__(
        self,
        split: str = "train",
        shots: int = 3,
        seed: int = 0,
        tasks: str | Sequence[str] = "*",
        examples: int = 1_000_000,
    ):
        """
        Args:
          split: "train" or "validation". The facts of their examples are about different sets of words.
          shots: number of examples before the last one of a row.
          seed: seed of all random choices.
          tasks: patterns of the names of tasks, such as "same/*" or ["*/things/*", "odd/*"].
          examples: number of rows.

        Raises:
          InputError: the split is unknown, a pattern matches no task, or a number is out of range.
        """
        check_split("synthetic", split, SPLITS)
        if min(shots, seed) < 0 or examples < 1:
            raise InputError(f"synthetic: shots={shots}, examples={examples}, seed={seed}: one is too small")
        self.split, self.seed, self.examples = split, seed, examples
        self.count = shots + 1
        self.context = self.count * LONGEST - 1
        self.tasks = _chosen([tasks] if isinstance(tasks, str) else tasks)
        self.task_names = tuple(task.name for task in self.tasks)
        self.tokenizer = WordTokenizer(WORDS)
        self.vocab_size = self.tokenizer.vocab_size

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.examples:
            raise IndexError(index)
        number = index % len(self.tasks)
        draw = draws(self.seed, SPLITS.index(self.split), index, self.count * DRAWS)
        row = {name: np.zeros(self.context + 1, np.int32) for name in ("tokens", "shots")}
        is_target = np.zeros(self.context + 1, bool)
        start = 0
        for shot in range(self.count):
            words = self._example(self.tasks[number], draw)
            end = start + len(words)
            row["tokens"][start:end], row["shots"][start:end] = self.tokenizer.numbers(words), shot
            is_target[end - 2] = True
            start = end
        return {**row, "is_target": is_target, "task": np.int32(number)}

    def _example(self, task: Task, draw: Draw) -> list[str]:
        """Return the words of a random example of `task`, drawn again until the example belongs to the split."""
        while True:
            words = make_example(task, draw)
            if in_validation(words) == (self.split == "validation"):
                return words

    def describe(self, index: int) -> str:
        """Return the split, the number of a row and its task."""
        return f"synthetic, split {self.split}, row {index}, {self.task_names[index % len(self.tasks)]}"

    def nbytes(self) -> int:
        """Return the size of all rows in bytes."""
        return self.examples * (self.context + 1) * 9


def _chosen(patterns: Sequence[str]) -> list[Task]:
    """Return the tasks whose names match a pattern. Raises InputError if `patterns` is empty or one has no match."""
    if not patterns:
        raise InputError("synthetic: tasks=[] should name a task")
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(task.name, pattern) for task in TASKS):
            names = [task.name for task in TASKS]
            raise InputError(f"synthetic has no task {pattern!r}; {nearest(pattern, names)}")
    return [task for task in TASKS if any(fnmatch.fnmatchcase(task.name, pattern) for pattern in patterns)]
