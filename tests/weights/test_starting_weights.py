"""configs/transfer.py, lm_text.py and upcycle.py with `init` of weights without a run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversion_models import PP, image_model, language_model, write
from refusals import refused

from dcvit.config import load as configs
from dcvit.config import values
from dcvit.errors import CheckpointError, ConfigError
from dcvit.hub.kinds import make_model
from dcvit.training.model import make_loader
from dcvit.weights.families import open_weights

pytestmark = pytest.mark.usefixtures("library_promotion")


def loaded(config, example, **outputs):
    """Return the parameters with which a run of the config starts, and its model."""
    net = make_model(values.replaced(config, **outputs))
    params = net.init(jax.random.key(1), example)["params"]
    found = make_loader(config, net, params)(params)
    return jax.tree.map(lambda new, old: old if new is None else new, found, params), net


@pytest.mark.slow
@pytest.mark.parametrize(("to", "compose"), [("safetensors", None), ("dcvit", "both")])
def test_images_start_from_weights_without_further_arguments(to, compose, tmp_path):
    """With all but the head; the upcycled model computes the features of the plain one."""
    net, params, model = image_model(compose=None)
    folder = write(model, tmp_path / "weights", to)
    config = configs.load(f"transfer:init={folder},data_dir=x" + (",attention=dcmha" if compose else ""))
    assert config.pp_predict == PP
    assert config.input.pp.startswith("decode|inception_crop(16)|flip_lr|value_range(-1, 1)|onehot(")
    images = jax.random.normal(jax.random.key(0), (2, 16, 16, 3))
    found, tuned = loaded(config, images, num_classes=3)
    before, after = (n.apply({"params": p}, images)[1]["pre_logits"] for n, p in ((net, params), (tuned, found)))
    np.testing.assert_allclose(after, before, atol=1e-5)
    assert tuned.compose == compose


@pytest.mark.slow
@pytest.mark.parametrize("attention", [None, "dcmha"])
def test_language_model_starts_from_weights_without_further_arguments(attention, tmp_path):
    net, params, model = language_model(compose=None, qk_norm=None, window_pattern="none")
    (folder := write(model, tmp_path / "weights")).joinpath("tokenizer.json").write_text("{}")
    config = configs.load(f"lm_text:init={folder},data_dir=x" + (f",attention={attention}" if attention else ""))
    assert config.input.data.tokenizer == str(folder / "tokenizer.json")
    assert config.model.context >= config.input.data.context
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    found, tuned = loaded(config, tokens)
    before, after = (n.apply({"params": p}, tokens)[0] for n, p in ((net, params), (tuned, found)))
    np.testing.assert_allclose(after, before, atol=1e-5)
    assert (tuned.compose is None) == (attention is None)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """An image model and a language model."""
    root, image = tmp_path_factory.mktemp("places"), image_model(compose=None)[2]
    return {"vit": write(image, root / "vit"), "lm": write(language_model()[2], root / "lm")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("upcycle:init={vit}", "transfer.py:init=.*,attention=dcmha,data_dir=FOLDER"),
        ("lm_text:init={lm},data_dir=x", "has no tokenizer.json: give tokenizer=PATH"),
        ("transfer:init={lm},data_dir=x", "model_name='lm'; expected 'vit'"),
    ],
)
def test_what_does_not_fit_is_one_line(spec, message, places):
    with refused(ConfigError, match=message) as error:
        configs.load(spec.format(**places))
    assert not re.search(r"KeyError|AttributeError|TypeError", str(error.value))


@pytest.mark.parametrize("pp", ["decode|resize(0)|value_range(-1, 1)", "decode|resize(16)|__import__('os')"])
def test_preprocessing_that_cannot_run_is_refused_where_it_is_read(pp, tmp_path):
    model = image_model()[2]
    folder = write(model._replace(description=model.description._replace(pp=pp)), tmp_path / "weights")
    with pytest.raises(CheckpointError, match="pp="):
        open_weights(folder)


def test_other_sizes_are_named_by_their_options(tmp_path):
    folder = write(language_model(compose=None)[2], tmp_path / "weights")
    source = open_weights(folder).description.fields
    config = configs.load("lm_text:data_dir=x", [f"model_init={folder}", "vocab_size=9", "model.context=8"])
    net = make_model(config)
    shapes = jax.eval_shape(net.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), jnp.int32))["params"]
    with pytest.raises(CheckpointError) as error:
        make_loader(config, net, shapes)(shapes)
    for name in ("width", "depth", "mlp_dim"):
        assert f"--config.model.{name}={source[name]}" in str(error.value)
