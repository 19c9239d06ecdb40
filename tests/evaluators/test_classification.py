"""Classification evaluator: equal to counting by hand, for any batch size and device count."""

import jax.numpy as jnp
import numpy as np
import pytest
from sources import ListSource, evaluation_data, look_up, mesh_of, numbered

from dcvit.evaluators.classification import Evaluator, Options

CLASSES = 10
# 23 examples whose image is their index. They have one label, several labels or none.
LABELS = [np.array([i % CLASSES]) for i in range(20)] + [np.array([1, 2]), np.array([], int), np.array([9, 0, 4])]
TABLE = np.random.default_rng(0).normal(size=(23, CLASSES)).astype(np.float32)
PARAMS = {"table": jnp.asarray(TABLE)}


def by_hand(present=slice(None), every=LABELS):
    """Count top-1, top-5, loss and n over the examples that have a label; classes other than `present` are excluded."""
    top1, top5, losses = [], [], []
    absent = np.ones(CLASSES, bool)
    absent[present] = False
    for scores, labels in zip(np.where(absent, -np.inf, TABLE.astype(np.float64)), every, strict=True):
        if len(labels):
            ranked = np.argsort(-scores)
            top1.append(ranked[0] in labels)
            top5.append(bool(set(ranked[:5]) & set(labels)))
            losses.append(-(scores - np.log(np.exp(scores).sum()))[labels].sum())
    return {"top1": np.mean(top1), "top5": np.mean(top5), "loss": np.mean(losses), "n": 22}


PP = "onehot(10)|value_range(0, 255)|keep('image', 'labels')"


def evaluator(labels=LABELS, devices=1, unreadable=(), **options):
    data = evaluation_data(ListSource(numbered(labels), unreadable), mesh_of(devices), "skip" if unreadable else "fail")
    return Evaluator(look_up, data, Options(**{"data": {}, "pp": PP, "batch_size": 7, **options}))


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "devices"), [(7, 1), (64, 8)])
def test_counts_are_exact_for_any_batch_and_device_count(batch, devices):
    got = evaluator(LABELS, devices, batch_size=batch).run(PARAMS)
    expected = by_hand()
    assert got["n"] == expected["n"]
    assert got["top1"] == expected["top1"]
    assert got["top5"] == expected["top5"]
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_top_5_is_left_out_with_five_or_fewer_classes():
    table = TABLE[:9, :4]
    built = evaluator(
        [np.array([i % 4]) for i in range(9)], pp=PP.replace("10", "4"), batch_size=4, loss="sigmoid_xent"
    )
    got = built.run({"table": jnp.asarray(table)})
    sigmoid, hot = 1 / (1 + np.exp(-table.astype(np.float64))), np.eye(4)[np.arange(9) % 4]
    loss = -(hot * np.log(sigmoid) + (1 - hot) * np.log(1 - sigmoid)).sum(axis=1).mean()
    assert "top5" not in got
    assert got["top1"] == (table.argmax(axis=1) == np.arange(9) % 4).mean()
    assert got["loss"] == pytest.approx(loss, rel=1e-6)


def test_present_classes_only_excludes_all_other_classes():
    """Published results on ImageNet-A and -R, which have 200 of 1000 classes, are computed in this way."""
    labels = [np.array([(2, 5, 7)[i % 3]]) for i in range(23)]
    got, expected = evaluator(labels, present_classes_only=True).run(PARAMS), by_hand([2, 5, 7], labels)
    assert got["n"] == 23
    assert got["top1"] == expected["top1"]
    assert got["top1"] > by_hand(every=labels)["top1"]
    assert "top5" not in got
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_mean_recall_shows_a_model_that_predicts_one_class():
    """Its top-1 accuracy is the share of that class, however large."""
    labels = [np.array([0 if i < 20 else i - 19]) for i in range(23)]
    table = {"table": jnp.zeros((23, CLASSES)).at[:, 0].set(1)}
    got = evaluator(labels).run(table)
    assert (got["top1"], got["mean_recall"]) == (20 / 23, 1 / 4)


@pytest.mark.slow
def test_skipped_examples_do_not_count(caplog):
    got = evaluator(unreadable=(0, 9)).run(PARAMS)
    assert got["n"] == 20
    assert "skipped example 9: bad bytes" in caplog.messages
