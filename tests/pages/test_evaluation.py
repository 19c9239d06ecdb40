"""Rows of an evaluation: the columns of each evaluator."""

import types

import jax
import jax.numpy as jnp
import pytest
from small_models import param_shapes
from sources import ListSource, evaluation_data

from dcvit.config import load as configs
from dcvit.evaluators.multilabel import ClassResult
from dcvit.hub.kinds import make_model
from dcvit.hub.open import Opened
from dcvit.pages import evaluation
from dcvit.parallel import sharding


class CountEvaluator:
    """An evaluator with given columns, whose rows lack one of them."""

    data = evaluation_data(ListSource([]), shape=(1, 8, 8, 1))

    def __init__(self, *columns):
        self.columns = columns

    def run(self, params):
        return {self.columns[0]: len(jax.tree.leaves(params))}

    def rows(self, name, numbers, net):
        return [{"evaluation": f"{name}/{i}", **numbers} for i in range(2)]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run two such evaluators on a checkpoint of a small model; also returns the number of its parameter arrays."""
    fields = {"width": 16, "depth": 1, "mlp_dim": 16, "num_heads": 2, "patch_size": (4, 4)}
    config = configs.load("vit_digits", [f"model.{k}={v}" for k, v in fields.items()])
    opened = Opened(tmp_path, tmp_path, config, make_model(config), {})
    params = param_shapes(opened.module, jnp.zeros((1, 8, 8, 1)))
    evaluators = {"a": CountEvaluator("bytes", "loss"), "b": CountEvaluator("loss", "tokens")}
    monkeypatch.setattr(evaluation, "open_evaluators", lambda _: (sharding.data_mesh(), "ddp", evaluators))
    monkeypatch.setattr(Opened, "load_params", lambda *_: params)
    return lambda *args: evaluation.evaluate(opened, *args), len(jax.tree.leaves(params))


@pytest.mark.slow
def test_every_row_has_the_columns_of_all_evaluators(run):
    (rows, page, _), leaves = run[0](), run[1]
    assert page == ""
    assert [row["evaluation"] for row in rows] == ["a/0", "a/1", "b/0", "b/1"]
    for row in rows:
        assert list(row) == ["evaluation", "model", "step", "parameters", "bytes", "loss", "tokens"]
        assert (row["model"], row["step"], row["tokens"]) == ("DCViT", None, None)
    assert [(row["bytes"], row["loss"]) for row in rows] == 2 * [(leaves, None)] + 2 * [(None, leaves)]


def test_rows_of_classes_have_the_measures_of_several_labels(tmp_path):
    config = configs.load("vit_digits")
    opened = Opened(tmp_path, tmp_path, config, make_model(config), {})
    source = ListSource([])
    source.class_names = ["cat"]
    evaluator = types.SimpleNamespace(
        data=evaluation_data(source, shape=(1, 8, 8, 1)),
        classes=[ClassResult(2, 1, 1, 4, 0.75, 0.3), ClassResult(0, 0, 0, 4, None, 0.5)],
    )
    cat, other = evaluation._class_rows(opened, {"val": evaluator}, {})
    assert list(cat) == ["evaluation", "class", "examples", *evaluation.MEASURES]
    assert list(cat.values()) == ["val", "cat", 2, 1, 0.5, 1.0, pytest.approx(2 / 3), 0.75, 0.3]
    assert list(other.values()) == ["val", "1", 0, 0, None, None, 0.0, None, 0.5]
