"""Top-1, top-5 and loss of a classifier over every example of a data source, exact for any batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import input_pipeline
from dcvit import losses
from dcvit.sharding import put_batch, replicated


class Evaluator:
    """Counts an example as correct when any of its labels is hit; one without labels is left out, as in ReaL."""

    def __init__(
        self,
        predict: Callable[..., Any],
        mesh: Mesh,
        *,
        data: dict,
        pp: str,
        batch_size: int = 256,
        loss: str = "softmax_xent",
    ):
        """
        Args:
          predict: (params, images) -> logits, B C.
          mesh: the devices that share a batch.
          data: arguments of `input_pipeline.open_source`.
          pp: a preprocessing string that yields `image` and multi-hot `labels`.
          batch_size: rounded up to a multiple of the device count.
          loss: a name in `dcvit.losses`.
        """
        self.source = input_pipeline.open_source(**data)
        self.pp, self.mesh = pp, mesh
        self.batch_size = -(-batch_size // mesh.size) * mesh.size
        loss_fn = getattr(losses, loss)

        def score(params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
            logits = predict(params, batch["image"])
            labels = batch["labels"]
            best = jax.lax.top_k(logits, min(5, logits.shape[-1]))[1]
            hits = jnp.take_along_axis(labels, best, axis=-1) > 0
            return {
                "counted": (batch["_mask"] > 0) & jnp.any(labels > 0, axis=-1),
                "top1": hits[:, 0],
                "top5": jnp.any(hits, axis=-1),
                "loss": loss_fn(logits, labels),
            }

        self.score = jax.jit(score, out_shardings=replicated(mesh))

    def run(self, params: Any) -> dict[str, float]:
        """`top1`, `top5` (fractions of `n`), `loss` (mean, nats) and `n`, the number of examples counted."""
        correct = {"top1": 0, "top5": 0}
        total, n = 0.0, 0
        for batch in input_pipeline.eval_batches(self.source, self.pp, self.batch_size):
            scores = jax.device_get(self.score(params, put_batch(batch, self.mesh)))
            counted = scores["counted"]
            n += int(counted.sum())
            total += float(scores["loss"][counted].sum(dtype=np.float64))
            for name in correct:
                correct[name] += int(scores[name][counted].sum())
        return {name: hits / max(n, 1) for name, hits in correct.items()} | {"loss": total / max(n, 1), "n": n}
