"""In-context examples in `.jsonl` files whose answers are marked, as in the DCMHA paper's synthetic data set.

A line of the authors' `synthetic_dataset.jsonl` is a JSON object with a `task_id` and `texts`: eight examples of a
task, one per line. From the third on, the answer is between brackets. The brackets are not part of the text:

    {"task_id": "task0", "texts": "\\n< … >. Ruth owns a kind of fruit\\n< … >. John owns a kind of [ animal ]\\n"}
"""

import re
from typing import NamedTuple

import numpy as np

from input_pipeline.errors import InputError
from input_pipeline.source import Example
from input_pipeline.text import packing
from input_pipeline.text.files import LineSource
from input_pipeline.text.tokenizer import END_OF_TEXT, Tokenizer

MARK = re.compile(r"\[ (.+?) \]")


class MarkedText(NamedTuple):
    """A text without its marks, and (start, end, shots) of each answer: characters, and number of earlier examples."""

    text: str
    answers: tuple[tuple[int, int, int], ...]


class Source(LineSource):
    """Lines of `.jsonl` and `.jsonl.zst` files, one row each; the loss counts only the answers between `[ ` and ` ]`.

    An answer includes the space before it. Besides `tokens` and `is_target`, a row has

        task: int32, the number of its task in `task_names`
        shots: int32 of shape (context + 1,); in an answer, the number of examples (lines of the text) before its own
    """

    def __init__(
        self,
        path: str,
        context: int,
        tokenizer: str | None = None,
        end_of_text: str = END_OF_TEXT,
        text: str = "texts",
        task: str = "task_id",
    ):
        """
        Args:
          path: a file, folder or glob.
          context: number of tokens in a model input; a row has one token more.
          tokenizer: path of a tokenizer.json or of its folder; by default the tokens are UTF-8 bytes.
          end_of_text: the tokenizer's special token that ends a document. Rows do not contain it.
          text: key of the examples in the JSON object of a line.
          task: key of the name of their task.

        Raises:
          MissingDataError: the files or the tokenizer do not exist.
          InputError: a row has no answers, two of them without text between them, or more tokens than the context, the
            tokenizer joins an answer with the text around it, or a file is invalid (see
            `input_pipeline.text.documents`).
        """
        lines, opened = self.open_lines(path, context, tokenizer, end_of_text, (task, text))
        self.answers: list[list[tuple[int, int, int]]] = []  # (first token, last token + 1, shots) of those of a row
        self.tasks: list[int] = []
        names: dict[str, int] = {}
        for document in lines:
            name, marked = document.texts
            tokens, answers = _encode(marked, opened, document.location, context)
            self.add(document.location, tokens.astype(self.dtype))
            self.answers.append(answers)
            self.tasks.append(names.setdefault(name, len(names)))
        self.check_not_empty()
        self.task_names = tuple(names)

    def __getitem__(self, index: int) -> Example:
        tokens = packing.padded_row(self.rows[index], self.context)["tokens"]
        is_target, shots = np.zeros(self.context + 1, bool), np.zeros(self.context + 1, np.int32)
        for start, end, before in self.answers[index]:
            is_target[start:end], shots[start:end] = True, before
        return {"tokens": tokens, "is_target": is_target, "task": np.int32(self.tasks[index]), "shots": shots}


def read_marks(text: str, location: str) -> MarkedText:
    """Remove the marks of a text, and return where its answers are. Raises InputError if it has none."""
    parts: list[str] = []
    answers, length = [], 0  # of the parts
    blank = len(text) - len(text.lstrip("\n"))  # lines before the first example
    for number, line in enumerate(text.split("\n")):
        read = 0
        for match in MARK.finditer(line, 0, line.rfind(" ]") + 2):  # linear in the length of a line without marks
            before = line[read : match.start()]
            start = length + len(before) - before.endswith(" ")
            length += len(before) + len(match[1])
            parts += [before, match[1]]
            answers.append((start, length, max(number - blank, 0)))
            read = match.end()
        parts += [line[read:], "\n"]
        length += len(line) - read + 1
    if not answers:
        raise InputError(f"{location}: no answer between '[ ' and ' ]'")
    return MarkedText("".join(parts[:-1]), tuple(answers))


def _encode(
    text: str, tokenizer: Tokenizer, location: str, context: int
) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Return the tokens of a text with marks, and its answers as (first token, last token + 1, shots)."""
    marked = read_marks(text, location)
    ends = [at for start, end, _ in marked.answers for at in (start, end)]
    (tokens,) = tokenizer.encode_batch([marked.text])
    if len(tokens) > context + 1:
        raise InputError(f"{location}: {len(tokens)} tokens are more than the {context + 1} of a row")
    prefixes = tokenizer.encode_batch([marked.text[:at] for at in ends])
    if not all(np.array_equal(tokens[: len(prefix)], prefix) for prefix in prefixes):
        raise InputError(f"{location}: the tokenizer joins an answer with the text around it")
    places = [len(prefix) for prefix in prefixes]
    if not places[0]:
        raise InputError(f"{location}: no text precedes the first answer")
    if any(end == start for end, start in zip(places[1::2], places[2::2], strict=False)):
        raise InputError(f"{location}: two answers without text between them would count as one; mark them as one")
    shots = [found[2] for found in marked.answers]
    return tokens, list(zip(places[::2], places[1::2], shots, strict=True))
