"""The rotary embedding in two dimensions rotates queries and keys of patches, with every way to compute attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import assert_trees_close, jit, param_shapes, random_params, stack_blocks

from dcvit.interpret.activations import run_with_cache
from dcvit.models import vit
from dcvit.models.layers import grid_centers, patch_angles, rotate
from dcvit.models.trees import unstack_blocks

FIELDS = dict(patch_size=(4, 4), width=32, depth=2, mlp_dim=24, num_heads=4, rank=1, posemb="rotary2d", registers=2)
IMAGES = jnp.asarray(np.random.default_rng(9).normal(size=(2, 8, 12, 3)), jnp.float32)  # 2 rows of 3 patches
OPTIONS = {
    "plain": {},
    "composed": dict(compose="both", static=True),
    "shared keys": dict(compose="both", num_key_heads=2, qk_norm="rmsnorm"),
    "folded": dict(compose="both", num_key_heads=2, groups=2, branches="q"),
}


def rotated(x, rows, columns, base=100.0):
    """Rotate the last tokens of x, B T H D, as complex numbers in float64."""
    x = np.float64(x)
    quarter = x.shape[-1] // 4
    for token, (row, column) in enumerate(np.ndindex(rows, columns), start=x.shape[1] - rows * columns):
        y_x = (2 * (row + 0.5) / rows - 1, 2 * (column + 0.5) / columns - 1)
        angles = np.array([2 * np.pi * at / base ** (i / quarter) for at in y_x for i in range(quarter)])
        pairs = (x[:, token, :, : 2 * quarter] + 1j * x[:, token, :, 2 * quarter :]) * np.exp(1j * angles)
        x[:, token] = np.concatenate([pairs.real, pairs.imag], axis=-1)
    return x


def model(**options):
    net = vit.Model(7, **{**FIELDS, **options})
    return net, random_params(param_shapes(vit.Model(7, **{**FIELDS, **options, "scan": False}), IMAGES), std=0.3)


@pytest.mark.parametrize(("grid", "before"), [((1, 1), 0), ((3, 2), 3), ((2, 5), 0)])
def test_patches_are_rotated_by_their_place_and_no_other_tokens(grid, before):
    x = np.random.default_rng(0).normal(size=(2, before + grid[0] * grid[1], 3, 16)).astype(np.float32)
    angles = jnp.pad(patch_angles(grid_centers(*grid), width=16, base=100.0), [(0, 0), (before, 0), (0, 0)])
    found = jit(rotate)(jnp.asarray(x), angles)
    np.testing.assert_allclose(found, rotated(x, *grid), atol=2e-6)
    np.testing.assert_array_equal(found[:, :before], x[:, :before])


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_queries_and_keys_of_a_model_are_rotated_in_every_layer(scan):
    net, params = model(compose="both", num_key_heads=2, scan=scan, pool_type="tok")
    found = run_with_cache(net, stack_blocks(params) if scan else params, IMAGES).arrays
    for layer in range(2):
        block = jax.tree.map(np.float64, params["Transformer"][f"encoderblock_{layer}"])
        pre = np.float64(found[f"block{layer:02d}/resid_pre"])
        normed = (pre - pre.mean(-1, keepdims=True)) / np.sqrt(pre.var(-1, keepdims=True) + 1e-6)
        normed = normed * block["LayerNorm_0"]["scale"] + block["LayerNorm_0"]["bias"]
        for name, letter in (("query", "q"), ("key", "k"), ("value", "v")):
            p = block["MultiHeadDotProductAttention_0"][name]
            expected = np.einsum("btm,mhd->bthd", normed, p["kernel"]) + p["bias"]
            expected = expected if letter == "v" else rotated(expected, 2, 3)
            np.testing.assert_allclose(found[f"block{layer:02d}/{letter}"], expected, atol=1e-4)


@functools.cache
def logits_and_gradient(name, **more):
    net, params = model(**OPTIONS[name], **more)
    params = stack_blocks(params) if net.scan else params
    grad = jax.value_and_grad(lambda p: (net.apply({"params": p}, IMAGES)[0] ** 2).sum())
    value, grads = jit(grad)(params)
    return value, unstack_blocks(grads) if net.scan else grads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("plain", {"scan": True, "remat": "full"}),
        ("composed", {}),
        ("shared keys", {"implementation": "blockwise"}),
        ("folded", {}),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_those_of_the_reference(name, more):
    """For implementations, and for layers that are scanned or recomputed."""
    depth = 2 if "scan" in more else 1
    expected = logits_and_gradient(name, implementation="reference", depth=depth)
    for found, right in zip(logits_and_gradient(name, **more, depth=depth), expected, strict=True):
        assert_trees_close(found, right, rtol=1e-3, atol=1e-3)


def test_the_same_parameters_take_images_of_any_size_and_orientation():
    shapes = [param_shapes(vit.Model(7, **FIELDS), jnp.zeros((1, *size, 3))) for size in ((8, 12), (40, 4))]
    assert shapes[0] == shapes[1]
    assert "pos_embedding" not in shapes[0]
    net, params = model()
    run = jit(lambda p, x: net.apply({"params": p}, x)[0])
    turned, upright = run(params, IMAGES.swapaxes(1, 2)), run(params, IMAGES)
    assert np.abs(turned - upright).max() > 1e-3
