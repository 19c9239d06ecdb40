"""The examples run, and their output has the stated properties."""

import importlib.util
import json

import jax
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from pages import ROOT


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen_block", "nnx_block"])
def test_a_block_trains(name):
    losses = load(name).main(steps=20)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_plain_jax_has_a_gradient_for_every_parameter():
    out, gradient = load("plain_jax").main()
    assert out.shape == (2, 16, 32)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_the_notebook_runs_and_predicts(digits_workdir, tmp_path, monkeypatch):
    """The code cells run in order, in a folder with the workdir that the notebook opens."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").symlink_to(digits_workdir)
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    notebook = json.loads((ROOT / "examples" / "features.ipynb").read_text())
    names: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            assert (cell["outputs"], cell["execution_count"]) == ([], None), "commit the notebook without outputs"
    plt.close("all")
    assert names["accuracy"] > 0.5
    assert names["agreement"] > 0.5
    assert len(names["maps"]) == 4
