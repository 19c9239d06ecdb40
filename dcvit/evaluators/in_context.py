"""Accuracy of a language model's answers in rows of in-context examples: overall, by task and by number of shots."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

import input_pipeline
from dcvit.dcmha.shapes import Bool, Float
from dcvit.errors import ConfigError
from dcvit.evaluators import DeviceBatch, EvaluationData, Predict, Row, TimedFunction, batches
from dcvit.evaluators.perplexity import MAX_NATS
from dcvit.models import Params, lm, losses


class Answers(NamedTuple):
    """All answers of a run, in the order of the data; each array has one element per answer."""

    correct: np.ndarray  # bool
    nats: np.ndarray  # of all tokens of an answer together
    tokens: np.ndarray  # number of tokens
    task: np.ndarray  # number of the task
    shots: np.ndarray  # number of examples before the answer's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the evaluator in a config.

    Fields:
      data: arguments of `input_pipeline.open_source`, of kind "synthetic" or "answers".
      batch_size: rows, rounded up to a multiple of the device count.
    """

    data: dict[str, Any]
    batch_size: int = 8


class Evaluator:
    """Score the answers in rows of tokens; an answer is a maximal run of adjacent tokens with `is_target`.

    An answer is correct if the model gives each of its tokens the highest logit, given all tokens before it. The
    metrics are exact for any batch size and device count.
    """

    model_name = "lm"
    columns = ("accuracy", "loss", "perplexity", "answers", "tokens", "rows_per_second")
    metrics = columns[:-1]
    lower_is_better = ("loss", "perplexity")

    def __init__(self, predict: Predict, data: EvaluationData, options: Options):
        """Check the data; the arguments are those of `dcvit.evaluators.Evaluator`.

        Raises:
          ConfigError: the data is of another kind.
        """
        source = data.source
        if not isinstance(source, input_pipeline.TokenSource) or not source.task_names:
            raise ConfigError(
                f"an evaluator of type 'in_context' needs tasks; data of kind {options.data['kind']!r} has none"
            )
        self.data, self.options, self.source = data, options, source
        self.answers: Answers | None = None  # of the last run

        def score(params: Params, batch: DeviceBatch) -> DeviceBatch:
            tokens, unembed = batch["tokens"], functools.partial(lm.unembed, kernel=lm.head_kernel(params))
            hidden = predict(params, tokens[:, :-1])[1]["pre_logits"]
            log_p, best = losses.target_scores(unembed, hidden, tokens[:, 1:])
            return {"nats": -log_p, "best": best}

        self.score = TimedFunction(score, data.mesh, options.batch_size, keep=("is_target", "task", "shots"))

    def run(self, params: Params) -> dict[str, float]:
        """Return the metrics by name: totals and means over all answers.

        The metrics are `accuracy`, the fraction of correct answers; `loss`, in nats per token of the answers;
        `perplexity`, its exponential; and the numbers of `answers` and of their `tokens`.
        """
        found: list[Answers] = []
        self.score.reset_timer()
        for batch in batches(self.data, "", self.options.batch_size):
            scores, rows = self.score(params, batch)
            found.append(answers_of(scores["nats"], scores["best"], rows))
        self.answers = Answers(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
        return summary(self.answers)

    def rows(self, name: str, metrics: Mapping[str, float], net: nn.Module) -> list[Row]:
        """Return rows of results: one for all answers, one for each task, and one for each number of shots."""
        rows = [{"evaluation": name, **metrics, "rows_per_second": round(self.score.rate(), 1)}]
        assert self.answers is not None
        for number, task in enumerate(self.source.task_names):
            rows += _part(f"{name}/{task}", self.answers, self.answers.task == number)
        for shots in np.unique(self.answers.shots):
            rows += _part(f"{name}/{shots}-shot", self.answers, self.answers.shots == shots)
        return rows


def answers_of(
    nats: Float[np.ndarray, "B T"], best: Bool[np.ndarray, "B T"], rows: Mapping[str, np.ndarray]
) -> Answers:
    """Return the answers of a batch.

    Args:
      nats: the loss of each token of a row except the first, B T.
      best: True where that token has the highest logit, B T.
      rows: the batch by name: `is_target`, `shots` (B T+1), `task`, and `_mask`, 0 for padding (B).
    """
    counted = rows["is_target"][:, 1:] & (rows["_mask"][:, None] > 0)
    starts = counted & ~np.pad(counted, ((0, 0), (1, 0)))[:, :-1]
    row, column = np.nonzero(starts)
    number = np.cumsum(starts).reshape(starts.shape)[counted] - 1  # the answer of each counted token, in their order
    totals = (np.bincount(number, x[counted], len(row)) for x in (nats, ~best, counted))
    sums, misses, tokens = totals
    return Answers(misses == 0, sums, tokens.astype(int), rows["task"][row], rows["shots"][row, column + 1])


def summary(answers: Answers) -> dict[str, float]:
    """Return the metrics of the given answers; see `Evaluator.run`."""
    tokens = int(answers.tokens.sum())
    loss = float(answers.nats.sum()) / max(tokens, 1)
    return {
        "accuracy": float(answers.correct.sum()) / max(len(answers.correct), 1), "loss": loss,
        "perplexity": math.exp(min(loss, MAX_NATS)), "answers": len(answers.correct), "tokens": tokens,
    }  # fmt: skip


def _part(name: str, answers: Answers, chosen: Bool[np.ndarray, " answers"]) -> list[Row]:
    """Return one row of results, called `name`, of the answers where `chosen` is True; no row if there are none."""
    return [{"evaluation": name, **summary(Answers(*(x[chosen] for x in answers)))}] if chosen.any() else []
