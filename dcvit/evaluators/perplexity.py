"""Perplexity of a language model: per token, per byte and per document."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import numpy as np

import input_pipeline
from dcvit.evaluators import DeviceBatch, EvaluationData, Predict, Row, TimedFunction, batches
from dcvit.models import Params, lm, losses

MAX_NATS = 700.0  # the exponential of larger numbers overflows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the evaluator in a config.

    Fields:
      data: arguments of `input_pipeline.open_source`, of a kind that yields rows of tokens.
      batch_size: rows, rounded up to a multiple of the device count.
      loss_chunk: number of positions of a row whose logits are in memory at the same time; None: all.
    """

    data: dict[str, Any]
    batch_size: int = 8
    loss_chunk: int | None = 512


class Evaluator:
    """Measure the loss of all targets: the tokens with `is_target`, such as all tokens of a row except the first.

    The metrics are exact for any batch size and device count.
    """

    model_name = "lm"
    columns = (
        "loss", "perplexity", "bits_per_byte", "nats_per_document", "tokens", "bytes", "documents",
        "tokens_per_second",
    )  # fmt: skip
    metrics = columns[:-1]  # `run` omits those that need more than the data provides
    lower_is_better = columns[:4]

    def __init__(self, predict: Predict, data: EvaluationData, options: Options):
        """Prepare the functions of a batch; the arguments are those of `dcvit.evaluators.Evaluator`."""
        self.data, self.options = data, options
        self.source = cast(input_pipeline.TokenSource, data.source)

        def score(params: Params, batch: DeviceBatch) -> jax.Array:
            tokens = batch["tokens"]
            unembed = functools.partial(lm.unembed, kernel=lm.head_kernel(params))
            hidden = predict(params, tokens[:, :-1])[1]["pre_logits"]
            return losses.token_xent(unembed, hidden, tokens[:, 1:], chunk=options.loss_chunk)

        self.score = TimedFunction(score, data.mesh, options.batch_size, keep=("tokens", "is_target"))

    def run(self, params: Params) -> dict[str, float]:
        """Return the metrics by name: totals and means over all targets.

        The metrics are `loss` in nats per token, `perplexity`, its exponential, and `tokens`, the number of targets. If
        the bytes of each token are known, there are also `bits_per_byte` and the number of `bytes`; if several
        documents end in the data, `nats_per_document` and the number of `documents`. The token that ends a document
        adds nats but no bytes.
        """
        nats, found = 0.0, {"tokens": 0, "bytes": 0, "documents": 0}
        self.score.reset_timer()
        for batch in batches(self.data, "", self.options.batch_size):
            each, rows = self.score(params, batch)
            counted = rows["is_target"][:, 1:]
            targets = rows["tokens"][:, 1:][counted]
            nats += float(each[counted].sum(dtype=np.float64))
            found["tokens"] += len(targets)
            if self.source.token_bytes is not None:
                found["bytes"] += int(self.source.token_bytes[targets].sum())
            if self.source.end_of_text is not None:
                found["documents"] += int((targets == self.source.end_of_text).sum())
        loss = nats / max(found["tokens"], 1)
        numbers = {"loss": loss, "perplexity": math.exp(min(loss, MAX_NATS)), "tokens": found["tokens"]}
        if found["bytes"]:
            numbers |= {"bits_per_byte": nats / math.log(2) / found["bytes"], "bytes": found["bytes"]}
        if found["documents"] > 1:
            numbers |= {"nats_per_document": nats / found["documents"], "documents": found["documents"]}
        return numbers

    def rows(self, name: str, metrics: Mapping[str, float], net: nn.Module) -> list[Row]:
        """Return one row of results: `name`, the metrics, and tokens per second."""
        return [{"evaluation": name, **metrics, "tokens_per_second": round(self.score.rate() * self.source.context, 1)}]
