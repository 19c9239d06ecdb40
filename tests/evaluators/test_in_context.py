"""Accuracy of answers: the same as counting row by row, for any batch size, device count and length of answers."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sources import ListSource, evaluation_data, mesh_of

from dcvit.evaluators import in_context
from dcvit.models import lm, losses
from input_pipeline import TokenSource

VOCAB, LENGTH, TASKS = 5, 12, ("first", "second", "never")


def make_rows(count=13):
    """Return random rows with answers of one to three tokens, some of them at the end of a row; row 4 has none."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        is_target = np.zeros(LENGTH + 1, bool)
        if i != 4:
            start = rng.integers(1, 5)
            is_target[start : start + rng.integers(1, 4)] = True
            is_target[LENGTH - i % 3 :] = True
        row = {"tokens": rng.integers(0, VOCAB, LENGTH + 1, np.int32), "is_target": is_target}
        rows.append({**row, "task": np.int32(i % 2), "shots": np.arange(LENGTH + 1, dtype=np.int32) // 7})
    return rows


# The logits of the token after each token; two thirds of the answers of `make_rows` then have a wrong token.
TABLE = np.random.default_rng(7).normal(size=(VOCAB, VOCAB)).astype(np.float32)
PARAMS = {"head": {"kernel": jnp.asarray(TABLE)}}


def predict(params, tokens):
    hidden = jax.nn.one_hot(tokens, VOCAB)
    return lm.unembed(hidden, lm.head_kernel(params)), {"pre_logits": hidden}


def expected(rows):
    """One (task, shots, correct, nats, tokens) per answer, counted row by row."""
    found = []
    for row in rows:
        at = 1
        while at <= LENGTH:
            first = at
            nats, correct = 0.0, True
            while at <= LENGTH and row["is_target"][at]:
                logits = TABLE[row["tokens"][at - 1]].astype(np.float64)
                nats += math.log(sum(map(math.exp, logits))) - logits[row["tokens"][at]]
                correct &= int(logits.argmax()) == row["tokens"][at]
                at += 1
            if at > first:
                found.append((int(row["task"]), int(row["shots"][first]), correct, nats, at - first))
            at += at == first
    return found


class Rows(ListSource, TokenSource):
    """Rows of tasks."""

    task_names = TASKS


def evaluator(batch_size, devices):
    options = in_context.Options(data={"kind": "rows"}, batch_size=batch_size)
    return in_context.Evaluator(predict, evaluation_data(Rows(make_rows()), mesh_of(devices)), options)


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "devices"), [(5, 1), (3, 8)])
def test_metrics_are_those_of_counting_row_by_row(batch_size, devices, monkeypatch):
    monkeypatch.setattr(losses, "POSITIONS", 5)  # does not divide the length
    built = evaluator(batch_size, devices)
    metrics = built.run(PARAMS)
    answers = expected(make_rows())
    correct = [answer[2] for answer in answers]
    assert 0 < sum(correct) < len(correct)
    assert metrics["answers"] == len(answers)
    assert metrics["tokens"] == sum(answer[4] for answer in answers)
    assert metrics["accuracy"] == pytest.approx(sum(correct) / len(correct))
    assert metrics["loss"] == pytest.approx(sum(answer[3] for answer in answers) / metrics["tokens"], rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics.keys() == {*built.metrics}


def test_rows_have_every_task_and_number_of_shots_that_occurs():
    built = evaluator(4, 1)
    rows = built.rows("val", built.run(PARAMS), nn.Dense(1))
    assert [row["evaluation"] for row in rows] == ["val", "val/first", "val/second", "val/0-shot", "val/1-shot"]
    answers = expected(make_rows())
    parts = [answers, *([a for a in answers if a[0] == task] for task in (0, 1))]
    parts += [[a for a in answers if a[1] == shots] for shots in (0, 1)]
    for row, part in zip(rows, parts, strict=True):
        assert row["answers"] == len(part)
        assert row["accuracy"] == pytest.approx(sum(a[2] for a in part) / len(part))
        assert row.keys() <= {"evaluation", *built.columns}
