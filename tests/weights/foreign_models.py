"""Models of other libraries with random weights, and the logits of what is read from their files."""

import json

import jax
import numpy as np
import pytest

from dcvit.models import lm
from dcvit.weights import links
from dcvit.weights.families import FAMILIES
from dcvit.weights.safetensors_writer import write_shards
from dcvit.weights.tensors import open_file


def libraries():
    """PyTorch and transformers; without them the calling test is skipped. Their import takes seconds."""
    how = "pip install -e .[interop]"
    torch = pytest.importorskip("torch", reason=f"needs PyTorch; {how}")
    return torch, pytest.importorskip("transformers", reason=f"needs Hugging Face transformers; {how}")


def with_random_weights(model, std=0.15):
    """Set every parameter to random values, those of norms' scales around 1, and return the model."""
    torch, _ = libraries()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = ("norm" in name or ".ln_" in name) and name.endswith(("weight", "scale"))
            parameter.copy_(float(scale) + std * torch.randn(parameter.shape, generator=generator))
    return model.eval().float()


def random_tokens(vocab, length, batch=2):
    return np.random.default_rng(1).integers(vocab, size=(batch, length)).astype(np.int32)


def our_logits(weights, tokens, **fields):
    """The logits of the model that a file describes, with its parameters, whose names and shapes are checked."""
    net = lm.Model(weights.description.num_outputs, **{**weights.description.fields, **fields})
    params = weights.tree()
    expected = jax.eval_shape(net.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), np.int32))["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, expected)
    return np.asarray(jax.jit(net.apply)({"params": params}, tokens)[0])


def largest_difference(a, b):
    """The largest difference of two arrays of logits in units of their standard deviation."""
    return float(np.abs(a - b).max() / b.std())


def tensors_of(weights):
    """The tensors in the file of opened weights."""
    return open_file(weights.path).tensors


def links_of(weights):
    """The links by which weights were read."""
    return FAMILIES[weights.family].links(weights.description, tensors_of(weights))


def written_back(weights):
    """The tensors that the links of opened weights write from the parameters that they read."""
    return dict(links.write(links_of(weights), weights.params))


def export(weights, folder, **options):
    """Write weights as a folder of their family, as the command does: config.json and safetensors."""
    family = FAMILIES[weights.family]
    folder.mkdir()
    write_shards(folder, links.write(family.links(weights.description), weights.params), **options)
    (folder / "config.json").write_text(json.dumps(family.config(weights.description)))
    return folder


def assert_same_bits(tensors, expected):
    """Assert that tensors have the names, types, shapes and bytes of the arrays `expected`."""
    assert tensors.keys() == expected.keys()
    for name, array in expected.items():
        found = tensors[name].read()
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes()), name
