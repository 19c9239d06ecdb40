"""The classification evaluator against counting by hand, for any batch size and device count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import input_pipeline
from dcvit.evaluators.classification import Evaluator

CLASSES = 10


class Fixed:
    """23 examples whose image is their index; labels are one, several or none."""

    class_names = None
    labels = [np.array([i % CLASSES]) for i in range(20)] + [np.array([1, 2]), np.array([], int), np.array([9, 0, 4])]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"image": np.full((1, 1, 1), index, np.uint8), "label": self.labels[index]}


TABLE = np.random.default_rng(0).normal(size=(23, CLASSES)).astype(np.float32)


def by_hand():
    """Top-1, top-5, loss and n over the examples that have a label, one at a time."""
    top1, top5, losses = [], [], []
    for scores, labels in zip(TABLE.astype(np.float64), Fixed.labels, strict=True):
        if len(labels):
            ranked = np.argsort(-scores)
            top1.append(ranked[0] in labels)
            top5.append(bool(set(ranked[:5]) & set(labels)))
            losses.append(-(scores - np.log(np.exp(scores).sum()))[labels].sum())
    return {"top1": np.mean(top1), "top5": np.mean(top5), "loss": np.mean(losses), "n": 22}


@pytest.fixture(autouse=True)
def source(monkeypatch):
    monkeypatch.setattr(input_pipeline, "open_source", lambda **_: Fixed())


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("batch", [1, 7, 23, 64])
def test_counts_are_exact_for_any_batch_and_device_count(batch, devices):
    def predict(params, images):
        return params[images[:, 0, 0, 0].astype(jnp.int32)]

    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    pp = "onehot(10)|value_range(0, 255)|keep('image', 'labels')"
    got = Evaluator(predict, mesh, data={}, pp=pp, batch_size=batch).run(jnp.asarray(TABLE))
    expected = by_hand()
    assert got["n"] == expected["n"]
    assert got["top1"] == expected["top1"]
    assert got["top5"] == expected["top5"]
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_fewer_than_five_classes_all_count_as_top_5():
    pp = "onehot(10)|value_range(0, 255)|keep('image', 'labels')"
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    got = Evaluator(lambda p, x: p[: x.shape[0]], mesh, data={}, pp=pp, batch_size=8, loss="sigmoid_xent").run(
        jnp.ones((8, 10))
    )
    assert 0 < got["top5"] <= 1
    assert got["loss"] > 0
