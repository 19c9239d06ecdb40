"""Upcycling keeps the function of the plain model, and trains every parameter of the compositions that it adds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from marks import exhaustive
from refusals import refused
from small_models import (
    LENGTH,
    SMALL,
    VOCAB,
    jit,
    logits_of,
    make_tokens,
    param_shapes,
    random_params,
    save_npz,
)

from dcvit.errors import CheckpointError
from dcvit.models import lm, vit
from dcvit.models.upcycling import COMPOSITION, fields_that_change_the_function, identity_compositions

IMAGES = jnp.asarray(np.random.default_rng(9).normal(size=(2, 8, 8, 3)), jnp.float32)
VIT = dict(patch_size=(4, 4), width=16, depth=1, mlp_dim=24, num_heads=4)
# What a user may ask of the compositions: every branch alone and all together, both places, ranks and groups.
SETTINGS = {
    "default": {},
    "all": {"static": True},
    "queries": {"branches": "q", "gate": False},
    "keys before the softmax": {"branches": "k", "compose": "pre", "rank": 1},
    "gates after the softmax": {"compose": "post", "projection": False},
    "static alone": {"static": True, "projection": False, "gate": False},
    "groups": {"groups": 2, "rank": 3, "static": True},
}
GPT3, LLAMA, PYTHIA = "Transformer-405M", "Transformer++-405M", "Pythia-2.8B"
SHARED_KEYS, LOCAL = {"num_key_heads": 2, "qk_norm": "rmsnorm"}, {"window_pattern": "1:1"}
SCANNED = {"depth": 2, "scan": True}
# Settings, the plain model (None is a ViT), and its fields: every setting, architecture, field and layout occurs.
STARTS = [("all", None, SCANNED), ("queries", LLAMA, SHARED_KEYS), ("groups", PYTHIA, SCANNED)]
MORE_STARTS = [
    ("default", None, {}),
    ("keys before the softmax", PYTHIA, SHARED_KEYS),
    ("static alone", GPT3, SHARED_KEYS),
    ("gates after the softmax", LLAMA, LOCAL),
]


def image_models(**fields):
    """Return a plain and a composed ViT, and a batch of images."""
    composed = vit.Model(7, **{**VIT, "compose": "both", **fields})
    return composed.clone(compose=None, scan=False), composed, IMAGES


def language_models(preset=LLAMA, **fields):
    """Return a plain and a composed language model, and a batch of tokens."""
    composed = lm.Model(VOCAB, preset=preset, **{**SMALL, "depth": 1, "compose": "both", **fields})
    return composed.clone(compose=None, scan=False), composed, make_tokens()


def upcycled(tmp_path, plain, composed, inputs):
    """Return random parameters of the plain model, and those of the composed one that is loaded from them."""
    params, init = (random_params(param_shapes(net, inputs), seed, 0.1) for seed, net in enumerate((plain, composed)))
    load = vit.load if isinstance(plain, vit.ViT) else lm.load
    file = save_npz(tmp_path / "plain.npz", params)
    return params, load(init, file, {"scan": composed.scan}, upcycle=True)


def assert_same_function(tmp_path, plain, composed, inputs):
    params, loaded = upcycled(tmp_path, plain, composed, inputs)
    before, after = logits_of(plain, params, inputs), logits_of(composed, loaded, inputs)
    assert np.std(before) > 0.1
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "preset", "fields"), [*STARTS, *(exhaustive(*row) for row in MORE_STARTS)])
def test_composed_model_starts_as_the_function_of_the_plain_one(tmp_path, setting, preset, fields):
    models = functools.partial(language_models, preset) if preset else image_models
    assert_same_function(tmp_path, *models(**fields, **SETTINGS[setting]))


def by_name(params):
    """Return the parameters of the compositions by name."""
    return {name: leaf for name, leaf in flatten_dict(params, sep="/").items() if COMPOSITION.fullmatch(name)}


@pytest.mark.slow
def test_gradient_reaches_up_projections_gates_and_static_at_once_and_everything_soon(tmp_path):
    plain, composed, inputs = image_models(groups=2, static=True)
    _, params = upcycled(tmp_path, plain, composed, inputs)

    @jit
    def step(params):
        def loss(params):
            outputs = composed.apply({"params": params}, inputs)[0]
            return jnp.mean((outputs - jax.random.normal(jax.random.key(3), outputs.shape)) ** 2)

        gradient = jax.grad(loss)(params)
        return gradient, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    gradients = []
    for _ in range(3):
        gradient, params = step(params)
        gradients.append(by_name(gradient))
    assert len(gradients[0]) == 14  # two compositions with seven parameters
    reached = {name.rpartition("/")[2]: np.mean(leaf != 0) for name, leaf in gradients[0].items()}
    assert reached == {"w_q1": 0, "w_q2": 0.5, "w_qg": 1, "w_k1": 0, "w_k2": 0.5, "w_kg": 1, "w_b": 1}
    assert {name for name, leaf in gradients[2].items() if np.mean(leaf != 0) < 0.9} == set()


@pytest.mark.slow
def test_plain_checkpoint_without_the_option_is_one_line_that_names_it(tmp_path):
    (plain, composed, inputs), load = language_models(depth=2), lm.load
    file = save_npz(tmp_path / "plain.npz", random_params(param_shapes(plain, inputs)))
    init = param_shapes(composed, inputs)
    with refused(CheckpointError, match=r"only in the model.*identity: --config\.model_load\.upcycle=True$"):
        load(init, file, {})
    with refused(CheckpointError, match=r"has no QK-norm.*set --config\.model\.qk_norm=None$"):
        load(param_shapes(composed.clone(qk_norm="rmsnorm"), inputs), file, {}, upcycle=True)


def test_composed_checkpoint_is_not_upcycled(tmp_path):
    _, composed, images = image_models()
    params = random_params(param_shapes(composed, images))
    file = save_npz(tmp_path / "composed.npz", params)
    with pytest.raises(CheckpointError, match=r"has all compositions of the model: remove --config\.model_load\.upcy"):
        vit.load(params, file, {}, upcycle=True)


def test_shapes_stay_shapes_where_nothing_is_loaded(tmp_path):
    """The trainer computes initial values later, on the devices that hold them."""
    plain, composed, tokens = language_models()
    file = save_npz(tmp_path / "plain.npz", random_params(param_shapes(plain, tokens)))
    shapes = param_shapes(composed, tokens)
    loaded = lm.load(shapes, file, {}, dont_load=["head/kernel"], upcycle=True)
    left = {name for name, x in flatten_dict(loaded, sep="/").items() if isinstance(x, jax.ShapeDtypeStruct)}
    assert left == {"head/kernel"} | by_name(shapes).keys()
    assert identity_compositions(shapes) == shapes


@pytest.mark.parametrize(
    ("preset", "fields", "expected"),
    [
        ("DCFormer++-405M", {}, {"qk_norm": (None, "rmsnorm"), "window_pattern": ("none", "1:1")}),
        ("DCFormer++-405M", {"qk_norm": None, "window_pattern": "none", "window": 5, "rank": 4, "scan": True}, {}),
    ],
)
def test_fields_that_change_the_function_are_found(preset, fields, expected):
    plain = lm.Model(VOCAB, preset="Transformer++-405M", context=LENGTH)
    assert fields_that_change_the_function(plain, lm.Model(VOCAB, preset=preset, **fields)) == expected


def test_composed_models_differ_in_what_no_parameter_shows():
    one, other = (lm.Model(VOCAB, preset="DCFormer++-405M", compose_window=window) for window in (None, 8))
    assert fields_that_change_the_function(one, other) == {"compose_window": (None, 8)}


def test_fields_of_images_that_change_the_function_are_found():
    plain = vit.Model(7, variant="S/16", patch_size=[16, 16])
    changed = functools.partial(fields_that_change_the_function, plain)
    assert changed(vit.Model(7, variant="DCViT-S/16", dropout=0.1, head_bias_init=-7.0)) == {}
    assert changed(vit.Model(7, variant="DCViT-S/16", pool_type="0")) == {"pool_type": ("gap", "0")}
    rotary = vit.Model(7, variant="DCViT-S/16", posemb="rotary2d", qkv_bias="qv")
    assert changed(rotary) == {"posemb": ("learn", "rotary2d"), "qkv_bias": ("qkv", "qv")}
