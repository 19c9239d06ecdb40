"""Table 4: downstream tasks of Pythia and DCPythia, with the largest models of Figure 4 and local tasks.

lm-evaluation-harness scores the tasks, and downloads nothing. They are generated from held-out files of the embedded
text, in the form of two of the paper's tasks: LAMBADA (predict a word that occurs earlier in the text) and HellaSwag
(choose the continuation of a text among lines of other files). A question fits in a model's context of bytes.
"""

import json
import math
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from paper import runs, scaling
from paper.runs import CONTEXT, METRIC, cells, decision, minus, settings
from paper.table import Table, bars

from dcvit import lm_eval
from dcvit.hub.open import open_model
from dcvit.inference.texts import LanguageModel
from dcvit.runs.files import replace
from dcvit.runs.seeds import workdir_of
from input_pipeline.text.stdlib import Source

CLOZE, CHOICE = "stdlib_cloze", "stdlib_choice"
PER_FILE, CHOICES = 40, 4  # questions of a file at most, so that no file dominates; continuations of a question
SHORTEST_LINE, LONGEST_LINE = 4, 24
WORD = re.compile(r"(?<=\S) ([A-Za-z_]{4,16})\b")
Question = dict[str, str | int | list[str]]  # by the fields that the task files name


def held_out_files() -> list[str]:
    """Return the text of each file in the validation split of the embedded text."""
    source = Source(split="validation")
    starts = [0, *source.ends[:-1]]
    return [bytes(source.tokens[a : b - 1].astype("uint8")).decode() for a, b in zip(starts, source.ends, strict=True)]


def clozes(text: str, length: int) -> list[Question]:
    """Return a question for each word (`target`) that occurs earlier in the text before it (`context`).

    A target begins with a space. Both together have at most `length` bytes.
    """
    found: list[Question] = []
    for match in WORD.finditer(text):
        context = text[max(0, match.end() - length) : match.start()]
        if context.isascii() and re.search(rf"\b{match[1]}\b", context):
            found.append({"context": context, "target": match[0]})
    return found


def line_starts(text: str) -> dict[int, str]:
    """Return the starts of lines that a question can offer as continuations, by line number from 0.

    The line before must not be blank. A start begins with the line break, has at most `LONGEST_LINE` characters, and at
    least `SHORTEST_LINE` without white space around them. Text with other characters than ASCII has no such lines.
    """
    lines = text.split("\n") if text.isascii() else []
    starts = {i: f"\n{line}"[:LONGEST_LINE].rstrip() for i, line in enumerate(lines) if i and lines[i - 1].strip()}
    return {i: start for i, start in starts.items() if len(start.strip()) >= SHORTEST_LINE}


def choices(text: str, others: Sequence[str], length: int) -> list[Question]:
    """Return a question for each of the `line_starts` of a text: find the one that continues the text before it.

    A question has a `context`, `choices` (the start and random ones of `others`), and `label`, the start's number.
    A context and a choice together have at most `length` bytes.
    """
    draw, found, lines = random.Random(0), list[Question](), text.split("\n")
    for i, start in line_starts(text).items():
        wrong = [other for other in draw.sample(others, CHOICES) if other != start]
        offered = [*wrong[: CHOICES - 1], start]
        draw.shuffle(offered)
        context = "\n".join(lines[max(0, i - length) : i])[LONGEST_LINE - length :].rstrip()
        found.append({"context": context, "choices": offered, "label": offered.index(start)})
    return found


def write_tasks(folder: Path, length: int) -> None:
    """Write the task files of the harness and their questions, of at most `length` bytes, to a folder."""
    questions: dict[str, list[Question]] = {CLOZE: [], CHOICE: []}
    files = held_out_files()
    starts = [{*line_starts(text).values()} for text in files]
    for number, text in enumerate(files):
        others = sorted(set().union(*starts[:number], *starts[number + 1 :]))
        for name, found in ((CLOZE, clozes(text, length)), (CHOICE, choices(text, others, length))):
            questions[name] += random.Random(0).sample(found, min(PER_FILE, len(found)))
    kinds = {
        CLOZE: ("loglikelihood", {"doc_to_target": "target"}, ("perplexity", "acc")),
        CHOICE: ("multiple_choice", {"doc_to_choice": "choices", "doc_to_target": "label"}, ("acc", "acc_norm")),
    }
    metrics = {"acc": "mean", "acc_norm": "mean", "perplexity": "perplexity"}  # with the harness's aggregation
    folder.mkdir(parents=True, exist_ok=True)
    for name, (kind, fields, names) in kinds.items():
        data = (folder / f"{name}.jsonl").resolve()
        replace(data, "".join(json.dumps(question) + "\n" for question in questions[name]))
        task = {
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test", "output_type": kind, "target_delimiter": "", "doc_to_text": "context", **fields,
            "metric_list": [
                {"metric": m, "aggregation": metrics[m], "higher_is_better": m != "perplexity"} for m in names
            ],
        }  # fmt: skip
        replace(folder / f"{name}.yaml", json.dumps(task, indent=1) + "\n")  # JSON is YAML


FAMILIES = ("Pythia", "DCPythia")
AVERAGE = "average accuracy % (paper: 11 tasks)"
# Measure: our metrics, whose mean it is, and the paper's zero-shot values of Pythia and DCPythia of 2.8B and of 6.9B.
MEASURES: dict[str, tuple[tuple[str, ...], tuple[float | None, ...]]] = {
    "cloze accuracy % (paper: LAMBADA)": (("cloze",), (64.7, 67.9, 67.3, 70.7)),
    "choice accuracy, by length % (paper: HellaSwag)": (("choice",), (45.4, 46.5, 48.0, 49.5)),
    AVERAGE: (("cloze", "choice"), (53.1, 54.5, 55.1, 56.7)),
    "cloze, log2 of the perplexity": (("log2 perplexity",), (None,) * 4),
    "validation, bits per byte": ((METRIC,), (None,) * 4),
}


def measured(workdir: Path, tasks: Path) -> dict[str, float]:
    """Return the results of lm-evaluation-harness for a trained run, in percent; they are stored in its workdir."""

    def compute() -> dict[str, float]:
        from dcvit.inference import harness  # imports lm_eval, which reads the variables of `prepare`

        model = harness.HarnessModel(LanguageModel.of(open_model(workdir)), batch_size=64)
        results = harness.evaluate_tasks(model, (CLOZE, CHOICE), include_path=tasks)["results"]
        return {
            "cloze": 100 * results[CLOZE]["acc,none"], "choice": 100 * results[CHOICE]["acc_norm,none"],
            "log2 perplexity": math.log2(results[CLOZE]["perplexity,none"]),
        }  # fmt: skip

    return runs.stored(workdir / "harness.json", compute)


def table4(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Table 4: the accuracy of both models on local tasks beside the paper's.

    Raises:
      ConfigError: lm-evaluation-harness is not installed.
    """
    lm_eval.prepare(online=False)
    points = scaling.points("figure4", steps)
    models = {family: scaling.run_of(family, points[family][-1], folder) for family in FAMILIES}
    losses = runs.train(models, seeds)
    write_tasks(folder / "tasks", CONTEXT)
    results = {
        family: [
            {METRIC: loss, **measured(workdir_of(models[family].folder, seed), folder / "tasks")}
            for seed, loss in zip(seeds, losses[family], strict=True)
        ]
        for family in FAMILIES
    }
    rows, notes = [], [settings(steps, seeds)]
    for measure, (names, paper) in MEASURES.items():
        plain, composed = ([statistics.fmean(x[name] for name in names) for x in results[each]] for each in FAMILIES)
        rows.append({
            "measure": measure, **cells(plain, "Pythia"), **cells(composed, "DCPythia"),
            **cells(minus(composed, plain), "difference"), "Pythia-2.8B, paper": paper[0],
            "DCPythia-2.8B, paper": paper[1], "Pythia-6.9B, paper": paper[2], "DCPythia-6.9B, paper": paper[3],
        })  # fmt: skip
        if measure == AVERAGE:
            verdict = decision(minus(composed, plain), lower=False, decimals=2)
            notes.append(f"DCPythia has a higher average accuracy than Pythia: {verdict}")
    return Table("table4", "Table 4: downstream tasks of Pythia and DCPythia", rows, notes,
                 bars(rows, "measure", "DCPythia", "DCPythia-6.9B, paper", "DCPythia ± 95 %"))  # fmt: skip
