"""Top-1 and top-5 accuracy, mean recall and loss of a classifier over all examples of a data source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import input_pipeline
from dcvit.evaluators import IMAGE_COLUMNS, DeviceBatch, EvaluationData, Predict, Row, TimedFunction, batches, image_row
from dcvit.models import Params, losses, pixels
from dcvit.models.packed_images import model_inputs

ABSENT_LOGIT = -1e9  # logit of an excluded class; finite, so that 0 · log p is 0


class Observer(Protocol):
    """Interface of an object that gets the result of every example, as `dcvit.pages.outcomes.Outcomes` does.

    `scores` has arrays of shape B: `counted` (False for padding and skipped examples), `prediction`, whether it is
    correct, `top1`, `label`, the first one, and `several`, whether there are more. Excluded classes have the logit
    `ABSENT_LOGIT`.
    """

    def select(self, batch: DeviceBatch, logits: jax.Array, scores: DeviceBatch) -> DeviceBatch:
        """Return further arrays for `add`, computed on the devices."""

    def add(self, found: Mapping[str, np.ndarray]) -> None:
        """Receive the scores of a batch and the result of `select`; batches come in data order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the evaluator in a config.

    Fields:
      data: arguments of `input_pipeline.open_source`.
      pp: a preprocessing string that yields `image` and multi-hot `labels`.
      batch_size: rounded up to a multiple of the device count.
      loss: a name in `dcvit.models.losses`.
      present_classes_only: predict only classes that occur in the data, as in published results on ImageNet-A and -R,
        which have 200 of ImageNet's 1000 classes. The data must have a key `label`.
    """

    data: dict[str, Any]
    pp: str
    batch_size: int = 256
    loss: str = "softmax_xent"
    present_classes_only: bool = False


class Evaluator:
    """Evaluator of a classifier. A prediction is correct if it is any label.

    Examples without labels, and those with an unknown label, below 0, are skipped. The metrics are exact for any batch
    size and device count.
    """

    model_name = "vit"
    target = ("labels", 1)  # key of the preprocessed labels, and their rank
    columns = IMAGE_COLUMNS
    metrics = ("top1", "top5", "mean_recall", "loss", "n")  # `run` omits those that say nothing about the data
    lower_is_better = ("loss",)
    observer: Observer | None = None  # set before the first run, which compiles its `select`

    def __init__(self, predict: Predict, data: EvaluationData, options: Options):
        """Prepare the functions of a batch; the arguments are those of `dcvit.evaluators.Evaluator`."""
        self.data, self.options = data, options
        self.present: np.ndarray | None = None  # the classes that may be predicted, after the first batch
        self.host_pp, to_numbers = pixels.split(options.pp)
        loss_fn = getattr(losses, options.loss)

        def score(params: Params, batch: DeviceBatch, present: jax.Array) -> DeviceBatch:
            logits = jnp.where(present, predict(params, model_inputs(batch, to_numbers))[0], ABSENT_LOGIT)
            labels = batch["labels"]
            best = jax.lax.top_k(logits, min(5, logits.shape[-1]))[1]
            hits = jnp.take_along_axis(labels, best, axis=-1) > 0
            scores = {
                "counted": (batch["_mask"] > 0) & jnp.any(labels > 0, axis=-1) & ~jnp.any(labels < 0, axis=-1),
                "prediction": best[:, 0],
                "top1": hits[:, 0],
                "top5": jnp.any(hits, axis=-1),
                "label": jnp.argmax(labels > 0, axis=-1),
                "several": jnp.sum(labels > 0, axis=-1) > 1,
                "loss": loss_fn(logits, labels),
            }
            return scores | (self.observer.select(batch, logits, scores) if self.observer else {})

        self.score = TimedFunction(score, data.mesh, options.batch_size)

    def run(self, params: Params) -> dict[str, float]:
        """Return the metrics by name, as numbers over all counted examples.

        They are `top1` and `top5` (fractions of `n`; `top5` with more than five classes), `mean_recall` (the mean of
        the classes' top-1 accuracies, over the examples with one label), `loss` (mean, in nats) and `n`, the number of
        counted examples.
        """
        correct = {"top1": 0, "top5": 0}
        total, n = 0.0, 0
        examples, hits = np.zeros((2, 1), int)  # of each class
        self.score.reset_timer()
        for batch in batches(self.data, self.host_pp, self.options.batch_size):
            if self.present is None:
                self.present = self._present(batch["labels"].shape[-1])
            scores, _ = self.score(params, batch, self.present)
            counted = scores["counted"]
            n += int(counted.sum())
            total += float(scores["loss"][counted].sum(dtype=np.float64))
            for name in correct:
                correct[name] += int(scores[name][counted].sum())
            single = counted & ~scores["several"]
            examples = examples + np.bincount(scores["label"][single], minlength=len(self.present))
            hits = hits + np.bincount(scores["label"][single & scores["top1"]], minlength=len(self.present))
            if self.observer:
                self.observer.add(scores)
        metrics = {name: count / max(n, 1) for name, count in correct.items()}
        if self.present is None or self.present.sum() <= 5:
            del metrics["top5"]
        if examples.any():
            metrics["mean_recall"] = float(np.mean(hits[examples > 0] / examples[examples > 0]))
        return metrics | {"loss": total / max(n, 1), "n": n}

    def rows(self, name: str, metrics: Mapping[str, float], net: nn.Module) -> list[Row]:
        """Return one row of results: `name`, size and GFLOPs of an image, the metrics, and images per second."""
        return [{**image_row(name, net, self.data.example, self.score), **metrics}]

    def _present(self, classes: int) -> np.ndarray:
        """Return the mask of the classes that may be predicted, bool of shape (classes,)."""
        if not self.options.present_classes_only:
            return np.ones(classes, bool)
        labels = self.data.source.labels
        if labels is not None:
            found = np.flatnonzero((labels > 0).any(axis=0)) if labels.ndim > 1 else np.unique(labels[labels >= 0])
            return np.isin(np.arange(classes), found)
        pp = f"onehot({classes}, ignore=-1)|keep('labels')"  # keeps the image encoded; every process reads all
        read = input_pipeline.eval_batches(self.data.source, pp, self.options.batch_size, corrupt=self.data.corrupt)
        present: np.ndarray = np.any([np.any(batch["labels"] > 0, axis=0) for batch in read], axis=0)
        return present
