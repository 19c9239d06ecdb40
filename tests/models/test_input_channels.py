"""Embeddings of patches for other numbers of channels: repeated channels have the logits of RGB, errors name the key.

`tests/weights/test_timm.py` compares them with timm's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import save_npz

from dcvit.errors import CheckpointError, ConfigError
from dcvit.models import vit
from dcvit.models.input_channels import RULES, adapted
from dcvit.models.trees import param_shapes

KERNEL = np.random.default_rng(0).normal(size=(4, 5, 3, 8)).astype(np.float32)
NET = vit.Model(3, variant="mu/4", depth=0, num_heads=4, head_zeroinit=False)


def params(channels, seed=0, net=NET):
    return jax.jit(net.init)(jax.random.key(seed), jnp.zeros((1, 8, 8, channels)))["params"]


def shapes(channels, net=NET):
    return param_shapes(net, jax.ShapeDtypeStruct((1, 8, 8, channels), np.float32))


@pytest.fixture(scope="module")
def rgb(tmp_path_factory):
    """A checkpoint of a model of RGB images, and its parameters."""
    found = params(3)
    return save_npz(tmp_path_factory.mktemp("rgb") / "rgb.npz", found), found


@pytest.mark.parametrize("rule", RULES)
def test_repeated_channels_have_the_logits_of_rgb(rgb, rule):
    (path, old), copies = rgb, 5
    images = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    if rule == "mean":  # whose channels are equal
        images = jnp.broadcast_to(images[..., :1], images.shape)
    new = vit.load(params(3 * copies, 1), path, {}, channels=rule)
    expected = NET.apply({"params": old}, images)[0]
    found = NET.apply({"params": new}, jnp.tile(images, (1, 1, 1, copies)))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_both_rules_sum_to_one_channel_and_mean_is_equal_in_all():
    for rule in RULES:
        np.testing.assert_allclose(adapted(KERNEL, 1, rule)[:, :, 0], KERNEL.sum(2), rtol=1e-6)
    found = adapted(KERNEL, 13, "mean")
    np.testing.assert_array_equal(found, np.broadcast_to(found[:, :, :1], found.shape))
    np.testing.assert_allclose(found.sum(2), KERNEL.sum(2), rtol=1e-5)


def test_without_a_rule_the_error_names_it(rgb):
    with pytest.raises(CheckpointError, match=r"embedding/kernel .*--config\.model_load\.channels=repeat$"):
        vit.load(shapes(13), rgb[0], {})
    other = shapes(13, NET.clone(patch_size=(8, 8)))
    with pytest.raises(CheckpointError, match="embedding/kernel") as error:
        vit.load(other, rgb[0], {})
    assert "channels=" not in str(error.value)


@pytest.mark.parametrize(
    ("channels", "options", "match"),
    [
        (3, {"channels": "repeat"}, "no effect: both have 3 channels"),
        (4, {"channels": "sum"}, "channels='sum'; known: repeat, mean"),
    ],
)
def test_a_rule_without_effect_is_refused(rgb, channels, options, match):
    with pytest.raises(ConfigError, match=match):
        vit.load(shapes(channels), rgb[0], {}, **options)
