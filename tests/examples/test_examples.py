"""The examples run, and their output has the stated properties."""

import importlib.util
import json

import jax
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from markdown_pages import ROOT


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen_block", pytest.param("nnx_block", marks=pytest.mark.exhaustive)])
def test_a_block_trains(name):
    losses = load(name).main(steps=20)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_plain_jax_has_a_gradient_for_every_parameter():
    out, gradient = load("plain_jax").main()
    assert out.shape == (2, 16, 32)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


def run_notebook(name, folder, monkeypatch, **workdirs):
    """Run the code cells in order, in a folder with the workdirs that the notebook opens, and return its names."""
    (folder / "runs").mkdir()
    for run, workdir in workdirs.items():
        (folder / "runs" / run).symlink_to(workdir)
    monkeypatch.chdir(folder)
    matplotlib.use("Agg")
    notebook = json.loads((ROOT / "examples" / name).read_text())
    names: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            assert (cell["outputs"], cell["execution_count"]) == ([], None), "commit the notebook without outputs"
    plt.close("all")
    return names


@pytest.mark.slow
def test_the_notebook_runs_and_predicts(digits_workdir, tmp_path, monkeypatch):
    names = run_notebook("features.ipynb", tmp_path, monkeypatch, digits=digits_workdir)
    assert names["accuracy"] > 0.5
    assert names["agreement"] > 0.5
    assert len(names["maps"]) == 4


@pytest.mark.weekly
def test_the_notebook_about_heads_follows_their_composition(
    digits_run, lm_workdir, library_promotion, tmp_path, monkeypatch, capsys
):
    status, workdir = digits_run(**{"model.depth": 1, "model.compose": "both", "model.patch_size": (2, 2)})
    assert status == 0
    names = run_notebook("heads.ipynb", tmp_path, monkeypatch, digits=workdir, text=lm_workdir)
    assert names["error"] < 1e-5
    assert [*names["terms"]] == ["skip", "query projection", "query gate", "key projection", "key gate"]
    assert np.abs(names["changes"]).max() > 0
    assert np.all(np.diff(names["captured"]) > -1e-5)
    assert len({loan[:5] for loan in names["loans"]}) == len(names["loans"]) > 0
    assert "treescope" in names["drawn"]._repr_html_()
    assert "predicts the first image: True" in capsys.readouterr().out
