"""The TPU kernels: interpreted, against the reference; and through the real compiler for the models' shapes."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha import ComposeWeights, reference
from dcvit.dcmha.pallas_tpu import api

CASES = {  # small, since each access to VMEM is a call of the interpreter
    "images": {"queries": 10, "keys": 10, "batch": 2},
    "cross, groups, padding": {"queries": 12, "keys": 21, "heads": 4, "groups": 2, "mask": (1, 1, 1, 21)},
    "causal, shared keys, static": {"queries": 8, "keys": 8, "key_heads": 1, "causal": True, "branches": "qkpgs"},
    "blocks, causal, parts": {"queries": 132, "keys": 40, "batch": 2, "causal": True, "tile": (128, 16, 128)},
    "blocks, window": {"queries": 132, "keys": 132, "window": 20, "tile": (128, 48), "branches": "qg"},
    "blocks, masks, static": {
        "queries": 12, "keys": 40, "batch": 2, "mask": (2, 1, 12, 40), "tile": (128, 16), "branches": "s",
    },
}  # fmt: skip
# On two cores, as a chip may have; on one nothing would race.
INTERPRETERS = {"races": pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2), "plain": True}


def make_case(
    queries, keys, heads=2, key_heads=None, width=8, batch=1, branches="qkpg", post=None, groups=1, rank=2, mask=None,
    tile=None, dtype=jnp.float32, **options,
):  # fmt: skip
    """Arguments of `attention` in `dtype`, and its options."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(batch, queries, heads, width))
    k, v = rng.normal(size=(2, batch, keys, key_heads or heads, width))
    sizes = dict(batch=batch, queries=queries, keys=keys, heads=heads, rank=rank, groups=groups)
    weights = [b and oracle.random_weights(rng, b, **sizes) for b in (branches, post or branches)]
    as_array = lambda x: x if x is None else jnp.asarray(x, dtype)  # noqa: E731
    composed = [w and ComposeWeights(**{name: as_array(x) for name, x in w.items()}) for w in weights]
    options = {"causal": False, "window": None, "groups": groups, "scale": 0.3, **options}
    options["mask"] = None if mask is None else jnp.asarray(rng.random(mask) < 0.6)
    return (as_array(q), as_array(k), as_array(v), *composed), options


def outputs(attention, args, options):
    """The output and the gradients of all arguments."""
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=args[0].shape), jnp.float32)

    def both(*args):
        out, vjp = jax.vjp(lambda *a: attention(*a, **options), *args)
        return out, vjp(cotangent.astype(out.dtype))

    return jax.jit(both)(*args)


def errors(found, expected):
    """The largest error of each array relative to its largest number, by name."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree_util.tree_leaves_with_path(expected), strict=True)
    return {
        jax.tree_util.keystr(path): float(np.abs(np.float32(x) - np.float32(y)).max() / np.abs(np.float32(y)).max())
        for (path, x), (_, y) in pairs
    }


def worst(found):
    """The largest of `errors`, and no number where one is none."""
    return np.max([*found.values()])


def compare(monkeypatch, case, interpret, dtype=jnp.float32, **changes):
    case = {**case, **changes}
    tile = case.pop("tile", None)
    if tile:
        plan = api.plan
        part = {"part": tile[2]} if len(tile) > 2 else {}
        monkeypatch.setattr(
            api, "plan", lambda *a, **k: plan(*a, **k)._replace(block_q=tile[0], block_k=tile[1], **part)
        )
    args, options = make_case(**case, dtype=dtype)
    found = outputs(api.attention, args, {**options, "interpret": interpret})
    assert found[0].dtype == dtype
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    return errors(found, outputs(reference.attention, wide, options))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_forward_and_backward_without_races(monkeypatch, name):
    watched = watch_races(monkeypatch)
    found = compare(monkeypatch, CASES[name], INTERPRETERS["races"])
    assert worst(found) < 2e-5, found
    assert len(watched) == (3 if "blocks" in name else 2) + ("parts" in name)
    assert not any(kernel.races_found for kernel in watched)


def watch_races(monkeypatch):
    """A list to which each kernel that is interpreted from now on adds what it finds of races."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    watched, state = [], interpret_pallas_call.RaceDetectionState
    monkeypatch.setattr(
        interpret_pallas_call, "RaceDetectionState", lambda **options: watched.append(state(**options)) or watched[-1]
    )
    return watched


def test_a_race_would_be_seen(monkeypatch):
    """Two cores that write to one block."""

    def kernel(x, out):
        out[...] = x[0]

    watched = watch_races(monkeypatch)
    pl.pallas_call(
        kernel, grid=(2,), in_specs=[pl.BlockSpec((1, 8, 128), lambda i: (i, 0, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)), out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)), interpret=INTERPRETERS["races"],
    )(jnp.ones((2, 8, 128)))  # fmt: skip
    assert [kernel.races_found for kernel in watched] == [True]


@pytest.mark.parametrize(
    "case", [{"queries": 12, "keys": 70}, {"queries": 12, "keys": 70, "tile": (128, 48), "branches": "kp"}]
)
def test_several_strips_in_a_step_are_those_of_one(monkeypatch, case):
    """As a TPU runs them: three strips of 8 keys a step, of which some hold no key."""
    monkeypatch.setattr(api, "unrolled", lambda heads, keys: 3)
    monkeypatch.setattr(api, "by_platform", lambda f, case, inputs, interpret: f(case, inputs, interpret))
    found = compare(monkeypatch, {**case, "mask": (1, 1, 1, 70)}, INTERPRETERS["plain"])
    assert worst(found) < 2e-5, found


@pytest.mark.parametrize("branches", ["qp", "kg", "qgs", None])
def test_every_branch_can_be_absent(monkeypatch, branches):
    found = compare(monkeypatch, {"queries": 8, "keys": 8}, INTERPRETERS["races"],
                    branches=branches, rank=3)  # fmt: skip
    assert worst(found) < 2e-5, found


@pytest.mark.parametrize("name", ["images", "blocks, causal, parts"])
def test_bfloat16_is_close(monkeypatch, name):
    found = compare(monkeypatch, CASES[name], INTERPRETERS["races"], jnp.bfloat16)
    assert worst(found) < 2e-2, found


def test_a_query_that_sees_nothing_yields_zeros_and_finite_gradients():
    args, options = make_case(10, 10)
    options["mask"] = jnp.ones((1, 1, 10, 10), bool).at[:, :, 3].set(False)
    out, grads = outputs(api.attention, args, {**options, "interpret": INTERPRETERS["races"]})
    assert not np.asarray(out[:, 3]).any()
    assert np.asarray(out[:, 4]).any()
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(grads))


def test_off_a_tpu_the_kernel_is_interpreted_without_being_asked():
    args, options = make_case(8, 8, branches="qg")
    out = jax.jit(lambda *a: api.attention(*a, **options))(*args)
    np.testing.assert_allclose(out, reference.attention(*args, **options), atol=1e-5)


def test_what_cannot_be_taken_is_refused_in_a_line():
    def refuses(dtype=jnp.float32, heads=4, width=64):
        q = jax.ShapeDtypeStruct((1, 4096, heads, width), dtype)
        return api.refuses(q, q, q, None, None, causal=True, window=None, mask=None, groups=1)

    assert refuses() is None
    assert "float16" in refuses(jnp.float16)
    assert "VMEM" in refuses(heads=512, width=128)


def compile_all(module, compiled):
    """Calls `compile_for` of a test module for each shape of each topology, in a process of its own."""
    cases = [(topology, *shape) for topology, shapes in compiled.items() for shape in shapes]
    environment = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                   "TPU_WORKER_HOSTNAMES": "localhost", "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
    script = f"import json, sys, {module} as t; [t.compile_for(*case) for case in json.loads(sys.argv[1])]"
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(cases)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("compiled") == len(cases)


# Heads, width, tokens and window (0: causal over all) of ViT variants and of presets in dcvit/models/presets.py. Those
# of all: scripts/compile_kernels.py.
COMPILED = {
    "v5e:2x2": [(6, 64, 197, None), (16, 72, 196, None), (16, 64, 2048, 256)],
    "v6e:2x2": [(6, 64, 196, None)],
    "v5p:2x2x1": [(16, 64, 2048, 0)],
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_the_tpu_compiler_takes_the_models_shapes():
    """Forward and backward in bfloat16; what passes the interpreter can still fail here."""
    compile_all("test_pallas_tpu", COMPILED)


def compile_for(topology, heads, width, tokens, window):
    """Compiles attention and its gradient for one chip of a topology; in a process of its own."""
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_compilation_cache", False)
    mesh = Mesh(np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1]), ("x",))

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))

    q = array(1, tokens, heads, width)
    weights = ComposeWeights(*[array(1, tokens, 2, heads), array(1, tokens, 2, heads), array(1, tokens, heads)] * 2)
    options = dict(causal=window == 0, window=window or None, mask=None, groups=1, scale=width**-0.5)

    def gradient(do, *args):
        return jax.vjp(lambda *a: api.attention(*a, **options), *args)[1](do)

    with jax.set_mesh(mesh):
        assert api.refuses(q, q, q, weights, weights, **{n: options[n] for n in options if n != "scale"}) is None
        jax.jit(gradient).lower(q, q, q, q, weights, weights).compile()
    print("compiled", topology, heads, width, tokens, window, flush=True)
