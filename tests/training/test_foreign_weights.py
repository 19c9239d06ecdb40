"""`config.model_init` and `dcvit.load` read weights of other libraries, with the function of the original model."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversion_models import open_saved
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict
from small_models import param_shapes, random_params

from dcvit.config import values
from dcvit.errors import ConfigError
from dcvit.hub.kinds import make_model
from dcvit.models import lm
from dcvit.training.model import make_loader
from dcvit.weights.export import conversion
from dcvit.weights.family import Description
from dcvit.weights.links import write
from dcvit.weights.lm_families import LLAMA
from dcvit.weights.safetensors_writer import write_shards
from dcvit.weights.tensors import Tensor

FIELDS = dict(width=32, depth=2, mlp_dim=40, num_heads=4, context=12, norm="rmsnorm", norm_epsilon=1e-5, mlp="swiglu")
VOCAB = 17


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder of LLaMA's layout, its module and its parameters."""
    net = lm.Model(VOCAB, **FIELDS)
    params = random_params(param_shapes(net, jnp.zeros((1, 2), jnp.int32)))
    description = Description("lm", VOCAB, FIELDS)
    flat = flatten_dict(jax.device_get(params), sep="/")
    tensors = {path: Tensor(array.shape, lambda array=array: array) for path, array in flat.items()}
    folder = tmp_path_factory.mktemp("llama")
    write_shards(folder, write(LLAMA.links(description), tensors))
    (folder / "config.json").write_text(json.dumps(LLAMA.config(description)))
    return folder, net, params


def settings(init, **model):
    fields = {**FIELDS, **model}
    return ConfigDict(
        {**values.defaults(), "model_name": "lm", "vocab_size": VOCAB, "model": fields, "model_init": str(init)}
    )


def load_into(config):
    """Return the model of a config, and the parameters that a run of it starts from."""
    model = make_model(config)
    shapes = param_shapes(model, jnp.zeros((1, 2), jnp.int32))
    return model, make_loader(config, model, shapes)(shapes)


@pytest.mark.slow
def test_another_function_is_a_warning_that_names_the_settings(weights, caplog):
    folder, _, _ = weights
    config = settings(folder, norm_epsilon=1e-6)
    with caplog.at_level(logging.WARNING):
        load_into(config)
    (record,) = caplog.records
    assert "--config.model.norm_epsilon=1e-05" in record.getMessage()
    config.model_load = {"upcycle": True}
    config.model.compose = "both"
    with pytest.raises(ConfigError, match="norm_epsilon=1e-05"):
        load_into(config)


@pytest.mark.slow
def test_an_export_for_big_vision_describes_its_function(weights, tmp_path, caplog):
    folder, _, params = weights
    (tmp_path / "out").mkdir()
    conversion.WRITERS["npz"](open_saved(folder), tmp_path / "out")
    _, loaded = load_into(settings(tmp_path / "out", norm_epsilon=1e-6))
    (record,) = caplog.records
    assert "--config.model.norm_epsilon=1e-05" in record.getMessage()
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
