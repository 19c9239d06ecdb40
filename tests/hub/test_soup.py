"""Averages of models: numpy's means, what they are written as, and refusals."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from refusals import refused
from trained_workdirs import load_params

import dcvit
from dcvit import cli, convert
from dcvit.errors import CheckpointError
from dcvit.hub import soup
from dcvit.parallel.trees import Tensor
from dcvit.weights.families import Weights
from dcvit.weights.family import Description

pytestmark = pytest.mark.usefixtures("library_promotion")

FIELDS = {"width": 8, "depth": 1, "num_heads": 2, "patch_size": [2, 2]}


def made(name, seed=0, reads=None, **changes):
    """Weights of two parameters with random values, of a model that is never built."""
    values = np.random.default_rng(seed).normal(size=(2, 3)).astype(np.float32)

    def read(key, array):
        if reads is not None:
            reads.append((name, key))
        return array

    arrays = {"a": values, "b": values[:1].astype(np.float16)}
    params = {key: Tensor(x.shape, lambda key=key, x=x: read(key, x)) for key, x in arrays.items()}
    description = Description("vit", 3, FIELDS, "decode", ("x", "y", "z"))._replace(**changes)
    return Weights(Path(name), "timm", description, params)


def test_average_is_the_mean_in_float64_and_reads_one_parameter_at_a_time():
    reads = []
    models = [made(name, i, reads) for i, name in enumerate("pqr")]
    found = soup.average(models)
    assert reads == []
    for key in ("a", "b"):
        reads.clear()
        value = found.params[key].read()
        assert reads == [(name, key) for name in "pqr"]
        expected = np.mean([m.params[key].read().astype(np.float64) for m in models], axis=0).astype(np.float32)
        np.testing.assert_array_equal(value, expected, strict=True)
    assert found.description == models[0].description
    assert found.averaged == (Path("p"), Path("q"), Path("r"))


def test_a_model_with_a_nan_is_named():
    bad = made("q")
    array = np.full((2, 3), np.nan, np.float32)
    bad = bad._replace(params={**bad.params, "a": Tensor(array.shape, lambda: array)})
    with refused(CheckpointError, "q: a has numbers that are not finite"):
        soup.average([made("p"), bad]).params["a"].read()


def test_other_models_are_refused():
    with refused(CheckpointError, "it has fields.width=16, not 8", match="^q cannot be averaged with p: "):
        soup.average([made("p"), made("q", fields={**FIELDS, "width": 16})])
    with refused(CheckpointError, "it has class_names=('x', 'z', 'y'), not ('x', 'y', 'z')"):
        soup.average([made("p"), made("q", class_names=("x", "z", "y"))])


@pytest.mark.slow
def test_average_of_checkpoints_is_a_run_that_commands_open(digits_workdir, tmp_path, capsys):
    early, late = (digits_workdir / "checkpoints" / step for step in ("30", "60"))
    words = [str(early), str(late), str(tmp_path / "soup"), "--to", "dcvit", "--average"]
    assert cli.run(convert.main, words) == 0
    assert "largest difference of logits: 0.0e+00" in capsys.readouterr().out
    trees = [load_params(path) for path in (tmp_path / "soup", early, late)]
    mean = lambda a, b: ((np.asarray(a, np.float64) + b) / 2).astype(np.float32)  # noqa: E731
    jax.tree.map(lambda x, a, b: np.testing.assert_array_equal(x, mean(a, b)), *trees)
    model = dcvit.load(tmp_path / "soup")
    assert model.pp == dcvit.load(digits_workdir).pp
    card = (tmp_path / "soup" / "README.md").read_text()
    assert "the average of the parameters of 2 models (`30`, `60`)" in card
    assert "## Metrics" not in card
    record = json.loads((tmp_path / "soup" / "config.json").read_text())
    assert record["evals"] == json.loads((digits_workdir / "config.json").read_text())["evals"]


def test_several_sources_without_average_are_refused(tmp_path, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
    words = [str(tmp_path / name) for name in ("a", "b", "out")]
    assert cli.run(convert.main, [*words, "--to", "dcvit"]) == 2
    assert "2 source(s): --average averages two or more" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
