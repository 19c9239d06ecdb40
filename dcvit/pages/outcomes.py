"""Outcomes of a classifier's evaluation in bounded memory: counts, most confident mistakes, and measures from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.evaluators import DeviceBatch
from input_pipeline.preprocess.patches import image_of_patches

BINS = 15  # of confidence, of equal width, as in Guo et al. (2017)
MISTAKES = 24  # kept with their images


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


class Mistake(NamedTuple):
    """An example whose predicted class is not one of its labels.

    Fields:
      example: its index in the data source.
      labels: its classes.
      prediction: the predicted class.
      confidence: the probability of the predicted class.
      image: height × width × channels as sent to the device: uint8, or float if the preprocessing ends in floats.
    """

    example: int
    labels: tuple[int, ...]
    prediction: int
    confidence: float
    image: np.ndarray


class Outcomes:
    """An observer of the classification evaluator, which counts outcomes and keeps the most confident mistakes.

    The memory is bounded by the number of different pairs of label and prediction, not by the number of images.

    Attributes:
      n: number of counted examples: those that have a label and are not padding.
      correct: number of examples whose predicted class is one of their labels.
      several: number of examples with several labels.
      pairs: number of examples by (label, prediction), of the examples with one label.
      bin_examples, bin_correct, bin_confidence: for each of `BINS` bins of confidence, the numbers of examples and of
        correct ones, and the sum of confidences. Bin i is the interval (i/BINS, (i+1)/BINS].
      mistakes: up to `MISTAKES` mistakes, by falling confidence.
    """

    def __init__(self, sigmoid: bool):
        """Start with no examples; confidence is the sigmoid of a logit if `sigmoid`, else a softmax probability."""
        self.sigmoid = sigmoid
        self.n, self.correct, self.several, self.rows = 0, 0, 0, 0
        self.pairs: Counter[tuple[int, int]] = Counter()
        self.bin_examples, self.bin_correct = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
        self.bin_confidence = np.zeros(BINS)
        self.mistakes: list[Mistake] = []

    def select(self, batch: DeviceBatch, logits: jax.Array, scores: DeviceBatch) -> DeviceBatch:
        """Return, on the devices, a batch's arrays for `add`: confidences, and labels and images of top mistakes."""
        labels = batch["labels"] > 0
        probabilities = (jax.nn.sigmoid if self.sigmoid else jax.nn.softmax)(logits.astype(jnp.float32))
        confidence = jnp.take_along_axis(probabilities, scores["prediction"][:, None], axis=-1)[:, 0]
        wrong = scores["counted"] & ~scores["top1"] & jnp.isfinite(confidence)
        rank, rows = jax.lax.top_k(jnp.where(wrong, confidence, -1.0), min(MISTAKES, len(confidence)))
        return {
            "confidence": confidence,
            "mistake": rank >= 0,
            "mistake_row": rows,
            "mistake_labels": labels[rows],
            "mistake_image": batch["image"][rows],
            **({"mistake_grid": batch["grid"][rows]} if "grid" in batch else {}),
        }

    def add(self, found: Mapping[str, np.ndarray]) -> None:
        """Count the examples of a batch; `found` has the evaluator's scores and the result of `select`."""
        counted = found["counted"]
        self.n += int(counted.sum())
        self.correct += int((counted & found["top1"]).sum())
        self.several += int((counted & found["several"]).sum())
        single = counted & ~found["several"]
        pairs = np.stack([found["label"][single], found["prediction"][single]], axis=-1)
        for (label, prediction), number in zip(*np.unique(pairs, axis=0, return_counts=True), strict=True):
            self.pairs[int(label), int(prediction)] += int(number)
        finite = counted & np.isfinite(found["confidence"])  # a model with NaN has no report, because its loss is NaN
        self._add_confidence(found["confidence"][finite].astype(np.float64), found["top1"][finite])
        self._add_mistakes(found)
        self.rows += len(counted)

    def interval(self) -> tuple[float, float]:
        """Return Wilson's 95 % confidence interval of the accuracy (Wilson, 1927); (0, 1) without examples."""
        if not self.n:
            return 0.0, 1.0
        from scipy import stats  # takes long to import

        low, high = stats.binomtest(self.correct, self.n).proportion_ci(0.95, method="wilson")
        return float(low), float(high)

    def bins(self) -> list[Bin]:
        """Return the bins of confidence, from low to high."""
        found = []
        for i, examples in enumerate(map(int, self.bin_examples)):
            sums = float(self.bin_confidence[i]), int(self.bin_correct[i])
            confidence, accuracy = (total / examples if examples else None for total in sums)
            found.append(Bin(i / BINS, (i + 1) / BINS, examples, confidence, accuracy))
        return found

    def calibration_error(self) -> float:
        """Return the expected calibration error, Σ_b |b|/n · |accuracy(b) - confidence(b)| (Guo et al., 2017)."""
        differences = np.abs(self.bin_correct - self.bin_confidence)
        return float(differences.sum() / max(1, self.bin_examples.sum()))

    def classes(self) -> list[ClassMeasures]:
        """Return the measures of every class that is a label or a prediction of an example, in their order."""
        examples, predictions = Counter[int](), Counter[int]()
        for (label, prediction), count in self.pairs.items():
            examples[label] += count
            predictions[prediction] += count
        rows = []
        for c in sorted({*examples, *predictions}):
            hits, labeled, predicted = self.pairs[c, c], examples[c], predictions[c]
            recall, precision = (hits / total if total else None for total in (labeled, predicted))
            rows.append(ClassMeasures(c, labeled, predicted, recall, precision, 2 * hits / (labeled + predicted)))
        return rows

    def confusions(self) -> list[tuple[int, int, int, float]]:
        """Return label, prediction, examples, and their share of the label, of all confusions, by falling number."""
        totals = {row.number: row.examples for row in self.classes()}
        wrong = [(*pair, n, n / totals[pair[0]]) for pair, n in self.pairs.items() if pair[0] != pair[1]]
        return sorted(wrong, key=lambda row: (-row[2], row))

    def _add_confidence(self, confidence: np.ndarray, correct: np.ndarray) -> None:
        """Add examples to the bins; a confidence of 0, which a sigmoid can have, to the first."""
        confidence = np.minimum(confidence, 1)  # a softmax may round above 1
        at = np.maximum(np.searchsorted(np.linspace(0, 1, BINS + 1), confidence, side="left") - 1, 0)
        self.bin_examples += np.bincount(at, minlength=BINS)
        self.bin_correct += np.bincount(at[correct], minlength=BINS)
        self.bin_confidence += np.bincount(at, confidence, minlength=BINS)

    def _add_mistakes(self, found: Mapping[str, np.ndarray]) -> None:
        """Add a batch's mistakes to `mistakes`, and keep only the most confident; of equal ones the first."""
        for i in np.flatnonzero(found["mistake"]):
            row = int(found["mistake_row"][i])
            labels = tuple(map(int, np.flatnonzero(found["mistake_labels"][i])))
            image = found["mistake_image"][i].copy()  # a view would keep the images of the whole batch
            if "mistake_grid" in found:
                image = image_of_patches(image, found["mistake_grid"][i])
            prediction, confidence = int(found["prediction"][row]), float(found["confidence"][row])
            self.mistakes.append(Mistake(self.rows + row, labels, prediction, confidence, image))
        self.mistakes.sort(key=lambda mistake: (-mistake.confidence, mistake.example))
        del self.mistakes[MISTAKES:]
