"""Tables 5 and 11 and Figure 6: generated in-context tasks, and the accuracy of small models by number of shots.

The tasks are those of `input_pipeline.text.synthetic_tasks`, not the authors' file, with which any model can be
evaluated (docs/composed_tasks.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from dcvit.hub.model import open_trained
from dcvit.pages.evaluation import evaluate
from dcvit.reproduction import arms
from dcvit.reproduction.arms import Mean
from dcvit.reproduction.seeded import Run, all_finals, run_checksum, stored
from dcvit.reproduction.tables import Chart, Curves, Row, Table
from dcvit.runs.seeds import workdir_of
from input_pipeline.text.synthetic import Source
from input_pipeline.text.synthetic_tasks import DOMAINS, TASKS

STEPS, SHOTS = 600, 3
METRIC = "validation/accuracy"
# The paper's perplexity and accuracy of Pythia-6.9B and DCPythia-6.9B.
ARMS = {"plain": ("mha", 10.05, 31.9), "DCMHA": ("dcmha", 7.36, 39.0)}


def runs_of(folder: Path, steps: int) -> dict[str, Run]:
    """Return the training runs of the plain and the composed model, by name."""
    specs = {name: f"lm_synthetic:attention={each[0]},steps={steps},shots={SHOTS}" for name, each in ARMS.items()}
    return {name: Run(folder / name, spec, {}, METRIC) for name, spec in specs.items()}


def plan(folder: Path, steps: int) -> list[Run]:
    """Return the training runs of the plain and the composed model in a list."""
    return [*runs_of(folder, steps).values()]


def measured(workdir: Path) -> dict[str, dict[str, float]]:
    """Return accuracy and perplexity of each evaluation of a trained run, by name; stored in the workdir."""

    def compute() -> dict[str, dict[str, float]]:
        rows, _ = evaluate(open_trained(workdir))
        return {
            str(row["evaluation"]): {key: cast(float, row[key]) for key in ("accuracy", "perplexity")} for row in rows
        }

    return stored(workdir / "shots.json", run_checksum(workdir), compute)


def check_complete(folder: Path, seeds: Sequence[int]) -> None:
    """Raise ConfigError if a run is not complete, or the runs of a model differ in more than their seed."""
    all_finals(runs_of(folder, STEPS), seeds)


def means_of(folder: Path, seeds: Sequence[int], evaluation: str) -> dict[str, Mean]:
    """Return the mean accuracy (in percent) and perplexity over seeds in an `evaluation`, by "MODEL METRIC"."""
    return arms.over_seeds(
        {
            seed: {
                f"{name} {metric}": measured(workdir_of(folder / name, seed))[evaluation][metric] * scale
                for name in ARMS
                for metric, scale in (("accuracy", 100), ("perplexity", 1))
            }
            for seed in seeds
        }
    )


def table5(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Table 5: the accuracy of both models over all answers, for all numbers of examples before them."""
    check_complete(folder, seeds)
    found = means_of(folder, seeds, "validation")
    rows: list[Row] = [
        {
            "model": name, "perplexity": found[f"{name} perplexity"].mean,
            **found[f"{name} accuracy"].cells("accuracy %", "± 95 %"),
            "perplexity, paper": perplexity, "accuracy %, paper": accuracy,
        }
        for name, (_, perplexity, accuracy) in ARMS.items()
    ]  # fmt: skip
    return Table("table5", "Table 5: in-context tasks", rows, (about(seeds, steps),),
                 Chart("model", "accuracy %", "± 95 %", "accuracy %, paper"))  # fmt: skip


def figure6(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Figure 6: the accuracy of both models by the number of solved examples before the question."""
    check_complete(folder, seeds)
    by_shots = {shots: means_of(folder, seeds, f"validation/{shots}-shot") for shots in range(SHOTS + 1)}
    rows: list[Row] = [
        {
            "model": name, "shots": shots, **found[f"{name} accuracy"].cells("accuracy %", "± 95 %"),
            "perplexity": found[f"{name} perplexity"].mean,
        }
        for name in ARMS
        for shots, found in by_shots.items()
    ]  # fmt: skip
    return Table("figure6", "Figure 6: in-context tasks by the number of shots", rows, (about(seeds, steps),),
                 Curves("model", "shots", "accuracy %", "± 95 %", scale="linear"))  # fmt: skip


def about(seeds: Sequence[int], steps: int) -> str:
    """Return a note below a table: the settings of the runs."""
    return (
        f"Models of configs/lm_synthetic.py after {steps} steps, trained on these tasks with {SHOTS + 1} examples in a "
        f"row; seeds {', '.join(map(str, seeds))}, intervals of Student's t distribution. The paper's models, "
        "Pythia-6.9B and DCPythia-6.9B, are trained on the Pile and see tasks of the authors' file, with 2 to 7 shots."
    )


def table11() -> Table:
    """Return Table 11: an example of each pattern and relation of the generated tasks."""
    rows: list[Row] = []
    chosen = {(task.pattern, task.relation): task for task in reversed(TASKS) if not task.reversed}
    for task in TASKS:
        if chosen.get((task.pattern, task.relation)) is not task:
            continue
        source = Source(split="validation", shots=0, tasks=[task.name])
        words = source.tokenizer.decode(source[0]["tokens"].tolist()).split()
        end = words.index(";")
        rows.append({
            "pattern": task.pattern, "relation": task.relation, "domain": task.domain,
            "example": " ".join(words[: end - 1]) + " ____", "answer": words[end - 1],
        })  # fmt: skip
    note = (
        f"One of the {len(TASKS)} tasks for each pattern and relation; the others have another of the {len(DOMAINS)} "
        "domains, or the words of facts in the other order. The authors' file has 74 tasks."
    )
    return Table("table11", "Table 11: examples of the generated tasks", rows, (note,))
