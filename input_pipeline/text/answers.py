"""In-context examples in `.jsonl` files whose answers are marked, as in the DCMHA paper's synthetic data set.

A line of the authors' `synthetic_dataset.jsonl` is a JSON object with a `task_id` and `texts`: eight examples of a
task, one per line. From the third on, the answer is between brackets. The brackets are not part of the text:

    {"task_id": "task0", "texts": "\\n< … >. Ruth owns a kind of fruit\\n< … >. John owns a kind of [ animal ]\\n"}
"""

import array
import re
from typing import NamedTuple

import numpy as np

from input_pipeline.errors import InputError
from input_pipeline.source import Example
from input_pipeline.text import packing
from input_pipeline.text.documents import LINE_SUFFIXES, read_documents
from input_pipeline.text.files import TokenizedFiles
from input_pipeline.text.tokenizer import END_OF_TEXT, Tokenizer

MARK = re.compile(r"\[ (.+?) \]")
ROW_BYTES = 512  # approximate memory of a row besides its arrays and its location
TOKEN_CHARACTERS = 256  # a longer text has more tokens than this many characters allow, with any tokenizer in use
PREFIXES = 32  # that are tokenized together


class MarkedText(NamedTuple):
    """A text without its marks, and (start, end, shots) of each answer: characters, and number of earlier examples."""

    text: str
    answers: tuple[tuple[int, int, int], ...]


class Row(NamedTuple):
    """The tokens of a line; `answers` is an array with a row (first token, last token + 1, shots) for each answer."""

    tokens: np.ndarray
    answers: np.ndarray
    location: str


class Source(TokenizedFiles):
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
            rows do not fit in memory, the tokenizer joins an answer with the text around it, or a file is invalid (see
            `input_pipeline.text.documents`).
        """
        files, opened = self.open_files(path, context, tokenizer, end_of_text, LINE_SUFFIXES)
        self.rows: list[Row] = []
        names: dict[str, int] = {}
        tasks, size = array.array("i"), 0
        for document in read_documents(files, (task, text)):
            found = _encode(document.texts[1], opened, document.location, context)
            row = found._replace(tokens=found.tokens.astype(self.dtype))
            if document.texts[0] not in names:
                names[document.texts[0]] = len(names)
                size += len(document.texts[0]) + ROW_BYTES
            size += row.tokens.nbytes + row.answers.nbytes + len(row.location) + ROW_BYTES
            self.check_memory(size)
            self.rows.append(row)
            tasks.append(names[document.texts[0]])
        if not names:
            raise InputError(f"{path} holds no lines")
        self.task_names, self.tasks = tuple(names), np.array(tasks, np.int32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        row = self.rows[index]
        tokens = packing.padded_row(row.tokens, self.context)["tokens"]
        is_target, shots = np.zeros(self.context + 1, bool), np.zeros(self.context + 1, np.int32)
        for start, end, before in row.answers.tolist():
            is_target[start:end], shots[start:end] = True, before
        return {"tokens": tokens, "is_target": is_target, "task": self.tasks[index], "shots": shots}

    def describe(self, index: int) -> str:
        """Return the file and line of a row."""
        return self.rows[index].location

    def nbytes(self) -> int:
        """Return the size of all tokens in bytes."""
        return sum(row.tokens.nbytes for row in self.rows)


def read_marks(text: str, location: str) -> MarkedText:
    """Remove the marks of a text, and return where its answers are. Raises InputError if it has none."""
    parts: list[str] = []
    answers, length = [], 0  # of the parts
    blank = len(text) - len(text.lstrip("\n"))  # lines before the first example
    for number, line in enumerate(text.split("\n")):
        read = 0
        # No mark begins after the last end of a mark; without this bound, many beginnings take quadratic time.
        for match in MARK.finditer(line, 0, line.rfind(" ]") + 2):
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


def _encode(text: str, tokenizer: Tokenizer, location: str, context: int) -> Row:
    """Return the tokens and answers of a text with marks. Raises InputError for the reasons that `Source` lists."""
    if len(text) > TOKEN_CHARACTERS * (context + 1):
        raise InputError(f"{location}: {len(text):,} characters are more than the {context + 1} tokens of a row hold")
    marked = read_marks(text, location)
    (tokens,) = tokenizer.encode_batch([marked.text])
    if len(tokens) > context + 1:
        raise InputError(f"{location}: {len(tokens)} tokens are more than the {context + 1} of a row")
    ends = [at for start, end, _ in marked.answers for at in (start, end)]
    places: list[int] = []
    for first in range(0, len(ends), PREFIXES):
        for prefix in tokenizer.encode_batch([marked.text[:at] for at in ends[first : first + PREFIXES]]):
            if not np.array_equal(tokens[: len(prefix)], prefix):
                raise InputError(f"{location}: the tokenizer joins an answer with the text around it")
            places.append(len(prefix))
    if not places[0]:
        raise InputError(f"{location}: no text precedes the first answer")
    if any(end == start for end, start in zip(places[1::2], places[2::2], strict=False)):
        raise InputError(f"{location}: two answers without text between them would count as one; mark them as one")
    shots = [found[2] for found in marked.answers]
    answers = np.array(list(zip(places[::2], places[1::2], shots, strict=True)), np.int32)
    return Row(tokens, answers, location)
