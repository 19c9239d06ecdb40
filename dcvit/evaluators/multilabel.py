"""Average precision and F1 of a classifier with several labels for each image, over all examples of a data source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from scipy.special import expit, logit

from dcvit.dcmha.shapes import Float, Shaped
from dcvit.errors import ConfigError
from dcvit.evaluators import DeviceBatch, EvaluationData, Predict, Row, TimedFunction, batches, image_row
from dcvit.models import Params, losses, pixels
from dcvit.models.packed_images import model_inputs

METRICS = ("mean_ap", "f1_macro", "f1_micro", "loss", "n")
THRESHOLD = 0.5  # probability from which a class is predicted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the evaluator in a config.

    Fields:
      data: arguments of `input_pipeline.open_source`.
      pp: a preprocessing string that yields `image` and multi-hot `labels`, with -1 for unknown ones.
      batch_size: rounded up to a multiple of the device count.
      loss: the name of the model's loss, "sigmoid_xent".
      thresholds: the probability from which a class is predicted, one number or one for each class. `dcvit evaluate
        --thresholds` chooses and stores others, which replace these.
    """

    data: dict[str, Any]
    pp: str
    batch_size: int = 256
    loss: str = "sigmoid_xent"
    thresholds: float | Sequence[float] = THRESHOLD

    def __post_init__(self) -> None:
        if self.loss != "sigmoid_xent":
            raise ConfigError(f"type='multilabel' is for loss='sigmoid_xent', not {self.loss!r}; use 'classification'")
        several = self.thresholds if isinstance(self.thresholds, list | tuple) else [self.thresholds]
        numbers = all(isinstance(t, float | int) and not isinstance(t, bool) and 0 <= t <= 1 for t in several)
        if not several or not numbers:
            raise ConfigError(
                f"thresholds={self.thresholds!r} should be a probability from 0 to 1, or one for each class"
            )


class ClassResult(NamedTuple):
    """Measures of one class over the images whose label for it is known.

    Fields:
      positives, predictions, hits, images: numbers of images of the class, of images for which it is predicted, of
        those for which both are so, and of all.
      average_precision: None without images of the class.
      threshold: the probability from which the class is predicted.
    """

    positives: int
    predictions: int
    hits: int
    images: int
    average_precision: float | None
    threshold: float

    @property
    def precision(self) -> float | None:
        """Hits ÷ predictions; None if the class is never predicted."""
        return self.hits / self.predictions if self.predictions else None

    @property
    def recall(self) -> float | None:
        """Hits ÷ positives; None without images of the class."""
        return self.hits / self.positives if self.positives else None

    @property
    def f1(self) -> float:
        """2·hits ÷ (positives + predictions), and 0 without either."""
        return 2 * self.hits / max(self.positives + self.predictions, 1)


class Evaluator:
    """Evaluator of a multi-label classifier. Labels below 0 are unknown and do not count.

    The metrics are exact for any batch size and device count: logits and labels of all examples are kept in memory, 5
    bytes for each class and example.
    """

    model_name = "vit"
    target = ("labels", 1)  # key of the preprocessed labels, and their rank
    columns = ("gflops", "image_size", *METRICS, "images_per_second")
    metrics = METRICS
    lower_is_better = ("loss",)

    def __init__(self, predict: Predict, data: EvaluationData, options: Options):
        """Prepare the functions of a batch; the arguments are those of `dcvit.evaluators.Evaluator`."""
        self.data, self.options = data, options
        self.thresholds, self.thresholds_from = options.thresholds, "The thresholds are those of the config."
        self.host_pp, to_numbers = pixels.split(options.pp)
        self.logits, self.labels = np.empty((0, 0), np.float32), np.empty((0, 0), np.int8)  # of the last run, N C
        self.loss_sum = 0.0  # of the last run
        self.classes: list[ClassResult] = []  # of the last call of `result`

        def score(params: Params, batch: DeviceBatch) -> DeviceBatch:
            logits = predict(params, model_inputs(batch, to_numbers))[0].astype(jnp.float32)
            return {"logits": logits, "loss": losses.sigmoid_xent(logits, batch["labels"])}

        self.score = TimedFunction(score, data.mesh, options.batch_size, keep=("labels",))

    def run(self, params: Params) -> dict[str, float]:
        """Return the metrics by name, over all known labels.

        They are `mean_ap` and `f1_macro`, means over the classes that have images, `f1_micro`, of all labels together,
        `loss`, the number of classes times the mean over all known labels in nats, and `n`, the number of images with a
        known label.
        """
        self.score.reset_timer()
        n, self.loss_sum = 0, 0.0
        for number, batch in enumerate(batches(self.data, self.host_pp, self.options.batch_size)):
            scores, kept = self.score(params, batch)
            if not number:
                shape = len(self.data.source), scores["logits"].shape[-1]
                # They are read by class.
                self.logits, self.labels = (np.empty(shape, dtype, order="F") for dtype in (np.float32, np.int8))
            known = (kept["_mask"] > 0) & (kept["labels"] >= 0).any(axis=-1)
            rows = slice(n, n := n + int(known.sum()))
            self.logits[rows], self.labels[rows] = scores["logits"][known], np.sign(kept["labels"][known])
            self.loss_sum += float(scores["loss"][known].sum(dtype=np.float64))
        self.logits, self.labels = self.logits[:n], self.labels[:n]
        return self.result()

    def result(self) -> dict[str, float]:
        """Return the metrics of the last run for the present thresholds; see `run`."""
        thresholds = np.broadcast_to(np.asarray(self.thresholds, float), self.logits.shape[-1])
        self.classes = measures(self.logits, self.labels, thresholds.tolist())
        counted = [each for each in self.classes if each.positives]
        hits = sum(each.hits for each in self.classes)
        total = sum(each.positives + each.predictions for each in self.classes)
        return {
            "mean_ap": float(np.mean([each.average_precision for each in counted])) if counted else 0.0,
            "f1_macro": float(np.mean([each.f1 for each in counted])) if counted else 0.0,
            "f1_micro": 2 * hits / max(total, 1),
            "loss": self.loss_sum * self.labels.shape[-1] / max(int((self.labels >= 0).sum()), 1),
            "n": len(self.labels),
        }

    def rows(self, name: str, metrics: Mapping[str, float], net: nn.Module) -> list[Row]:
        """Return one row of results: `name`, size and GFLOPs of an image, the metrics, and images per second."""
        return [{**image_row(name, net, self.data.example, self.score), **metrics}]

    def set_thresholds(self, thresholds: Sequence[float], origin: str) -> None:
        """Use other thresholds, one for each class, from now on; `origin` is a sentence about them."""
        self.thresholds, self.thresholds_from = thresholds, origin


def measures(
    logits: Float[np.ndarray, "N C"], labels: Shaped[np.ndarray, "N C"], thresholds: Sequence[float]
) -> list[ClassResult]:
    """Return the measures of each class; labels below 0 do not count."""
    lowest, found = logit(np.asarray(thresholds, np.float64)), []
    for c, threshold in enumerate(thresholds):
        known = labels[:, c] >= 0
        positive, chosen = labels[known, c] > 0, logits[known, c] >= lowest[c]
        positives, predictions, hits, images = (int(x.sum()) for x in (positive, chosen, positive & chosen, known))
        area = average_precision(logits[known, c], positive) if positives else None
        found.append(ClassResult(positives, predictions, hits, images, area, threshold))
    return found


def average_precision(scores: Float[np.ndarray, " N"], positive: np.ndarray) -> float:
    """Return Σ_k (R_k - R_{k-1})·P_k, with precision and recall of the scores from the k-th highest different one on.

    Args:
      scores: higher for examples that are more likely of the class.
      positive: True for the examples of the class, of which there is one at least.
    """
    hits, examples = _at_least(scores, positive)[1:]
    return float(np.sum(np.diff(hits, prepend=0) * hits / examples) / hits[-1])


def best_thresholds(logits: Float[np.ndarray, "N C"], labels: Shaped[np.ndarray, "N C"]) -> list[float | None]:
    """Return the threshold with the highest F1 of each class; None for one without images.

    It is halfway between the probabilities of two examples, so that rounding does not change a prediction. Of equal F1,
    the highest threshold is taken. Logits above 36.7 have the probability 1 in float64: no threshold separates them,
    and that of 1 predicts nothing.
    """
    chosen: list[float | None] = []
    for c in range(logits.shape[-1]):
        known = labels[:, c] >= 0
        positive = labels[known, c] > 0
        if not positive.any():
            chosen.append(None)
            continue
        scores, hits, examples = (x.astype(np.float64) for x in _at_least(logits[known, c], positive))
        p = expit(scores)
        thresholds = (p + np.append(p[1:], 0)) / 2
        reached = np.searchsorted(-scores, -logit(thresholds), side="right")  # so many of the different scores
        f1 = np.append(0, 2 * hits / (hits[-1] + examples))[reached]
        chosen.append(float(thresholds[np.argmax(f1)]))
    return chosen


def _at_least(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the different scores, falling; of each, the numbers of positives and examples with at least this score."""
    order = np.argsort(-scores, kind="stable")
    scores, positive = scores[order], positive[order]
    ends = np.flatnonzero(np.append(np.diff(scores) != 0, True))
    return scores[ends], np.cumsum(positive)[ends], ends + 1
