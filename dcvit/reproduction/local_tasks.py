"""Task files for lm-evaluation-harness, generated from held-out files of the embedded text.

The tasks have the form of two of the paper's: LAMBADA, a word that the text before it has already, and HellaSwag, the
continuation of a text among lines of other files. A question fits in a model's context of bytes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from dcvit.runs.files import replace
from input_pipeline.text.stdlib import Source

CLOZE, CHOICE = "stdlib_cloze", "stdlib_choice"
PER_FILE, CHOICES = 40, 4  # questions of a file at most, so that no file dominates; continuations of a question
SHORTEST_LINE, LONGEST_LINE = 4, 24
WORD = re.compile(r"(?<=\S) ([A-Za-z_]{4,16})\b")
METRICS = {"acc": "mean", "acc_norm": "mean", "perplexity": "perplexity"}  # with the harness's aggregation


class Cloze(TypedDict):
    """A question for the word `target`, which begins with a space, after `context`."""

    context: str
    target: str


class Choice(TypedDict):
    """A question for the continuation of `context`, which is number `label` of `choices`."""

    context: str
    choices: list[str]
    label: int


def held_out_files() -> list[str]:
    """Return the text of each file of the validation split."""
    source = Source(split="validation")
    starts = [0, *source.ends[:-1]]
    return [bytes(source.tokens[a : b - 1].astype("uint8")).decode() for a, b in zip(starts, source.ends, strict=True)]


def clozes(text: str, length: int) -> list[Cloze]:
    """Return a question for each word that its context has already; both together have at most `length` bytes."""
    found: list[Cloze] = []
    for match in WORD.finditer(text):
        context = text[max(0, match.end() - length) : match.start()]
        if context.isascii() and re.search(rf"\b{match[1]}\b", context):
            found.append({"context": context, "target": match[0]})
    return found


def line_starts(text: str) -> dict[int, str]:
    """Return the start of each line that can be a choice, by its number: a line of some letters that follows another.

    A start has the line break before it and `LONGEST_LINE` characters in all. Text with other characters than ASCII has
    no such lines.
    """
    lines = text.split("\n") if text.isascii() else []
    starts = {i: f"\n{line}"[:LONGEST_LINE].rstrip() for i, line in enumerate(lines) if i and lines[i - 1].strip()}
    return {i: start for i, start in starts.items() if len(start.strip()) >= SHORTEST_LINE}


def choices(text: str, others: Sequence[str], length: int) -> list[Choice]:
    """Return a question for each line of a text that can be a choice, among random starts of lines `others`.

    Args:
      text: the text.
      others: `CHOICES` or more different starts.
      length: the bytes of a context together with a choice.
    """
    draw, found, lines = random.Random(0), list[Choice](), text.split("\n")
    for i, start in line_starts(text).items():
        wrong = [other for other in draw.sample(others, CHOICES) if other != start]
        offered = [*wrong[: CHOICES - 1], start]
        draw.shuffle(offered)
        context = "\n".join(lines[max(0, i - length) : i])[LONGEST_LINE - length :].rstrip()
        found.append({"context": context, "choices": offered, "label": offered.index(start)})
    return found


def write(folder: Path, length: int) -> None:
    """Write the task files and their questions to a folder.

    Args:
      folder: the folder, for the harness's `include_path`.
      length: the bytes of a question with its answer.
    """
    questions: dict[str, list[Cloze | Choice]] = {CLOZE: [], CHOICE: []}
    files = held_out_files()
    starts = [{*line_starts(text).values()} for text in files]
    for number, text in enumerate(files):
        others = sorted(set().union(*starts[:number], *starts[number + 1 :]))
        for name, found in ((CLOZE, clozes(text, length)), (CHOICE, choices(text, others, length))):
            questions[name] += random.Random(0).sample(found, min(PER_FILE, len(found)))
    asked = {
        CLOZE: ("loglikelihood", {"doc_to_target": "target"}, ("perplexity", "acc")),
        CHOICE: ("multiple_choice", {"doc_to_choice": "choices", "doc_to_target": "label"}, ("acc", "acc_norm")),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, (kind, fields, metrics) in asked.items():
        data = (folder / f"{name}.jsonl").resolve()
        replace(data, "".join(json.dumps(question) + "\n" for question in questions[name]))
        task = {
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test", "output_type": kind, "target_delimiter": "", "doc_to_text": "context", **fields,
            "metric_list": [
                {"metric": m, "aggregation": METRICS[m], "higher_is_better": m != "perplexity"} for m in metrics
            ],
        }  # fmt: skip
        replace(folder / f"{name}.yaml", json.dumps(task, indent=1) + "\n")  # JSON is YAML
