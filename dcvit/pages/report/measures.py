"""Measures of a classifier, computed from the counts of `dcvit.pages.report.outcomes.Outcomes`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dcvit.pages.report.outcomes import BINS, Outcomes

Pairs = Mapping[tuple[int, int], int]  # number of examples by (label, prediction)


class Bin(NamedTuple):
    """A bin of examples with a confidence in (low, high]; mean confidence and accuracy are None if it is empty."""

    low: float
    high: float
    examples: int
    confidence: float | None
    accuracy: float | None


class ClassMeasures(NamedTuple):
    """Recall, precision and F1 of class `number`; recall is None without examples, precision without predictions."""

    number: int
    examples: int
    predictions: int
    recall: float | None
    precision: float | None
    f1: float


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of the proportion successes/n (Wilson, 1927); (0, 1) if n is 0."""
    if not n:
        return 0.0, 1.0
    from scipy import stats  # takes long to import

    low, high = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    return float(low), float(high)


def calibration_bins(outcomes: Outcomes) -> list[Bin]:
    """Return the bins of confidence, from low to high."""
    bins = []
    for i, examples in enumerate(map(int, outcomes.bin_examples)):
        sums = float(outcomes.bin_confidence[i]), int(outcomes.bin_correct[i])
        confidence, accuracy = (total / examples if examples else None for total in sums)
        bins.append(Bin(i / BINS, (i + 1) / BINS, examples, confidence, accuracy))
    return bins


def calibration_error(outcomes: Outcomes) -> float:
    """Return the expected calibration error, Σ_b |b|/n · |accuracy(b) - confidence(b)| (Guo et al., 2017, Eq. 3)."""
    differences = np.abs(outcomes.bin_correct - outcomes.bin_confidence)
    return float(differences.sum() / max(1, outcomes.bin_examples.sum()))


def class_measures(pairs: Pairs) -> list[ClassMeasures]:
    """Return the measures of every class that is a label or a prediction of an example, in the order of the classes."""
    examples, predictions = Counter[int](), Counter[int]()
    for (label, prediction), count in pairs.items():
        examples[label] += count
        predictions[prediction] += count
    rows = []
    for c in sorted({*examples, *predictions}):
        hits, labeled, predicted = pairs.get((c, c), 0), examples[c], predictions[c]
        recall, precision = (hits / total if total else None for total in (labeled, predicted))
        rows.append(ClassMeasures(c, labeled, predicted, recall, precision, 2 * hits / (labeled + predicted)))
    return rows


def frequent_confusions(pairs: Pairs) -> list[tuple[int, int, int]]:
    """Return (label, prediction, number of examples) of all mistakes, the most frequent first, then by class number."""
    wrong = [(label, prediction, number) for (label, prediction), number in pairs.items() if label != prediction]
    return sorted(wrong, key=lambda row: (-row[2], row[:2]))
