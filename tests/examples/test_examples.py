"""The examples run, and their output has the stated properties."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from image_datasets import image_folder
from markdown_pages import ROOT

from dcvit.models import lm, vit


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


def assert_same_model(model, example, inputs):
    """Assert that a model of the package and that of an example compute the same, with the same random parameters."""
    rng = np.random.default_rng(0)
    params = jax.jit(model.init)(jax.random.key(0), inputs)["params"]
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32), params)
    flat = {}
    for name, x in flatten_dict(params, sep="/").items():
        in_example = re.sub("Transformer/|MlpBlock_0/", "", name)
        in_example = in_example.replace("MultiHeadDotProductAttention_0", "attention")
        has_groups = re.search("/w_[qk][12]$", name)  # of heads: M G I and G I I, and M I and I I in the example
        flat[in_example] = x.reshape(-1, x.shape[-1]) if has_groups else x
    expected, _ = jax.jit(model.apply)({"params": params}, inputs)
    found = jax.jit(example.apply)({"params": unflatten_dict(flat, sep="/")}, inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("compose", ["both", "none"])
def test_the_vision_transformer_in_one_file_is_that_of_the_package(compose):
    example = load("dcvit_in_one_file")
    size = {"width": 16, "depth": 2}
    model = vit.Model(10, patch_size=(2, 2), num_heads=4, compose=None if compose == "none" else compose, **size)
    images = jax.random.normal(jax.random.key(1), (2, 4, 6, 3))
    assert_same_model(model, example.DCViT(10, 2, **size, composes=example.COMPOSES[compose]), images)


@pytest.mark.slow
@pytest.mark.parametrize("compose", ["both", "none"])
def test_the_language_model_in_one_file_is_that_of_the_package(compose):
    example = load("dcformer_in_one_file")
    size = {"width": 16, "depth": 2, "window": 3}
    model = lm.Model(
        256, num_heads=4, mlp_dim=24, qk_norm="rmsnorm", window_pattern="1:1",
        compose=None if compose == "none" else compose, **size,
    )  # fmt: skip
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 256)
    assert_same_model(model, example.DCFormer(heads=4, hidden=24, **size, composes=example.COMPOSES[compose]), tokens)


@pytest.mark.slow
def test_dcvit_in_one_file_learns(library_promotion):
    example = load("dcvit_in_one_file")
    images, labels = example.digits()
    history = example.train(images[:400], labels[:400], patch=2, epochs=20, batch=32)
    (first_loss, _), (last_loss, last_accuracy) = history[0], history[-1]
    assert last_loss < 0.9 * first_loss
    assert last_accuracy > 0.2  # of ten classes


@pytest.mark.slow
def test_dcvit_in_one_file_trains_on_a_folder(tmp_path, monkeypatch, capsys, library_promotion):
    example = load("dcvit_in_one_file")
    image_folder(tmp_path / "photos")
    monkeypatch.setattr("sys.argv", ["x", "--folder", str(tmp_path / "photos" / "train"), "--size=16", "--epochs=1"])
    example.main()
    assert "test top-1" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["x", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"expected .*/CLASS/.*found 0 images"):
        example.main()


@pytest.mark.slow
def test_dcformer_in_one_file_learns_and_samples(library_promotion):
    example = load("dcformer_in_one_file")
    model = example.DCFormer(width=16, depth=1, heads=2, hidden=32)
    text = np.frombuffer((ROOT / "README.md").read_bytes(), np.uint8)
    params, losses = example.train(model, text, steps=40, context=32, batch=8)
    assert np.mean(losses[-5:]) < 0.9 * losses[0]
    text = example.sample(model, params, "def", count=40, context=16)  # longer than the context
    assert text.startswith("def")
    assert len(text.encode()) >= 43
