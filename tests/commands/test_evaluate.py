"""The rows of an evaluation: each evaluator's own columns, and the file that collects them."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit import config as configs
from dcvit import evaluate
from dcvit.errors import ConfigError
from dcvit.training import setup


class Counts:
    """An evaluator with columns of its own; its row leaves out one of them."""

    source = ()
    example = jax.ShapeDtypeStruct((1, 8, 8, 1), np.float32)

    def __init__(self, *columns):
        self.columns = columns

    def run(self, params):
        return {self.columns[0]: len(jax.tree.leaves(params))}

    def rows(self, name, numbers, net):
        return [{"evaluation": f"{name}/{i}", **numbers} for i in range(2)]


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """Evaluates two such evaluators on a checkpoint of a small model."""
    config = configs.load("vit_digits", ["model.depth=1"])
    params = setup.model(config).init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))["params"]
    monkeypatch.setattr(evaluate, "load_params", lambda *_: params)
    monkeypatch.setattr(setup, "evaluators", lambda *_: {"a": Counts("bytes", "loss"), "b": Counts("loss", "tokens")})
    checkpoint = tmp_path / "weights.npz"
    checkpoint.touch()
    return lambda *args: evaluate.evaluate(config, checkpoint, *args), len(jax.tree.leaves(params))


def test_a_table_has_the_columns_of_its_evaluators_and_every_row_all_of_them(counted):
    rows, leaves = counted[0](), counted[1]
    assert [row["evaluation"] for row in rows] == ["a/0", "a/1", "b/0", "b/1"]
    for row in rows:
        assert list(row) == ["evaluation", "model", "step", "parameters", "bytes", "loss", "tokens"]
        assert (row["step"], row["tokens"]) == (None, None)
    assert [(row["bytes"], row["loss"]) for row in rows] == 2 * [(leaves, None)] + 2 * [(None, leaves)]


def test_a_file_of_other_columns_is_refused_before_the_work(counted, monkeypatch, tmp_path):
    out = tmp_path / "results.csv"
    counted[0](out)
    assert out.read_text() == "evaluation,model,step,parameters,bytes,loss,tokens\n"
    out.write_text("evaluation,model,step,parameters,top1\n")
    monkeypatch.setattr(Counts, "run", None)
    with pytest.raises(ConfigError, match=r"other columns, evaluation,.*expected .*,bytes,loss,tokens"):
        counted[0](out)


@pytest.mark.parametrize("before", ["", "a,b\n", "a,b", "a,b\n1,2\n", "a,b\n1,2", "a,b\r\n1,2\r\n"])
def test_rows_are_appended_under_one_header(tmp_path, before):
    path = tmp_path / "results.csv"
    path.write_bytes(before.encode())
    evaluate.append_csv(path, ("a", "b"))
    for i in range(2):
        evaluate.append_csv(path, ("a", "b"), [{"a": i, "b": None}, {"a": "x,y", "b": 0.5}])
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["a", "b"]
    assert rows == [["1", "2"]] * ("1" in before) + [["0", ""], ["x,y", "0.5"], ["1", ""], ["x,y", "0.5"]]


@pytest.mark.parametrize("content", [b"a\n", b"b,a\n1,2\n", b"\xff\xfe\n", b"\x89PNG\r\n\x1a\n"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "results.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="has other columns"):
        evaluate.append_csv(path, ("a", "b"), [{"a": 1, "b": 2}])
    assert path.read_bytes() == content
