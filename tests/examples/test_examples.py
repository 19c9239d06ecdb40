"""The examples run, and their output has the stated properties."""

import importlib.util

import jax
import numpy as np
import pytest
from markdown_pages import ROOT


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
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
