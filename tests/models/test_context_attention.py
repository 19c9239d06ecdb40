"""Attention whose tokens are split over the mesh axis "context": equal to one device, and balanced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import call_of, on_arrays, output_and_gradients, random_case, relative_errors, worst
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dcvit.dcmha.backends.xla import reference
from dcvit.dcmha.inputs import Inputs, Options
from dcvit.models import sharded_attention
from dcvit.parallel.mesh import BATCH

CASES = {
    "causal, segments, shared keys": {"causal": True, "segments": 3, "key_heads": 2, "branches": "qkpgs"},
    "window": {"window": 5},
    "window wider than a device": {"window": 20, "segments": 3},
    "composed window": {"causal": True, "compose_window": 20, "segments": 3},
    "plain": {"causal": True, "branches": None},
    "folded": {"causal": True, "branches": "qpg", "key_heads": 2, "groups": 2},
}
# Devices along data, fsdp, context and tensor. Heads composed across "tensor" split the tokens instead.
MESHES = [(1, 1, 8, 1), (1, 2, 2, 2), (2, 2, 2, 1)]
# The number of the mesh of each case. Those that are not in DEFAULT run weekly.
PAIRS = {
    "causal, segments, shared keys": 1, "window": 1, "window wider than a device": 0, "plain": 0, "folded": 2,
    "composed window": 0,
}  # fmt: skip
DEFAULT = ("plain", "window", "causal, segments, shared keys", "composed window")


def on_mesh(sizes):
    """Set the mesh with these numbers of devices."""
    return jax.set_mesh(jax.make_mesh(sizes, ("data", "fsdp", "context", "tensor"), (AxisType.Auto,) * 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [pytest.param(*pair, marks=[] if pair[0] in DEFAULT else pytest.mark.weekly) for pair in PAIRS.items()],
)
def test_split_tokens_have_the_output_and_gradients_of_one_device(name, mesh):
    args, options = random_case(64, heads=4, batch=4, rank=1, **CASES[name])
    expected = output_and_gradients(on_arrays(reference.run), args, options)
    with on_mesh(MESHES[mesh]):
        put = jax.tree.map(lambda x: jax.device_put(x, P(BATCH, "context")) if x.ndim > 3 else x, args[:3])
        found = output_and_gradients(on_arrays(sharded_attention.attention), (*put, *args[3:]), options)
    errors = relative_errors(found, expected)
    assert worst(errors) < 1e-5, errors


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"causal": True}, {"window": 3}])
def test_no_segment_id_makes_later_tokens_visible(options):
    """The ids are arguments of the compiled function, so that they are not known when it is traced."""
    args, _ = random_case(32, heads=1, head_dim=4, branches=None)
    args, ids = args[:3], jnp.full((1, 32), -(2**31), jnp.int32)
    with on_mesh((1, 1, 8, 1)):
        attend = on_arrays(sharded_attention.attention)
        found = jax.jit(lambda args, ids: attend(*args, segments=ids, **options))(args, ids)
    np.testing.assert_allclose(found, on_arrays(reference.run)(*args, **options), atol=1e-5)


def test_every_device_attends_to_the_same_number_of_keys():
    """The tokens are in their order, so that a device without balance would have up to twice the mean."""
    counts, tokens = {}, 64

    def attend(call):
        inputs, options = call.inputs, call.options
        total = jnp.sum(reference.visible(inputs.q.shape[1], inputs.k.shape[1], options, None, inputs.segments))
        jax.debug.callback(
            lambda i, n: counts.setdefault(int(i), []).append(int(n)), jax.lax.axis_index("context"), total
        )
        return inputs.q

    def compute(q):
        return sharded_attention.context_attention(attend, call_of(Inputs(q, q, q), Options(causal=True)), ("context",))

    q = jnp.asarray(np.arange(tokens, dtype=np.float32).reshape(1, tokens, 1, 1))
    with on_mesh((1, 1, 8, 1)):
        split = NamedSharding(jax.sharding.get_mesh(), P(None, "context"))
        x = jax.device_put(q, split)
        spec = P(None, "context")
        out = jax.jit(jax.shard_map(compute, in_specs=spec, out_specs=spec))(x)
    jax.effects_barrier()
    np.testing.assert_array_equal(out, q)  # the outputs of all queries come back
    assert {sum(each) for each in counts.values()} == {tokens * (tokens + 1) // 2 // 8}
    assert len(counts) == 8


@pytest.mark.slow
def test_a_window_needs_the_tokens_of_one_neighbor_and_no_program_keeps_gathered_keys():
    """Sizes are of one device: T/8 tokens, and for global layers the gathered T."""
    tokens, sizes = 128, {}
    args, _ = random_case(tokens, heads=2, branches=None)
    for name, options in {"local": {"window": 8}, "global": {"causal": True}}.items():
        with on_mesh((1, 1, 8, 1)):
            attend = functools.partial(on_arrays(sharded_attention.attention), **options)
            text = jax.jit(attend).lower(*args[:3]).compile().as_text()
            residuals = jax.eval_shape(functools.partial(jax.vjp, attend), *args[:3])[1]
        sizes[name] = "all-gather(" in text, "collective-permute(" in text
        assert max(x.size for x in jax.tree.leaves(residuals)) <= args[0].size
    assert sizes == {"local": (False, True), "global": (True, True)}


@pytest.mark.parametrize(("tokens", "axes"), [(64, ("context",)), (60, ()), (1, ())])
def test_only_rows_that_the_axis_divides_are_split(tokens, axes):
    """Each device computes all others: a token that is decoded, or prompts."""
    x = jax.ShapeDtypeStruct((1, tokens, 2, 4), jnp.float32)
    with on_mesh((1, 1, 8, 1)):
        mesh = jax.sharding.get_abstract_mesh()
    found = sharded_attention.token_axes(call_of(Inputs(x, x, x), Options(causal=True)), mesh, with_tensor=False)
    assert found == axes
