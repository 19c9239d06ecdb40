"""Small models with random parameters, as folders of this project that can be converted."""

import functools
from pathlib import Path

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import small_models

from dcvit.hub.open import open_model
from dcvit.hub.saved import as_weights
from dcvit.models import lm, vit
from dcvit.weights import dcvit_hf
from dcvit.weights.export import conversion
from dcvit.weights.families import Weights
from dcvit.weights.family import Description
from dcvit.weights.tensors import Tensor

PP = "decode|resize(16)|value_range(-1, 1)"
VIT = dict(width=32, depth=2, mlp_dim=48, num_heads=4, patch_size=(4, 4))


def open_saved(path):
    """The weights of anything that `open_model` opens, for conversion."""
    return as_weights(open_model(path))


def fields_of(net, name):
    """Return the fields of a model that the PyTorch file reads."""
    return {key: getattr(net, key) for key in dcvit_hf.FIELDS[name]}


def tensors(params):
    """Return parameters by path, as tensors."""
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    return {name: Tensor(x.shape, lambda x=x: np.asarray(x)) for name, x in flat.items()}


@functools.cache  # tracing takes seconds
def random_params(net, example):
    return small_models.random_params(small_models.param_shapes(net, example))


def language_model(preset="DCFormer++-405M", **fields):
    """Return a small language model: module, parameters, and both as a model to convert."""
    net = lm.Model(small_models.VOCAB, preset=preset, **{**small_models.SMALL, **fields})
    params = random_params(net, jax.ShapeDtypeStruct((1, 2), jnp.int32))
    description = Description("lm", small_models.VOCAB, fields_of(net, "lm"))
    return net, params, Weights(Path("lm"), "dcvit", description, tensors(params))


def image_model(shape=(16, 16, 3), **fields):
    """Return a small vision transformer, with composition unless the fields say otherwise."""
    net = vit.Model(10, **{**VIT, "compose": "both", **fields})
    params = random_params(net, jax.ShapeDtypeStruct((1, *shape), jnp.float32))
    described = {k: list(v) if isinstance(v, tuple) else v for k, v in fields_of(net, "vit").items()}
    pp = PP if shape[0] == shape[1] else PP.replace("(16)", f"({list(shape[:2])})")
    return net, params, Weights(Path("vit"), "dcvit", Description("vit", 10, described, pp), tensors(params))


def convert(source, target, to):
    """Convert a model as the command does; return the report."""
    return conversion.convert([source], target, to, open_saved)


def write(model, folder, to="safetensors"):
    """Write a model, by default with this project's names, and return the folder, which may exist."""
    folder.mkdir(exist_ok=True)
    conversion.WRITERS[to](model, folder)
    return folder
