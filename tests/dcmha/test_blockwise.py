"""Blockwise attention: right where there are several blocks, and small in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from dcvit.dcmha import ComposeWeights, attention, blockwise

CASES = {  # queries, keys, branches, options; the number of key heads is among the options
    "one sight for all": (70, 70, "qkpg", {}),
    "causal": (70, 70, "qkpg", {"causal": True}),
    "causal, many segments": (330, 330, "qkpg", {"causal": True}),
    "window": (70, 70, "qkpg", {"window": 20}),
    "window of 1": (37, 37, "qkpg", {"window": 1}),
    "window wider than the keys": (70, 33, "qkpg", {"window": 50}),
    "window, fewer keys": (70, 33, "qkpg", {"window": 9}),
    "more keys": (33, 90, "qkpg", {}),
    "causal, more keys": (33, 90, "qkpg", {"causal": True}),
    "mask": (50, 50, "qkpg", {"mask": (2, 1, 50, 50)}),
    "key padding in a window": (50, 50, "qkpg", {"mask": (2, 1, 1, 50), "window": 17}),
    "rows that see nothing": (50, 50, "qkpg", {"mask": (1, 1, 50, 1)}),
    "groups and shared keys": (50, 50, "qkpgs", {"groups": 2, "key_heads": 2, "causal": True}),
    "query-wise only": (50, 50, "qpg", {"causal": True}),
    "static only": (50, 50, "s", {}),
    "plain": (50, 50, None, {"window": 20}),
}


def problem(queries, keys, branches, *, key_heads=4, mask=None, groups=1, **options):
    """q, k, v, pre, post and an output's cotangent; and the options of attention."""
    rng = np.random.default_rng(0)
    q, d_out = rng.normal(size=(2, 2, queries, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, keys, key_heads, 8)).astype(np.float32)
    sizes = {"batch": 2, "queries": queries, "keys": keys, "heads": 4, "groups": groups}
    weights = [branches and oracle.random_weights(rng, branches, **sizes) for _ in range(2)]
    composed = [
        w and ComposeWeights(**{n: None if x is None else jnp.float32(x) for n, x in w.items()}) for w in weights
    ]
    if mask is not None:
        options["mask"] = jnp.asarray(rng.random(mask) < 0.6)
    return (
        (jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), *composed),
        jnp.asarray(d_out),
        {"groups": groups, **options},
    )


def outputs(arguments, d_out, options, implementation):
    """The output and all gradients."""
    f = lambda *a: attention(*a, **options, implementation=implementation)  # noqa: E731
    out, pull = jax.jit(lambda d_out, *a: jax.vjp(f, *a))(d_out, *arguments)
    return out, *jax.tree.leaves(pull(d_out))


@pytest.mark.parametrize("name", CASES)
def test_several_blocks_equal_the_reference_forward_and_backward(name, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 16)  # of 16 queries, the least
    queries, keys, branches, options = CASES[name]
    arguments, d_out, options = problem(queries, keys, branches, **options)
    layout = blockwise.Options(options.get("causal", False), options.get("window"), options["groups"])
    assert sum(segment.blocks for segment in blockwise.segments(queries, keys, layout)) > 2
    right = outputs(arguments, d_out, options, "reference")
    found = outputs(arguments, d_out, options, "blockwise")
    for x, y in zip(found, right, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(jnp.abs(y).max()))


def test_bfloat16_stays_close_to_float32(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 16)
    arguments, d_out, options = problem(50, 50, "qkpgs", causal=True)
    right = outputs(arguments, d_out, options, "reference")
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (arguments, d_out))
    for x, y in zip(outputs(*narrow, options, "blockwise"), right, strict=True):
        assert x.dtype == jnp.bfloat16
        error = jnp.linalg.norm((x.astype(jnp.float32) - y).ravel()) / jnp.linalg.norm(y.ravel())
        assert float(error) < 2e-2


def temporary_bytes(implementation, length, window=None):
    """Of the compiled gradient of a causal layer of DCFormer++-6.9B, H = 32 and D = 128."""
    struct = lambda *shape: jax.ShapeDtypeStruct((1, length, *shape), jnp.float32)  # noqa: E731
    weights = ComposeWeights(*(struct(2, 32), struct(2, 32), struct(32)) * 2)

    def loss(*arguments):
        return jnp.sum(attention(*arguments, causal=True, window=window, implementation=implementation) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))
    arguments = (*[struct(32, 128)] * 3, weights, weights)
    return gradient.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_is_an_eighth_of_the_reference_s():
    assert temporary_bytes("blockwise", 2048) <= temporary_bytes("reference", 2048) / 8


@pytest.mark.slow
def test_memory_of_a_local_layer_is_linear_in_its_length():
    assert temporary_bytes("blockwise", 8192, window=256) <= 4.5 * temporary_bytes("blockwise", 2048, window=256)
