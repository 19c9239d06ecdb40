"""Tables 5 and 11 and Figure 6: generated in-context tasks, and small models that solve them by number of shots.

The tasks are those of `input_pipeline.text.synthetic_tasks`, not the authors' file, which can be scored with any model
(docs/composed_tasks.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from dcvit.pages.evaluation import evaluate
from dcvit.reproduction import seeded
from dcvit.reproduction.seeded import Train
from dcvit.reproduction.stored import run_checksum, stored
from dcvit.reproduction.tables import Chart, Curves, Row, Table
from dcvit.training.seeds import summarize, workdir_of
from dcvit.training.trained import open_trained
from input_pipeline.text.synthetic import Source
from input_pipeline.text.synthetic_tasks import DOMAINS, TASKS

STEPS, SHOTS = 600, 3
METRIC = "validation/accuracy"
# The paper's perplexity and accuracy of Pythia-6.9B and DCPythia-6.9B.
ARMS = {"plain": ("mha", 10.05, 31.9), "DCMHA": ("dcmha", 7.36, 39.0)}


def train(runs: Path, seeds: Sequence[int], train: Train, steps: int) -> int:
    """Train both models, seed by seed, and return the exit status of the first run that fails, or 0.

    Raises:
      ConfigError, MetricsError: see `dcvit.reproduction.seeded.run`.
    """
    for seed in seeds:
        for name, (attention, *_) in ARMS.items():
            words = [f"seed={seed}", "tensorboard=False", "evals.validation.log_percent=100"]
            spec = f"lm_synthetic:attention={attention},steps={steps},shots={SHOTS}"
            if status := seeded.run(train, spec, workdir_of(runs / name, seed), words, METRIC):
                return status
    return 0


def measured(workdir: Path) -> dict[str, dict[str, float]]:
    """Return the metrics of a run's evaluations by name; they are stored in the workdir.

    Raises:
      ConfigError: see `dcvit.reproduction.stored`.
    """

    def compute() -> dict[str, dict[str, float]]:
        rows, _ = evaluate(open_trained(workdir, None, None))
        return {
            str(row["evaluation"]): {key: cast(float, row[key]) for key in ("accuracy", "perplexity")} for row in rows
        }

    return stored(workdir / "shots.json", run_checksum(workdir), compute)


def summaries(runs: Path, seeds: Sequence[int], evaluation: str) -> dict[str, Row]:
    """Return mean and interval of accuracy (in percent) and perplexity of both models, by "MODEL METRIC"."""
    values = {
        seed: {
            f"{name} {metric}": measured(workdir_of(runs / name, seed))[evaluation][metric] * scale
            for name in ARMS
            for metric, scale in (("accuracy", 100), ("perplexity", 1))
        }
        for seed in seeds
    }
    return {str(row["metric"]): row for row in summarize(values)}


def check_complete(runs: Path, seeds: Sequence[int]) -> None:
    """Raise ConfigError if a run is not complete, or the runs of a model differ in more than their seed."""
    seeded.all_finals(runs, {name: runs / name for name in ARMS}, seeds, METRIC)


def table5(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the accuracy of both models over all shots."""
    check_complete(runs, seeds)
    found = summaries(runs, seeds, "validation")
    rows: list[Row] = [
        {
            "model": name, "perplexity": found[f"{name} perplexity"]["mean"],
            "accuracy %": found[f"{name} accuracy"]["mean"], "± 95 %": found[f"{name} accuracy"]["± 95 %"],
            "perplexity, paper": perplexity, "accuracy %, paper": accuracy,
        }
        for name, (_, perplexity, accuracy) in ARMS.items()
    ]  # fmt: skip
    return Table("table5", "Table 5: in-context tasks", rows, (about(seeds, steps),),
                 Chart("model", "accuracy %", "± 95 %", "accuracy %, paper"))  # fmt: skip


def figure6(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the accuracy of both models by the number of examples before the answer's."""
    check_complete(runs, seeds)
    by_shots = {shots: summaries(runs, seeds, f"validation/{shots}-shot") for shots in range(SHOTS + 1)}
    rows: list[Row] = [
        {
            "model": name, "shots": shots, "accuracy %": found[f"{name} accuracy"]["mean"],
            "± 95 %": found[f"{name} accuracy"]["± 95 %"], "perplexity": found[f"{name} perplexity"]["mean"],
        }
        for name in ARMS
        for shots, found in by_shots.items()
    ]  # fmt: skip
    return Table("figure6", "Figure 6: in-context tasks by the number of shots", rows, (about(seeds, steps),),
                 Curves("model", "shots", "accuracy %", "± 95 %", scale="linear"))  # fmt: skip


def about(seeds: Sequence[int], steps: int) -> str:
    """Return the settings of the runs as a note."""
    return (
        f"Models of configs/lm_synthetic.py after {steps} steps, trained on these tasks with {SHOTS + 1} examples in a "
        f"row; seeds {', '.join(map(str, seeds))}, intervals of Student's t distribution. The paper's models, "
        "Pythia-6.9B and DCPythia-6.9B, are trained on the Pile and see tasks of the authors' file, with 2 to 7 shots."
    )


def table11() -> Table:
    """Return an example of each pattern and relation of the generated tasks."""
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
