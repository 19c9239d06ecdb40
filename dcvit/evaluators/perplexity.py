"""How well a language model predicts text: per token, per byte and per document, exact for any batch size."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import input_pipeline
from dcvit.evaluators import Timed, batches
from dcvit.models import lm, losses

MOST_NATS = 700.0  # e to the power of more is no float


class Evaluator:
    """Over all targets: every token of a row but its first, or only a target span's (data of `kind="spans"`)."""

    columns = (
        "loss", "perplexity", "bits_per_byte", "nats_per_document", "tokens", "bytes", "documents",
        "tokens_per_second",
    )  # fmt: skip
    metrics = tuple(
        name for name in columns if name != "tokens_per_second"
    )  # those that the data does not allow, aside
    example: jax.ShapeDtypeStruct  # set by `dcvit.training.setup`, which looks at the data

    def __init__(
        self, predict: Callable[..., Any], mesh: Mesh, *, data: dict, batch_size: int = 8, loss_chunk: int | None = 512
    ):
        """
        Args:
          predict: (params, tokens B T) -> logits, and intermediates with `pre_logits`.
          mesh: the devices that share a batch.
          data: arguments of `input_pipeline.open_source`, of a kind that yields rows of tokens.
          batch_size: rows, rounded up to a multiple of the device count.
          loss_chunk: positions of a row whose logits exist at a time; None: all.
        """
        self.source: Any = input_pipeline.open_source(**data)
        self.batch_size, self.mesh = batch_size, mesh
        self.tokens_per_second = 0.0  # of the last run, compilation left out

        def score(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
            tokens = batch["tokens"]
            unembed = functools.partial(lm.unembed, kernel=lm.head_kernel(params))
            hidden = predict(params, tokens[:, :-1])[1]["pre_logits"]
            return losses.token_xent(unembed, hidden, tokens[:, 1:], chunk=loss_chunk)

        self.score = Timed(score, mesh, batch_size, keep=("tokens", "is_target"))

    def run(self, params: Any) -> dict[str, float]:
        """Totals and means over all targets.

        `loss`, in nats a token; `perplexity`, its exponential; `tokens`, how many were counted. Where the tokenizer
        is known, `bits_per_byte` of text and the number of `bytes`; where it is known what ends a document,
        `nats_per_document` and the number of `documents`. The token that ends one adds nats, and no bytes.
        """
        nats, found = 0.0, {"tokens": 0, "bytes": 0, "documents": 0}
        self.score.restart()
        for batch in batches(self.source, "", self.batch_size, self.mesh):
            each, rows = self.score(params, batch)
            counted = rows["is_target"][:, 1:]
            targets = rows["tokens"][:, 1:][counted]
            nats += float(each[counted].sum(dtype=np.float64))
            found["tokens"] += len(targets)
            if self.source.token_bytes is not None:
                found["bytes"] += int(self.source.token_bytes[targets].sum())
            if self.source.end_of_text is not None:
                found["documents"] += int((targets == self.source.end_of_text).sum())
        self.tokens_per_second = self.score.examples * self.source.context / self.score.seconds
        loss = nats / max(found["tokens"], 1)
        numbers = {"loss": loss, "perplexity": math.exp(min(loss, MOST_NATS)), "tokens": found["tokens"]}
        if found["bytes"]:
            numbers |= {"bits_per_byte": nats / math.log(2) / found["bytes"], "bytes": found["bytes"]}
        if found["documents"]:
            numbers |= {"nats_per_document": nats / found["documents"], "documents": found["documents"]}
        return numbers

    def rows(self, name: str, numbers: dict[str, float], net: Any) -> list[dict[str, Any]]:
        """One row."""
        return [{"evaluation": name, **numbers, "tokens_per_second": round(self.tokens_per_second, 1)}]
