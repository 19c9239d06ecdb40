"""Arguments of DCMHA and of flax's attention layers, linen and NNX: the same names, defaults and effects."""

import dataclasses
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from marks import exhaustive

from dcvit.models import dcmha, dcmha_nnx

normal, constant = nn.initializers.normal, nn.initializers.constant
# Rows of arguments that both of flax's layers have.
ROWS = {
    "widths": {"qkv_features": 32, "out_features": 20, "normalize_qk": True, "use_bias": False},
    "initializers": {
        "kernel_init": normal(0.3), "out_kernel_init": normal(0.2), "bias_init": constant(0.1),
        "out_bias_init": constant(0.2), "precision": "highest",
    },
    "dtypes": {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16},
    "dropout": {"dropout_rate": 0.3, "broadcast_dropout": False, "deterministic": False},
    "cache": {"decode": True},
}  # fmt: skip
LINEN_ROWS = {**ROWS, "dtypes": {**ROWS["dtypes"], "force_fp32_for_softmax": True}}
NNX_ROWS = {
    **ROWS,
    "widths": {**ROWS["widths"], "num_kv_heads": 2, "in_kv_features": 12},
    "dropout": {**ROWS["dropout"], "keep_rngs": False},
    "metadata": {
        "kernel_metadata": {"role": "kernel"}, "out_kernel_metadata": {"role": "out kernel"}, "normalize_qk": True,
        "bias_metadata": {"role": "bias"}, "out_bias_metadata": {"role": "out bias"},
        "query_ln_scale_metadata": {"role": "query scale"}, "key_ln_scale_metadata": {"role": "key scale"},
    },
}  # fmt: skip


def inputs(width=24):
    return jax.random.normal(jax.random.key(0), (2, 3, 5, width))


def defaults(f):
    """Arguments of a function with their defaults and kinds, without those that a call must give."""
    parameters = inspect.signature(f).parameters.values()
    return {p.name: (p.default, p.kind) for p in parameters if p.default is not p.empty}


def linen_defaults():
    fields = dataclasses.fields(nn.MultiHeadDotProductAttention)
    return {f.name: f.default for f in fields if f.name not in ("parent", "name", "num_heads")}


def nnx_defaults():
    return {name: default for name, (default, _) in defaults(nnx.MultiHeadAttention.__init__).items()}


def assert_close(found, expected, dtype):
    tolerance = 0.03 if dtype == jnp.bfloat16 else 1e-6
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=0, atol=tolerance)


def test_every_argument_of_flax_is_accepted_with_its_default():
    """Given explicitly, the defaults change nothing. Those of calls are the same, in the same order."""
    same = dcmha.DCMHA(4, **linen_defaults())
    assert same == dcmha.DCMHA(4)
    fields = [f for f in dataclasses.fields(dcmha.DCMHA) if f.name not in ("parent", "name")]
    assert [f.name for f in fields if not f.kw_only] == ["num_heads", *linen_defaults()]
    layer = dcmha_nnx.DCMHA(4, 24, rngs=nnx.Rngs(0), **nnx_defaults())
    assert nnx.graphdef(layer) == nnx.graphdef(dcmha_nnx.DCMHA(4, 24, rngs=nnx.Rngs(0)))
    for name in ("__call__", "init_cache", "set_view"):
        own, library = (defaults(getattr(net, name)) for net in (dcmha_nnx.DCMHA, nnx.MultiHeadAttention))
        assert {**own, **library} == own
        assert own.keys() - library.keys() <= {"input_positions", "segments"}  # the former of flax 0.12.12 and newer
    call = inspect.unwrap(nn.MultiHeadDotProductAttention.__call__)
    own, library = defaults(inspect.unwrap(dcmha.DCMHA.__call__)), defaults(call)
    assert own == {**library, "segments": own["segments"]}


def test_positions_for_an_attention_function_are_refused():
    layer = dcmha_nnx.DCMHA(4, 24, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="DCMHA has no input_positions"):
        layer(jnp.zeros((2, 3, 24)), input_positions=jnp.arange(3))


def test_arguments_without_a_counterpart_are_refused():
    message = "DCMHA does not support {}: leave its default, or use flax's layer"
    for name in dcmha_nnx.UNSUPPORTED:
        with pytest.raises(ValueError, match=message.format(name)):
            dcmha_nnx.DCMHA(4, 24, rngs=nnx.Rngs(0), **{name: max})
    for name in dcmha.UNSUPPORTED:
        with pytest.raises(ValueError, match=message.format(name)):
            jax.eval_shape(dcmha.DCMHA(4, **{name: max}).init, jax.random.key(0), inputs())


@pytest.mark.slow
@pytest.mark.parametrize("row", ["dtypes", *(exhaustive(row) for row in LINEN_ROWS if row != "dtypes")])
def test_plain_linen_layer_is_that_of_flax_for_every_argument(row, library_promotion):
    fields, x = LINEN_ROWS[row], inputs().astype(LINEN_ROWS[row].get("dtype", jnp.float32))
    library, layer = nn.MultiHeadDotProductAttention(4, **fields), dcmha.DCMHA(4, compose=None, **fields)
    rngs = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    (expected, variables), (found, ours) = (jax.jit(net.init_with_output)(rngs, x) for net in (library, layer))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), ours) == jax.tree.map(lambda a: (a.shape, a.dtype), variables)
    jax.tree.map(np.testing.assert_array_equal, ours, variables)
    assert_close(found, expected, x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["widths", *(exhaustive(row) for row in NNX_ROWS if row != "widths")])
def test_plain_nnx_layer_is_that_of_flax_for_every_argument(row, library_promotion):
    """Paths, shapes, dtypes, values and metadata of all variables with the same `rngs`, and the output."""
    fields, x = NNX_ROWS[row], inputs().astype(NNX_ROWS[row].get("dtype", jnp.float32))
    library, layer = (
        nnx.MultiHeadAttention(4, 24, rngs=nnx.Rngs(1), **fields),
        dcmha_nnx.DCMHA(4, 24, rngs=nnx.Rngs(1), compose=None, **fields),
    )
    if "decode" in fields:
        library.init_cache(x.shape)
        layer.init_cache(x.shape)
        x = x[:, :, :1]
    expected, found = (dict(nnx.to_flat_state(nnx.state(net))) for net in (library, layer))
    assert found.keys() == expected.keys()
    for path, variable in expected.items():
        assert found[path].get_metadata() == variable.get_metadata(), path
        np.testing.assert_array_equal(found[path][...], variable[...])
        assert found[path].dtype == variable.dtype
    keys = x[..., : fields.get("in_kv_features", 24)] + 1
    outputs = (net(x, keys, decode=fields.get("decode", False), rngs=nnx.Rngs(7)) for net in (library, layer))
    assert_close(*reversed([*outputs]), x.dtype)


def test_metadata_of_linen_initializers_arrive_on_the_parameters():
    wrap = nn.with_partitioning
    fields = {
        "kernel_init": wrap(normal(), ("embed", "heads", None)),
        "out_kernel_init": wrap(normal(), ("heads", None, "embed")),
        "bias_init": wrap(constant(0.0), ("heads", None)), "out_bias_init": wrap(constant(0.0), ("embed",)),
    }  # fmt: skip
    found, expected = (
        nn.get_partition_spec(jax.eval_shape(net(4, **fields).init, jax.random.key(0), inputs()))["params"]
        for net in (dcmha.DCMHA, nn.MultiHeadDotProductAttention)
    )
    assert {name: found[name] for name in expected} == expected
    assert found["query"]["kernel"] == P("embed", "heads", None)
    assert set(jax.tree.leaves(found["pre"])) == {P()}


@pytest.mark.exhaustive
def test_metadata_of_nnx_initializers_arrive_on_the_parameters_and_split_them():
    fields = {"kernel_init": nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "a"))}
    fields["out_kernel_init"] = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("a",))
    with jax.set_mesh(jax.make_mesh((2,), ("a",), (AxisType.Auto,), devices=jax.devices()[:2])):
        layer, library = (net(4, 24, rngs=nnx.Rngs(0), **fields) for net in (dcmha_nnx.DCMHA, nnx.MultiHeadAttention))
        for name in ("query", "key", "value", "out"):
            found, expected = (getattr(net, name).kernel for net in (layer, library))
            assert found.get_metadata() == expected.get_metadata()
            assert found[...].sharding == expected[...].sharding
            assert not found[...].sharding.is_fully_replicated


@pytest.mark.exhaustive
def test_an_nnx_layer_that_was_called_on_a_mesh_runs_without_it_and_on_another_one():
    """The parameters come from one device, and `nnx.jit` returns them from the program of the mesh."""
    layer, call = dcmha_nnx.DCMHA(4, 24, rngs=nnx.Rngs(0)), nnx.jit(lambda layer, x: layer(x))
    expected = layer(inputs())
    for names in (("data", "tensor"), ("model", "data")):
        with jax.set_mesh(jax.make_mesh((2, 4), names, (AxisType.Explicit,) * 2, devices=jax.devices()[:8])):
            np.testing.assert_allclose(call(layer, inputs()), expected, atol=1e-5)
        assert layer.query.kernel[...].sharding.is_fully_replicated
        np.testing.assert_allclose(layer(inputs()), expected, atol=1e-5)


@pytest.mark.slow
def test_heads_with_masks_of_their_own_are_split_over_the_tensor_axis(caplog):
    layer, x = dcmha.DCMHA(4, compose=None), inputs()[:, 0]
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (2, 4, 5, 5))
    params = layer.init(jax.random.key(2), x)
    expected = layer.apply(params, x, mask=mask)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices()[:8])
    with jax.set_mesh(mesh), caplog.at_level("INFO", logger="dcvit.dcmha"):
        found = jax.jit(lambda params, x: layer.apply(params, x, mask=mask))(params, x)
    assert caplog.messages[-1].startswith("attention: reference on cpu for float32[1, 5, 1, 6]")  # one head of eight
    np.testing.assert_allclose(found, expected, atol=1e-5)
