"""Attention of one query, in XLA and in the TPU kernel, against the reference; and through the real TPU compiler."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from test_pallas_tpu import compile_all, errors, make_case, outputs, watch_races, worst

from dcvit import dcmha
from dcvit.dcmha import ComposeWeights, decode, dispatch, reference
from dcvit.dcmha.pallas_tpu import decode as kernel

CASES = {
    "one key": {"keys": 1},
    "ring, batch 5": {"keys": 21, "batch": 5, "mask": (5, 1, 1, 21)},
    "one mask for all": {"keys": 12, "batch": 2, "mask": (1, 1, 1, 12), "branches": "qg", "post": "kp"},
    "groups, shared keys": {"keys": 33, "heads": 8, "key_heads": 2, "groups": 2, "branches": "qkpgs"},
    "one key head, plain": {"keys": 16, "heads": 4, "key_heads": 1, "branches": None},
    "static": {"keys": 9, "heads": 4, "branches": "s", "mask": (1, 1, 1, 9)},
    "key-wise, rank 3": {"keys": 40, "branches": "kpg", "rank": 3},
    "window": {"keys": 5, "branches": "g", "window": 2},
    "pre only": {"keys": 18, "branches": "qkg", "post": None},
    "post only": {"keys": 18, "branches": None, "post": "qkpg"},
}
IMPLEMENTATIONS = {"XLA": (decode.attention, {}), "kernel": (kernel.attention, {"interpret": True})}


def case_of(name, dtype=jnp.float32, **changes):
    case = {**CASES[name], **changes}
    post = case.pop("post", case.get("branches", "qkpg"))
    args, options = make_case(1, **case, dtype=dtype)
    return (*args[:4], post and make_case(1, **case | {"branches": post}, dtype=dtype)[0][4]), options


@functools.partial(jax.jit, static_argnames=("causal", "window", "groups", "scale"))
def expected(*args, **options):
    return reference.attention(*args, **options)


def compare(implementation, args, options):
    """The output, and its largest error relative to the reference's largest number."""
    attention, more = IMPLEMENTATIONS[implementation]
    out = jax.jit(lambda mask, *a: attention(*a, **options | {"mask": mask}, **more))(options["mask"], *args)
    assert out.dtype == args[0].dtype
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    return out, worst(errors(out, expected(*wide, **options)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(kernel, "BLOCKS", (16,))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, implementation):
    args, options = case_of(name)
    assert compare(implementation, args, options)[1] < 2e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["ring, batch 5", "groups, shared keys", "one key head, plain"])
def test_bfloat16_is_close(name, implementation):
    args, options = case_of(name, jnp.bfloat16)
    assert compare(implementation, args, options)[1] < 2e-2


@pytest.mark.parametrize("name", ["groups, shared keys", "static"])
def test_gradients_are_the_references(name):
    args, options = case_of(name)
    right = outputs(reference.attention, args, options)
    doors = (decode.attention, kernel.attention)  # off a TPU the latter leads to the former
    for attention in doors if name == "static" else doors[:1]:
        found = errors(outputs(attention, args, options), right)
        assert worst(found) < 2e-5, found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_example_that_sees_nothing_yields_zeros_and_what_no_one_sees_does_not_matter(implementation):
    args, options = case_of("ring, batch 5")
    seen = options["mask"].at[3].set(False)
    seen = seen.at[..., 0].set(False)
    options["mask"] = seen
    out, error = compare(implementation, args, options)
    assert error < 2e-5
    assert not np.asarray(out[3]).any()
    other = jax.tree.map(lambda x: x.at[:, 0].add(3) if x.shape[1] == seen.shape[3] else x, args)
    np.testing.assert_array_equal(compare(implementation, other, options)[0], out)


def test_the_kernel_has_no_races_and_does_not_read_behind_the_last_key(monkeypatch):
    races = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan")
    races, watched = {"interpret": races}, watch_races(monkeypatch)
    monkeypatch.setitem(IMPLEMENTATIONS, "races", (kernel.attention, races))
    args, options = case_of("ring, batch 5", batch=2, mask=(2, 1, 1, 21))
    assert compare("races", args, options)[1] < 2e-5
    assert [kernel.races_found for kernel in watched] == [False]


@pytest.mark.parametrize("name", ["decode", "pallas_tpu_decode"])
def test_what_is_not_taken_is_refused_in_a_line(name, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")

    def refuses(queries=1, keys=64, dtype=jnp.float32):
        q, k = (jax.ShapeDtypeStruct((2, n, 32, 128), dtype) for n in (queries, keys))
        return dispatch.refusal(name, q, k, k, None, None, causal=False, window=None, mask=None, groups=1)

    assert refuses() is None
    assert "one query, found 2" in refuses(queries=2)
    if name == "pallas_tpu_decode":
        assert "float16" in refuses(dtype=jnp.float16)
        assert "VMEM" in refuses(keys=2**20)
    args, options = make_case(3, 8)
    with pytest.raises(ValueError, match=f"{name} does not take this: it takes one query, found 3"):
        dcmha.attention(*args, **options, implementation=name)


# Heads, width, keys, batch, and whether it composes: layers of presets in dcvit/models/presets.py, and others.
COMPILED = {
    "v5e:2x2": [(16, 64, 2048, 64, True), (32, 80, 256, 1, True), (32, 128, 2048, 1, False)],
    "v6e:2x2": [(32, 128, 2048, 2, True), (16, 64, 600, 1, True)],
    "v5p:2x2x1": [(32, 80, 2048, 2, True)],
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_the_tpu_compiler_takes_the_models_shapes_and_copies_no_cache():
    compile_all("test_decode_step", COMPILED)


def compile_for(topology, heads, width, keys, batch, composed):
    """Compiles a step for one chip of a topology, with keys and values as a cache has them; in a process of its own."""
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_compilation_cache", False)
    mesh = Mesh(np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1]), ("x",))

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def step(q, k, v, weights, mask):
        k, v = (x.reshape(batch, keys, heads, width) for x in (k, v))
        options = dict(causal=False, window=None, mask=mask, groups=1)
        assert dispatch.choose(q, k, v, weights, weights, **options) == "pallas_tpu_decode"
        return kernel.attention(q, k, v, weights, weights, **options, scale=width**-0.5)

    q, k = array(batch, 1, heads, width), array(batch, keys, heads * width)
    sides = [[array(batch, n, 2, heads)] * 2 + [array(batch, n, heads)] for n in (1, keys)]
    weights = ComposeWeights(*sides[0], *sides[1]) if composed else None
    with jax.set_mesh(mesh):
        mask = array(batch, 1, 1, keys, dtype=jnp.bool_)
        compiled = jax.jit(step).lower(q, k, k, weights, mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * 2 * k.size, "the cache is copied"
    print("compiled", topology, heads, width, keys, batch, composed, flush=True)
