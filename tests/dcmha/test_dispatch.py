"""Which implementation is chosen, what is said of it, and attention on a mesh of devices."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_blockwise import problem

from dcvit import dcmha
from dcvit.dcmha import dispatch
from dcvit.dcmha.pallas_tpu import api
from dcvit.models import sharded_attention
from dcvit.models.attention import Attention
from dcvit.runs.progress import RunProgress

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
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    q = jax.ShapeDtypeStruct((2, queries, 4, 8), jnp.float32)
    with caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        assert dispatch.choose(q, SHAPE, SHAPE, weights, weights, **OPTIONS) == name
    assert caplog.messages[0].startswith(f"attention: {name} on {platform} for float32[2, {queries}, 4, 8], 256 keys")


def test_a_refusal_moves_the_choice_on_but_a_named_implementation_raises(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    q = jax.ShapeDtypeStruct((2, 256, 4, 8), jnp.float64)
    with caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        assert dispatch.choose(q, q, q, None, None, **OPTIONS) == "blockwise"
    assert "not pallas_tpu: " in caplog.messages[0]
    arguments, _, _ = problem(16, 16, "s")
    with pytest.raises(ValueError, match=r"pallas_gpu does not take this: it is for GPUs, and this is a TPU"):
        dcmha.attention(*arguments, implementation="pallas_gpu")
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    with pytest.raises(ValueError, match=r"pallas_gpu does not take this: .*static"):
        dcmha.attention(*arguments, implementation="pallas_gpu")


def test_a_named_implementation_is_said_too(caplog):
    arguments, _, _ = problem(16, 16, "qk")
    with caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        jax.eval_shape(lambda *args: dcmha.attention(*args, implementation="blockwise"), *arguments)
    assert caplog.messages[0].startswith("attention: blockwise on cpu")
    assert caplog.messages[0].endswith("as asked for")


@pytest.mark.parametrize(("kind", "x64"), [("TPU v4", False), ("TPU v5 lite", True)])
@pytest.mark.parametrize(("queries", "name"), [(256, "blockwise"), (1, "decode")])
def test_a_tpu_that_no_kernel_was_compiled_for_gets_none(kind, x64, queries, name, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    monkeypatch.setattr(api, "device_kind", lambda: kind)
    q = jax.ShapeDtypeStruct((2, queries, 4, 8), jnp.float32)
    with jax.enable_x64(x64), caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        assert dispatch.choose(q, SHAPE, SHAPE, WEIGHTS, WEIGHTS, **OPTIONS) == name
    assert ("64-bit" if x64 else "this is a TPU v4") in caplog.messages[0]


def test_a_run_shows_each_choice_once(capsys, caplog):
    """Not once more by what other libraries add to the root logger."""
    with RunProgress("run", 1):
        dispatch.choose(SHAPE, SHAPE, SHAPE, None, None, **OPTIONS)
    assert capsys.readouterr().out.count("attention: blockwise") == 1
    assert not caplog.messages
    with caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        dispatch.choose(SHAPE, SHAPE, SHAPE, None, None, **OPTIONS)
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


@pytest.mark.parametrize(("sizes", "names"), [((4,), ("data",)), ((2, 2), ("data", "model")), ((4,), ("x",))])
def test_the_layer_works_on_meshes_of_others(sizes, names):
    layer, x = Attention(4, compose="both"), jax.random.normal(jax.random.key(0), (4, 9, 16))
    params = layer.init(jax.random.key(1), x)
    with jax.set_mesh(jax.make_mesh(sizes, names, (AxisType.Auto,) * len(sizes), devices=jax.devices()[:4])):
        found = jax.jit(layer.apply)(params, x)
        if "data" in names:  # and where a user maps over shards
            mapped = jax.shard_map(layer.apply, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
            np.testing.assert_allclose(jax.jit(mapped)(params, x), found, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found, layer.apply(params, x), rtol=0, atol=1e-5)


def test_a_rotary_embedding_of_other_tokens_is_refused():
    with pytest.raises(ValueError, match="of the same tokens"):
        Attention(4, rotary=2).init(jax.random.key(0), jnp.zeros((2, 5, 16)), jnp.zeros((2, 7, 16)))
