"""Report of a classifier's evaluation: one HTML file with everything inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from dcvit.errors import ConfigError
from dcvit.evaluators import classification, multilabel
from dcvit.evaluators.multilabel import ClassResult
from dcvit.pages.html import document
from dcvit.pages.outcomes import ClassMeasures, Outcomes

MATRIX_CLASSES = 20  # up to so many classes, a page shows the confusion matrix, and classes in their order
CLASS_ROWS = 1000  # of the table of classes
# Metrics of the table of all evaluations, with their titles.
TITLES = {
    "top1": "Top-1", "top5": "Top-5", "mean_recall": "Mean recall", "mean_ap": "Mean AP", "f1_macro": "F1, macro",
    "f1_micro": "F1, micro",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of one classification or multi-label evaluator.

    Fields:
      name: its name in the config.
      row: the metrics that `dcvit evaluate` prints, by column.
      class_names: a name for each class of the model.
      options: the evaluator's options in the config.
      describe: function from the index of an example to its location.
      outcomes: the counts and mistakes of a classification evaluator; None for a multi-label one.
      labels: the measures of each class by a multi-label evaluator.
      thresholds_from: a sentence about where its thresholds were chosen.
    """

    name: str
    row: Mapping[str, object]
    class_names: Sequence[str]
    options: Mapping[str, object]
    describe: Callable[[int], str] = str
    outcomes: Outcomes | None = None
    labels: Sequence[ClassResult] = ()
    thresholds_from: str = ""

    def class_measures(self) -> list[ClassMeasures]:
        """Return the measures of each class: in their order, or of many classes with the lowest recall first."""
        found = self.outcomes.classes() if self.outcomes else []
        if len(self.class_names) > MATRIX_CLASSES:
            found.sort(key=lambda row: 2.0 if row.recall is None else row.recall)
        return found

    def label_measures(self) -> list[tuple[int, ClassResult]]:
        """Return number and measures of each class, in order or, of many classes, with the lowest AP first."""
        found = [*enumerate(self.labels)]
        if len(found) > MATRIX_CLASSES:
            found.sort(key=lambda pair: 2.0 if pair[1].average_precision is None else pair[1].average_precision)
        return found


def observe(evaluators: Mapping[str, object]) -> dict[str, Outcomes]:
    """Attach `Outcomes` to each classification evaluator, which its next run fills, and return them by its name.

    A multi-label evaluator keeps the measures of its last run itself.

    Raises:
      ConfigError: there is neither a classification nor a multi-label evaluator.
    """
    found: dict[str, Outcomes] = {}
    for name, evaluator in evaluators.items():
        if isinstance(evaluator, classification.Evaluator):
            found[name] = evaluator.observer = Outcomes(sigmoid=evaluator.options.loss == "sigmoid_xent")
    if not found and not any(isinstance(evaluator, multilabel.Evaluator) for evaluator in evaluators.values()):
        needs = "need an evaluator of type 'classification' or 'multilabel' in config.evals"
        raise ConfigError(f"--report and --per-class {needs}")
    return found


def render(
    model: str,
    facts: Mapping[str, str],
    settings: Mapping[str, object],
    rows: Sequence[Mapping[str, object]],
    evaluations: Sequence[Evaluation],
) -> str:
    """Return the report of an evaluation as HTML.

    Args:
      model: the name of the model.
      facts: texts that describe the run, by name.
      settings: the config of the run.
      rows: all rows that `dcvit evaluate` prints, also those of other evaluators.
      evaluations: the results of the classification and the multi-label evaluators.
    """
    return document(
        "report", ["report"], title=f"{model} · evaluation report", model=model, facts=facts, settings=settings,
        rows=rows, evaluations=evaluations, sections={each.name: i for i, each in enumerate(evaluations)},
        shown={key: title for key, title in TITLES.items() if any(row.get(key) is not None for row in rows)},
        matrix_classes=MATRIX_CLASSES, rows_of_classes=CLASS_ROWS,
    )  # fmt: skip
