"""Table 4: downstream tasks of Pythia and DCPythia. At desk scale the largest models of Figure 4 and local tasks.

lm-evaluation-harness scores the tasks of `dcvit.reproduction.local_tasks`, and downloads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dcvit.inference import harness_tasks
from dcvit.reproduction import local_tasks, scaling, seeded
from dcvit.reproduction.arms import CONTEXT, METRIC
from dcvit.reproduction.local_tasks import CHOICE, CLOZE
from dcvit.reproduction.scaling import Point
from dcvit.reproduction.seeded import Train
from dcvit.reproduction.stored import run_checksum, stored
from dcvit.reproduction.tables import Cell, Chart, Row, Table
from dcvit.training.seeds import summarize, workdir_of
from dcvit.training.trained import open_trained

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


def train(runs: Path, seeds: Sequence[int], train: Train, steps: int) -> int:
    """Train both models, seed by seed, and return the exit status of the first run that fails, or 0.

    Raises:
      ConfigError: lm-evaluation-harness is not installed, or see `dcvit.reproduction.seeded.run`.
      MetricsError: see there.
    """
    harness_tasks.prepare(online=False)
    return scaling.train_points({family: [point] for family, point in models(steps).items()}, runs, seeds, train)


def models(steps: int) -> dict[str, Point]:
    """Return the model of each family, the largest of Figure 4."""
    found = scaling.points("figure4", steps)
    return {family: found[family][-1] for family in FAMILIES}


def measured(workdir: Path, tasks: Path) -> dict[str, float]:
    """Return the harness's results of a run by "TASK METRIC"; they are stored in the workdir.

    The perplexity is that of a target, and its log2 the mean bits of one.

    Raises:
      ConfigError: see `dcvit.reproduction.stored`.
    """

    def compute() -> dict[str, float]:
        trained = open_trained(workdir, None, None)
        harness_tasks.prepare(online=False)
        from dcvit.inference.harness import HarnessModel  # imports lm_eval, which reads the variables of `prepare`

        def make_model() -> HarnessModel:
            net, params = trained.language_model()
            return HarnessModel(net, params, trained.tokenizer(), batch_size=BATCH)

        results = harness_tasks.evaluate_tasks(
            make_model, (CLOZE, CHOICE), include_path=tasks, allow_code=False, num_fewshot=None, limit=None
        )
        cloze, choice = (results["results"][task] for task in (CLOZE, CHOICE))
        return {
            f"{CLOZE} acc": cloze["acc,none"], f"{CHOICE} acc_norm": choice["acc_norm,none"],
            LOG_PERPLEXITY: math.log2(cloze["perplexity,none"]),
        }  # fmt: skip

    return stored(workdir / "harness.json", run_checksum(workdir), compute)


def table(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the table of complete runs.

    Raises:
      ConfigError: a run is not complete, or the runs of a model differ in more than their seed.
    """
    folders = {family: scaling.folder(runs, family, point) for family, point in models(steps).items()}
    losses = seeded.all_finals(runs, folders, seeds, METRIC)
    tasks = runs / "tasks"
    local_tasks.write(tasks, CONTEXT)
    values: dict[int, dict[str, float]] = {}
    for seed in seeds:
        found = {
            family: {METRIC: losses[seed][family], **measured(workdir_of(folder, seed), tasks)}
            for family, folder in folders.items()
        }
        values[seed] = _measures(found)
    summary: dict[str, Row] = {str(row["metric"]): row for row in summarize(values)}
    rows = [_row(measure, paper, summary) for measure, (_, paper) in MEASURES.items()]
    return Table("table4", "Table 4: downstream tasks of Pythia and DCPythia", rows,
                 (about(tasks, seeds, steps), verdict(summary[f"difference {AVERAGE}"])),
                 Chart("measure", "difference", "difference ± 95 %", "difference 6.9B, paper"))  # fmt: skip


def _measures(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the measures of one seed, in percent if they are accuracies, by "FAMILY MEASURE" and as differences."""
    values: dict[str, float] = {}
    for measure, (metrics, _) in MEASURES.items():
        scale = 100 if "%" in measure else 1
        for family in FAMILIES:
            values[f"{family} {measure}"] = scale * sum(found[family][name] for name in metrics) / len(metrics)
        plain, composed = (values[f"{family} {measure}"] for family in FAMILIES)
        values[f"difference {measure}"] = composed - plain
    return values


def _row(measure: str, paper: Sequence[float | None], summary: dict[str, Row]) -> Row:
    row: dict[str, Cell] = {"measure": measure}
    for name in (*FAMILIES, "difference"):
        row[name] = summary[f"{name} {measure}"]["mean"]
        row[f"{name} ± 95 %"] = summary[f"{name} {measure}"]["± 95 %"]
    for size, (plain, composed) in {"2.8B": paper[:2], "6.9B": paper[2:]}.items():
        row |= {f"Pythia-{size}, paper": plain, f"DCPythia-{size}, paper": composed}
        row[f"difference {size}, paper"] = None if plain is None or composed is None else composed - plain
    return row


def verdict(difference: Row) -> str:
    """Return if the paper's statement on the average accuracy holds, by the interval of the difference over seeds."""
    mean, interval = difference["mean"], difference["± 95 %"]
    assert isinstance(mean, float)
    found = f"undecided ({mean:+.2f})"
    if isinstance(interval, float) and abs(mean) > interval:
        found = f"{'holds' if mean > 0 else 'does not hold'} ({mean:+.2f} ± {interval:.2f})"
    return (
        f"The paper's statement that DCPythia has a higher average accuracy than Pythia, in these stand-ins: {found}."
    )


def about(tasks: Path, seeds: Sequence[int], steps: int) -> str:
    """Return the settings of the runs and the form of the tasks as a note."""
    count = {name: len((tasks / f"{name}.jsonl").read_text().splitlines()) for name in (CLOZE, CHOICE)}
    return (
        f"Stand-ins for the paper's models and tasks: the largest models of figure4 after {steps} steps, and questions "
        f"of up to {CONTEXT} bytes from the validation split of Python's standard library, scored by "
        f"lm-evaluation-harness without examples. Cloze: {count[CLOZE]} words that their context has already, where "
        f"every byte must have the highest logit. Choice: {count[CHOICE]} lines among {local_tasks.CHOICES}, "
        f"the others of other files, by log-likelihood per byte; {100 // local_tasks.CHOICES} % by chance. Seeds "
        f"{', '.join(map(str, seeds))}; intervals of Student's t distribution over seeds, all with the same questions. "
        "The difference is that of DCPythia to Pythia with the same seed. The paper's values are those of zero-shot "
        "evaluation; its 5-shot values, its models of 12B and DCFormer++ are not reproduced here."
    )
