"""Rows of in-context examples, generated from a seed; `input_pipeline.text.synthetic_tasks` describes the tasks."""

import fnmatch
from collections.abc import Sequence

import numpy as np

from input_pipeline.errors import InputError, check_split, nearest
from input_pipeline.shuffle import Draw, draws
from input_pipeline.source import Example, TokenSource
from input_pipeline.text.synthetic_tasks import DRAWS, TASKS, WORDS, Task, in_validation, make_example
from input_pipeline.text.tokenizer import WordTokenizer

SPLITS = ("train", "validation")
LONGEST = 14  # words of an example


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
