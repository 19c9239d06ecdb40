"""Top-1, top-5 and loss of a classifier over every example of a data source, exact for any batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import input_pipeline
from dcvit.evaluators import IMAGE_COLUMNS, Timed, about_images, batches
from dcvit.models import losses, pixels

ABSENT = -1e9  # the logit of a class that is not to be chosen; finite, so that 0 · log p stays 0


class Evaluator:
    """Counts an example as correct when any of its labels is hit; one without labels is left out, as in ReaL."""

    target = ("labels", 1)  # what the preprocessing yields beside the image, and its rank
    columns = IMAGE_COLUMNS
    metrics = ("top1", "top5", "loss", "n")
    example: jax.ShapeDtypeStruct  # set by `dcvit.training.setup`, which looks at the data

    def __init__(
        self,
        predict: Callable[..., Any],
        mesh: Mesh,
        *,
        data: dict,
        pp: str,
        batch_size: int = 256,
        loss: str = "softmax_xent",
        present_classes_only: bool = False,
        cache: bool = False,
        corrupt: str = "fail",
        corrupt_max: int = 100,
    ):
        """
        Args:
          predict: (params, images) -> logits, B C, and named intermediates.
          mesh: the devices that share a batch.
          data: arguments of `input_pipeline.open_source`.
          pp: a preprocessing string that yields `image` and multi-hot `labels`.
          batch_size: rounded up to a multiple of the device count.
          loss: a name in `dcvit.models.losses`.
          present_classes_only: choose among the classes that occur in the data, as ImageNet-A and -R, which have
            200 of ImageNet's 1000, are reported. The data's label is `label`.
          cache: keep the preprocessed batches in memory.
          corrupt, corrupt_max: what becomes of examples that cannot be read; see `input_pipeline.CorruptPolicy`.
        """
        self.source = input_pipeline.open_source(**data)
        self.pp, self.batch_size, self.mesh = pp, batch_size, mesh
        self.corrupt = input_pipeline.CorruptPolicy(corrupt, corrupt_max)
        self.present_classes_only = present_classes_only
        self.present: np.ndarray | None = None  # which classes may be chosen, known after the first batch
        self.cached: list[dict[str, np.ndarray]] | None = [] if cache else None
        self.images_per_second = 0.0  # of the last run, compilation left out
        self.host_pp, to_numbers = pixels.split(pp)
        loss_fn = getattr(losses, loss)

        def score(params: Any, batch: dict[str, jax.Array], present: jax.Array) -> dict[str, jax.Array]:
            logits = jnp.where(present, predict(params, to_numbers(batch["image"]))[0], ABSENT)
            labels = batch["labels"]
            best = jax.lax.top_k(logits, min(5, logits.shape[-1]))[1]
            hits = jnp.take_along_axis(labels, best, axis=-1) > 0
            return {
                "counted": (batch["_mask"] > 0) & jnp.any(labels > 0, axis=-1),
                "top1": hits[:, 0],
                "top5": jnp.any(hits, axis=-1),
                "loss": loss_fn(logits, labels),
            }

        self.score = Timed(score, mesh, batch_size)

    def run(self, params: Any) -> dict[str, float]:
        """`top1`, `top5` (fractions of `n`), `loss` (mean, nats) and `n`, the number of examples counted."""
        correct = {"top1": 0, "top5": 0}
        total, n = 0.0, 0
        self.score.restart()
        for batch in self._batches():
            if self.present is None:
                self.present = self._present(batch["labels"].shape[-1])
            scores, _ = self.score(params, batch, self.present)
            counted = scores["counted"]
            n += int(counted.sum())
            total += float(scores["loss"][counted].sum(dtype=np.float64))
            for name in correct:
                correct[name] += int(scores[name][counted].sum())
        self.images_per_second = self.score.examples / self.score.seconds
        return {name: hits / max(n, 1) for name, hits in correct.items()} | {"loss": total / max(n, 1), "n": n}

    def rows(self, name: str, numbers: dict[str, float], net: Any) -> list[dict[str, Any]]:
        """One row."""
        speed = {"images_per_second": round(self.images_per_second, 1)}
        return [{"evaluation": name, **about_images(net, self.example), **numbers, **speed}]

    def _batches(self) -> Iterator[dict[str, np.ndarray]]:
        """The preprocessed batches, from memory where they are kept there."""
        if self.cached:
            yield from self.cached
            return
        kept = []
        for batch in batches(self.source, self.host_pp, self.batch_size, self.mesh, self.corrupt):
            yield batch
            if self.cached is not None:
                kept.append(batch)
        if self.cached is not None:
            self.cached = kept

    def _present(self, classes: int) -> np.ndarray:
        """Which classes may be chosen, bool of shape (classes,)."""
        if not self.present_classes_only:
            return np.ones(classes, bool)
        pp = f"onehot({classes})|keep('labels')"  # leaves the image encoded
        read = input_pipeline.eval_batches(self.source, pp, self.batch_size, corrupt=self.corrupt)  # every process, all
        return np.any([np.any(batch["labels"] > 0, axis=0) for batch in read], axis=0)
