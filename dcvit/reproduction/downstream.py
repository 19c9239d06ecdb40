"""Table 4: downstream tasks of Pythia and DCPythia. Scale "desk" has the largest models of Figure 4 and local tasks.

lm-evaluation-harness scores the tasks, and downloads nothing. They are generated from held-out files of the embedded
text, in the form of two of the paper's tasks: LAMBADA (predict a word that occurs earlier in the text) and HellaSwag
(choose the continuation of a text among lines of other files). A question fits in a model's context of bytes.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from dcvit.hub.model import open_trained
from dcvit.inference import harness_tasks
from dcvit.reproduction import arms, scaling
from dcvit.reproduction.arms import CONTEXT, METRIC, Mean
from dcvit.reproduction.seeded import Run, all_finals, run_checksum, stored
from dcvit.reproduction.tables import Cell, Chart, Row, Table
from dcvit.runs.files import replace
from dcvit.runs.seeds import workdir_of
from input_pipeline.text.stdlib import Source

CLOZE, CHOICE = "stdlib_cloze", "stdlib_choice"
PER_FILE, CHOICES = 40, 4  # questions of a file at most, so that no file dominates; continuations of a question
SHORTEST_LINE, LONGEST_LINE = 4, 24
WORD = re.compile(r"(?<=\S) ([A-Za-z_]{4,16})\b")
Question: TypeAlias = dict[str, str | int | list[str]]  # by the fields that the task files name
METRICS = {"acc": "mean", "acc_norm": "mean", "perplexity": "perplexity"}  # with the harness's aggregation


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

    Args:
      text: the text.
      others: `CHOICES` or more different starts of lines, for the wrong choices.
      length: the largest number of bytes of a context together with a choice.
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
    """Write the task files and their questions to a folder.

    Args:
      folder: the folder, for the harness's `include_path`.
      length: the largest number of bytes of a question with its answer.
    """
    questions: dict[str, list[Question]] = {CLOZE: [], CHOICE: []}
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


FAMILIES = ("Pythia", "DCPythia")
BATCH = 64  # rows
LOG_PERPLEXITY = f"{CLOZE} log2 perplexity"
AVERAGE = "average accuracy % (paper: 11 tasks)"
# Measure: our metrics, whose mean it is, and the zero-shot values of Pythia and DCPythia of 2.8B and of 6.9B.
MEASURES: dict[str, tuple[tuple[str, ...], tuple[float | None, ...]]] = {
    "cloze accuracy % (paper: LAMBADA)": ((f"{CLOZE} acc",), (64.7, 67.9, 67.3, 70.7)),
    "choice accuracy, by length % (paper: HellaSwag)": ((f"{CHOICE} acc_norm",), (45.4, 46.5, 48.0, 49.5)),
    AVERAGE: ((f"{CLOZE} acc", f"{CHOICE} acc_norm"), (53.1, 54.5, 55.1, 56.7)),
    "cloze, log2 of the perplexity": ((LOG_PERPLEXITY,), (None,) * 4),
    "validation, bits per byte": ((METRIC,), (None,) * 4),
}


def plan(folder: Path, steps: int) -> list[Run]:
    """Return the training runs of both models, plain and composed.

    Raises:
      ConfigError: lm-evaluation-harness is not installed.
    """
    harness_tasks.prepare(online=False)
    return [*models(folder, steps).values()]


def models(folder: Path, steps: int) -> dict[str, Run]:
    """Return, by family (plain or composed), the training run of its largest model in Figure 4."""
    found = scaling.points("figure4", steps)
    return {family: scaling.runs_of({family: found[family][-1:]}, folder)[f"{family} 0"] for family in FAMILIES}


def measured(workdir: Path, tasks: Path) -> dict[str, float]:
    """Return the results of lm-evaluation-harness for a trained run, by "TASK METRIC"; they are stored in `workdir`.

    Instead of the perplexity per target, the result has its log2, the mean number of bits of a target.

    Raises:
      ConfigError: see `dcvit.reproduction.seeded.stored`.
    """

    def compute() -> dict[str, float]:
        trained = open_trained(workdir)
        harness_tasks.prepare(online=False)
        from dcvit.inference.harness import HarnessModel  # imports lm_eval, which reads the variables of `prepare`

        def make_model() -> HarnessModel:
            net, params = trained.language_model()
            return HarnessModel(net, params, trained.tokenizer(), batch_size=BATCH)

        results = harness_tasks.evaluate_tasks(
            make_model, (CLOZE, CHOICE), include_path=tasks, num_fewshot=None, limit=None
        )
        cloze, choice = (results["results"][task] for task in (CLOZE, CHOICE))
        return {
            f"{CLOZE} acc": cloze["acc,none"], f"{CHOICE} acc_norm": choice["acc_norm,none"],
            LOG_PERPLEXITY: math.log2(cloze["perplexity,none"]),
        }  # fmt: skip

    return stored(workdir / "harness.json", run_checksum(workdir), compute)


def table(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Table 4 with the harness's results of the runs of `plan`, which must be complete."""
    runs, tasks = models(folder, steps), folder / "tasks"
    losses = all_finals(runs, seeds)
    write_tasks(tasks, CONTEXT)
    values: dict[int, dict[str, float]] = {}
    for seed in seeds:
        found = {
            family: {METRIC: losses[seed][family], **measured(workdir_of(run.folder, seed), tasks)}
            for family, run in runs.items()
        }
        values[seed] = _measures(found)
    means = arms.over_seeds(values)
    rows = [_row(measure, paper, means) for measure, (_, paper) in MEASURES.items()]
    verdict = arms.decision(means[f"difference {AVERAGE}"], lower=False, decimals=2)
    statement = (
        f"The paper's statement that DCPythia has a higher average accuracy than Pythia, in these stand-ins: {verdict}."
    )
    return Table("table4", "Table 4: downstream tasks of Pythia and DCPythia", rows,
                 (about(tasks, seeds, steps), statement),
                 Chart("measure", "difference", "difference ± 95 %", "difference 6.9B, paper"))  # fmt: skip


def _measures(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return one seed's measures by "FAMILY MEASURE" or "difference MEASURE"; `found` has `measured` by family."""
    values: dict[str, float] = {}
    for measure, (metrics, _) in MEASURES.items():
        scale = 100 if "%" in measure else 1
        for family in FAMILIES:
            values[f"{family} {measure}"] = scale * sum(found[family][name] for name in metrics) / len(metrics)
        plain, composed = (values[f"{family} {measure}"] for family in FAMILIES)
        values[f"difference {measure}"] = composed - plain
    return values


def _row(measure: str, paper: Sequence[float | None], means: Mapping[str, Mean]) -> Row:
    row: dict[str, Cell] = {"measure": measure}
    for name in (*FAMILIES, "difference"):
        row |= means[f"{name} {measure}"].cells(name)
    for size, (plain, composed) in {"2.8B": paper[:2], "6.9B": paper[2:]}.items():
        row |= {f"Pythia-{size}, paper": plain, f"DCPythia-{size}, paper": composed}
        row[f"difference {size}, paper"] = None if plain is None or composed is None else composed - plain
    return row


def about(tasks: Path, seeds: Sequence[int], steps: int) -> str:
    """Return a note below a table: the settings of the runs, and the form of the tasks."""
    count = {name: len((tasks / f"{name}.jsonl").read_text().splitlines()) for name in (CLOZE, CHOICE)}
    return (
        f"Stand-ins for the paper's models and tasks: the largest models of figure4 after {steps} steps, and questions "
        f"of up to {CONTEXT} bytes from the validation split of Python's standard library, scored by "
        f"lm-evaluation-harness without examples. Cloze: {count[CLOZE]} words that their context has already, where "
        f"every byte must have the highest logit. Choice: {count[CHOICE]} lines among {CHOICES}, "
        f"the others of other files, by log-likelihood per byte; {100 // CHOICES} % by chance. Seeds "
        f"{', '.join(map(str, seeds))}; intervals of Student's t distribution over seeds, all with the same questions. "
        "The difference is that of DCPythia to Pythia with the same seed. The paper's values are those of zero-shot "
        "evaluation; its 5-shot values, its models of 12B and DCFormer++ are not reproduced here."
    )
