"""Which implementation is chosen, what is said of it, and attention on a mesh of devices."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_blockwise import problem

from dcvit import dcmha
from dcvit.dcmha import choice
from dcvit.models import sharded_attention
from dcvit.progress import RunProgress

SHAPE = jax.ShapeDtypeStruct((2, 256, 4, 8), jnp.float32)
OPTIONS = {"causal": False, "window": None, "mask": None, "groups": 1}
WEIGHTS = problem(256, 256, "qkpg")[0][3]


@pytest.mark.parametrize(
    ("platform", "queries", "weights", "name"),
    [
        ("cpu", 256, WEIGHTS, "blockwise"),
        ("cpu", 16, WEIGHTS, "blockwise"),
        ("cpu", 1, WEIGHTS, "decode"),
        ("cpu", 1, None, "decode"),
        ("cpu", 256, None, "blockwise"),
        ("cpu", 16, None, "reference"),
        ("tpu", 256, WEIGHTS, "pallas_tpu"),
        ("tpu", 1, WEIGHTS, "pallas_tpu_decode"),
        ("gpu", 256, WEIGHTS, "reference"),
        ("gpu", 1, WEIGHTS, "decode"),
    ],
)
def test_the_choice_and_what_the_log_says_of_it(platform, queries, weights, name, monkeypatch, caplog):
    monkeypatch.setattr(choice, "platform", lambda: platform)
    q = jax.ShapeDtypeStruct((2, queries, 4, 8), jnp.float32)
    with caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        assert choice.choose(q, SHAPE, SHAPE, weights, weights, **OPTIONS) == name
    assert caplog.messages[0].startswith(f"attention: {name} on {platform} for float32[2, {queries}, 4, 8], 256 keys")


def test_a_refusal_moves_the_choice_on_but_a_named_implementation_raises(monkeypatch, caplog):
    monkeypatch.setattr(choice, "platform", lambda: "tpu")
    q = jax.ShapeDtypeStruct((2, 256, 4, 8), jnp.float64)
    with caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        assert choice.choose(q, q, q, None, None, **OPTIONS) == "blockwise"
    assert "not pallas_tpu: " in caplog.messages[0]
    arguments, _, _ = problem(16, 16, "s")
    with pytest.raises(ValueError, match=r"pallas_gpu does not take this: .*static"):
        dcmha.attention(*arguments, implementation="pallas_gpu")


@pytest.mark.parametrize(
    ("name", "said"),
    [("blockwise", "as asked for"), ("pallas_tpu", "interpreted, slowly"), ("pallas_gpu", "interpreted, slowly")],
)
def test_a_named_implementation_is_said_too(name, said, caplog):
    arguments, _, _ = problem(16, 16, "qk")
    with caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        jax.eval_shape(lambda *args: dcmha.attention(*args, implementation=name), *arguments)
    assert [message for message in caplog.messages if f"attention: {name} on cpu" in message and said in message]


def test_a_run_shows_each_choice_once(capsys, caplog):
    """Not once more by what other libraries add to the root logger."""
    with RunProgress("run", 1):
        choice.choose(SHAPE, SHAPE, SHAPE, None, None, **OPTIONS)
    assert capsys.readouterr().out.count("attention: blockwise") == 1
    assert not caplog.messages
    with caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        choice.choose(SHAPE, SHAPE, SHAPE, None, None, **OPTIONS)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("implementation", [None, "blockwise"])
@pytest.mark.parametrize(
    ("branches", "options"),
    [
        (None, {"key_heads": 2}),
        (None, {"key_heads": 1}),
        ("qkpgs", {"groups": 2}),
        ("qkpgs", {"mask": (2, 1, 1, 24)}),
    ],
)
def test_on_a_mesh_output_and_gradients_are_those_of_one_device(implementation, branches, options):
    check_on_a_mesh(implementation, *problem(24, 24, branches, causal=True, **options))


@pytest.mark.parametrize("key_heads", [1, 2])
def test_so_are_those_of_one_query(key_heads):
    check_on_a_mesh(None, *problem(1, 24, "qkpg", key_heads=key_heads, groups=2, mask=(2, 1, 1, 24)))
    check_on_a_mesh(None, *problem(1, 24, None, key_heads=key_heads))


def check_on_a_mesh(implementation, arguments, d_out, options):
    def both(attend, d_out, *arguments):
        out, pull = jax.vjp(lambda *a: attend(*a, **options, implementation=implementation), *arguments)
        return out, pull(d_out)

    right = both(dcmha.attention, d_out, *arguments)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 2), ("data", "fsdp", "tensor"))
    with jax.set_mesh(mesh):
        found = jax.jit(both, static_argnums=0)(sharded_attention.attention, d_out, *arguments)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(jnp.abs(y).max()))
