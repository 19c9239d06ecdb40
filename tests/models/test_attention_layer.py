"""The layer in models of others: meshes with any axes, inputs of any rank, masks of flax, dropout and weights."""

import contextlib
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from marks import exhaustive

from dcvit.dcmha import device, kv_cache
from dcvit.dcmha.inputs import Composition
from dcvit.dcmha.segments import make_segments
from dcvit.models.attention import Attention, CacheUpdate, LayerInputs
from dcvit.models.composition import compose_inputs, compose_weights
from dcvit.models.dcmha import DCMHA, check_axes
from dcvit.models.layers import add_bias, rotary_angles


def random_input(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def initialized(layer, *args):
    return jax.jit(layer.init)(jax.random.key(1), *args)


def with_weights(layer, params, *args, **options):
    """The output of a layer and its composed weights."""
    out, found = layer.apply(params, *args, **options, sow_weights=True, mutable=["intermediates"])
    return out, found["intermediates"]["attention_weights"][0]


def by_heads(path, array, axis):
    """The split of a parameter by heads, as in tensor parallelism."""
    names = [entry.key for entry in path]
    if names[-2] in ("query", "key", "value"):
        return P(None, axis) if names[-1] == "kernel" else P(axis)
    return P(axis) if names[-2:] == ["out", "kernel"] else P()


def place(params, x, mesh, spec, split_heads):
    """Parameters and inputs on the devices of a mesh."""
    axis = mesh.axis_names[-1] if split_heads else None
    specs = jax.tree_util.tree_map_with_path(lambda path, a: by_heads(path, a, axis), params)
    placed = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), params, specs)
    return placed, jax.device_put(x, NamedSharding(mesh, spec))


def output_and_gradients(layer, params, x):
    """The output and the gradients of parameters and inputs."""

    @jax.jit
    def both(params, x):
        out, pull = jax.vjp(layer.apply, params, x)
        return out, pull(jnp.cos(out))

    return both(params, x)


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
# Axis types, axis names, split of the inputs, heads of the parameters split, implementation, `jax.set_mesh`.
MESHES = [
    (EXPLICIT, ("data", "model"), P("data"), True, None, True),
    exhaustive(AUTO, ("a", "b"), P("a"), False, "blockwise", False),
]


@functools.cache
def on_one_device():
    """Inputs and parameters, with the output and gradients of a layer."""
    layer, x = DCMHA(2), random_input(8, 5, 16)
    params = initialized(layer, x)
    return x, params, output_and_gradients(layer, params, x)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "names", "spec", "split_heads", "implementation", "current"), MESHES)
def test_output_on_a_mesh_is_split_as_the_input_and_equals_that_of_one_device(
    kind, names, spec, split_heads, implementation, current
):
    """Also the gradient of the input, and those of the parameters as the parameters."""
    layer, (x, params, expected) = DCMHA(2, implementation=implementation), on_one_device()
    mesh = jax.make_mesh((4, 2), names, axis_types=(kind, kind))
    with jax.set_mesh(mesh) if current else contextlib.nullcontext():
        placed, inputs = place(params, x, mesh, spec, split_heads)
        found = output_and_gradients(layer, placed, inputs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, float(jnp.abs(b).max())))
    out, (d_params, d_input) = found
    assert out.sharding.is_equivalent_to(inputs.sharding, 3)
    assert d_input.sharding.is_equivalent_to(inputs.sharding, 3)
    if kind == EXPLICIT:
        assert jax.typeof(out) == jax.typeof(inputs)
        assert jax.tree.map(jax.typeof, d_params) == jax.tree.map(jax.typeof, placed)


def test_the_gradient_of_a_bias_is_accumulated_in_float32():
    """A sum in bfloat16 stops growing at 256."""
    x, bias = jnp.zeros((40, 50, 8), jnp.bfloat16), jnp.ones((1, 1, 8), jnp.bfloat16)
    out, pull = jax.vjp(add_bias, x, bias)
    np.testing.assert_array_equal(out, jnp.ones_like(x))
    d_x, d_bias = pull(jnp.ones_like(x))
    np.testing.assert_array_equal(d_x, jnp.ones_like(x))
    np.testing.assert_array_equal(d_bias, jnp.full_like(bias, 2000))


def test_the_same_tokens_as_queries_and_keys_have_a_rotary_embedding():
    layer, x = Attention(2, compose="both"), random_input(3, 5, 16)
    params, angles = initialized(layer, x), rotary_angles(jnp.arange(5)[None], width=4, base=100.0)
    apply = functools.partial(layer.apply, angles=angles)
    twice, once = jax.jit(lambda params, x: (apply(params, x, x), apply(params, x)))(params, x)
    np.testing.assert_array_equal(twice, once)
    with pytest.raises(ValueError, match="needs queries and keys of the same tokens"):
        apply(params, x, x + 1)
    with pytest.raises(ValueError, match="embedding of 10 numbers is wider than a head, 8"):
        layer.apply(params, x, angles=jnp.zeros((1, 5, 5)))


def test_only_prefill_takes_several_tokens_and_starts_their_examples_anew():
    """Otherwise the tokens in the cache would be ignored."""
    layer, x = Attention(2, causal=True), random_input(3, 5, 16)
    params, one = initialized(layer, x), jnp.ones(3, jnp.int32)
    prefill = jax.jit(functools.partial(layer.apply, method="prefill"))
    empty = kv_cache.empty(layer.composition(), (3, 8), 2, 16, jnp.float32)
    out, cache = prefill(params, x, empty, 5 * one)
    np.testing.assert_allclose(out, jax.jit(layer.apply)(params, x), atol=1e-6)
    _, again = prefill(params, 2 * x, cache, jnp.array([0, 3, 5]))
    np.testing.assert_array_equal(again.k[0], cache.k[0])
    np.testing.assert_array_equal(again.k[1:, :3], prefill(params, 2 * x, empty, 5 * one)[1].k[1:, :3])
    with pytest.raises(ValueError, match="decode takes one token of each example, found 2: prefill takes several"):
        layer.apply(params, x[:, :2], cache, CacheUpdate(5 * one, 2 * one, 0 * one), method="decode")


def flax_masks():
    """Masks by name, for tokens of shape (2, 3, 5), as flax makes them and as arrays of the user."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 3, 5)) | np.eye(5, dtype=int)[0])
    return {
        "causal": nn.make_causal_mask(tokens),
        "padding": nn.make_attention_mask(tokens > 0, tokens > 0),
        "both": nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(tokens > 0, tokens > 0)),
        "boolean": nn.make_causal_mask(tokens, dtype=jnp.bool_),
        "numbers": nn.make_causal_mask(tokens, dtype=jnp.int32),
        "T S": jnp.tril(jnp.ones((5, 5))),
        "1 S": jnp.arange(5)[None] < 4,
        "1 1 T S": jnp.tril(jnp.ones((1, 1, 5, 5), bool)),
        "B 1 1 S": (tokens > 0)[:, :, None, None, :],
        "1 B 1 T S": nn.make_causal_mask(tokens)[:1],
        "B 1 T S": nn.make_causal_mask(tokens)[0],
    }


@pytest.mark.slow
def test_masks_of_flax_mask_what_they_mask_in_flax():
    """Every row has a key, because flax attends to all keys of a row without one."""
    layer, x = DCMHA(2, compose=None), random_input(2, 3, 5, 16)
    params = initialized(layer, x)
    apply, apply_library = (jax.jit(net.apply) for net in (layer, nn.MultiHeadDotProductAttention(2)))
    for name, mask in flax_masks().items():
        seen = np.broadcast_to(mask, (2, 3, 1, 5, 5)).any(-1)[:, :, 0, :, None]  # rows with a key
        found, expected = apply(params, x, mask=mask), apply_library(params, x, mask=mask)
        np.testing.assert_allclose(np.where(seen, found, 0), np.where(seen, expected, 0), atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"dropout_rate": 0.3, "broadcast_dropout": False}, {"causal": True, "num_key_heads": 1}]
)
def test_masks_of_each_head_mask_what_they_mask_in_flax(fields):
    x, more = random_input(2, 3, 5, 16), {name: x for name, x in fields.items() if "dropout" in name}
    layer, library = DCMHA(2, compose=None, **fields), nn.MultiHeadDotProductAttention(2, **more)
    params, rngs = initialized(layer.clone(dropout_rate=0.0), x), {"dropout": jax.random.key(2)}
    repeated = jax.tree_util.tree_map_with_path(  # flax has no shared key heads
        lambda path, a: jnp.repeat(a, 2 // a.shape[-2], -2) if path[1].key in ("key", "value") else a, params
    )
    for shape in ((2, 3, 2, 5, 5), (2, 1, 5)):
        mask = jax.random.bernoulli(jax.random.key(3), 0.5, shape).at[..., 0].set(True)
        found, weights = with_weights(layer, params, x, mask=mask, deterministic=False, rngs=rngs)
        wide = mask.reshape((1,) * (5 - mask.ndim) + mask.shape)
        if "causal" in fields:
            wide &= jnp.tril(jnp.ones((1, 1, 1, 5, 5), bool))
        expected = library.apply(repeated, x, mask=wide, deterministic=False, rngs=rngs)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert weights.shape == (2, 3, 2, 5, 5)
        assert not np.any(np.asarray(weights)[~np.broadcast_to(wide, weights.shape)])


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"compose": "both"}, {"compose": None, "num_key_heads": 1}])
def test_segments_of_packed_rows_are_their_mask(fields):
    """With leading axes, with a mask, which may be one of each head, and in the weights."""
    x, ids = random_input(2, 3, 5, 16), jnp.asarray([0, 0, 1, 1, 0], jnp.int32)
    ids = jnp.stack([ids, jnp.zeros_like(ids), jnp.arange(5, dtype=jnp.int32)])
    ids = jnp.stack([ids, ids[::-1]])
    layer = DCMHA(2, causal=True, **fields)
    params, same = initialized(layer, x), (ids[..., :, None] == ids[..., None, :])[:, :, None]
    heads = 2 if fields["compose"] is None else 1
    for mask in (None, jax.random.bernoulli(jax.random.key(3), 0.5, (2, 3, heads, 5, 5))):
        found = with_weights(layer, params, x, mask=mask, segments=ids)
        expected = with_weights(layer, params, x, mask=same if mask is None else mask & same)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    found = layer.apply(params, x[0], x[0, :, :3], segments=(ids[0], ids[0, :, :3]))
    np.testing.assert_allclose(found, layer.apply(params, x[0], x[0, :, :3], mask=same[0, ..., :3]), atol=1e-6)
    with pytest.raises(ValueError, match=r"segments have shape \(2, 5\), expected \(2, 3, 5\)"):
        check_axes(LayerInputs(x, segments=make_segments(ids[:, 0])))


def test_masks_that_do_not_broadcast_are_refused():
    """A mask for each head is one of them if heads are composed."""
    message = r"mask has shape .*, expected it to broadcast to \(.*1, 5, 5\), because a composition mixes the heads"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(DCMHA(2).init, jax.random.key(0), jnp.zeros((2, 5, 16)), mask=jnp.ones((2, 2, 5, 5)))


@pytest.mark.exhaustive
def test_dropout_removes_the_share_of_composed_weights_and_keeps_their_mean():
    """With values of one, an output is the sum of its weights."""
    layer = DCMHA(2, dropout_rate=0.25, broadcast_dropout=False)
    x = random_input(2, 32, 16)
    params = jax.jit(lambda key: layer.init(key, x, deterministic=True))(jax.random.key(1))
    apply = jax.jit(lambda key: layer.apply(params, x, deterministic=False, rngs={"dropout": key}))
    exact = layer.apply(params, x, deterministic=True)
    mean = jnp.mean(jax.lax.map(apply, jax.random.split(jax.random.key(0), 400)), axis=0)
    first, second = apply(jax.random.key(0)), apply(jax.random.key(1))
    assert float(jnp.abs(first - second).max()) > 1e-3
    assert float(jnp.abs(mean - exact).max()) < 0.2 * float(jnp.abs(first - exact).max())


@pytest.mark.exhaustive
def test_returned_weights_are_those_that_multiply_the_values():
    layer, x = DCMHA(2, causal=True), random_input(2, 5, 16)
    params = initialized(layer, x)
    out, weights = with_weights(layer, params, x)
    values = nn.DenseGeneral((2, 8)).apply({"params": params["params"]["value"]}, x)
    heads = jnp.einsum("bhts,bshd->bthd", weights, values)
    expected = nn.DenseGeneral(16, axis=(-2, -1)).apply({"params": params["params"]["out"]}, heads)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert float(jnp.abs(weights.sum(-1) - 1).max()) > 1e-4, "they are composed"


def test_inputs_with_other_leading_axes_are_refused():
    shapes = [(2, 3, 8), (4, 3, 8)]
    with pytest.raises(ValueError, match=re.escape(f"with the same leading axes, found {shapes}")):
        check_axes(LayerInputs(*map(jnp.ones, shapes)))


@pytest.mark.parametrize("tokens", [256, 257])
def test_units_of_dynamic_weights_are_passed_to_kernels_of_one_tile_only(monkeypatch, tokens):
    """Other kernels do not read them; on a mesh, their gradients would be arrays of zeros."""
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    composition, x = Composition("both"), jnp.zeros((1, tokens, 16))
    shapes = composition.parameters(4, 16)
    params = {name: {field: jnp.zeros(shape) for field, (shape, _) in shapes.items()} for name in ("pre", "post")}
    inputs = compose_inputs(x, x, groups=1)
    found = compose_weights(composition, params, inputs, num_heads=4, dtype=None)
    assert (found.hidden is not None) == (tokens <= 256)
    assert found.pre.q1.shape == (1, tokens, 2, 4)
