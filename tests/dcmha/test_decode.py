"""Attention of one query, in XLA and in the TPU kernel, compared with the reference; and the kernel's compilation."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import on_arrays, output_and_gradients, random_case, relative_errors, worst
from marks import exhaustive
from pallas_checks import DETECT_RACES, compile_in_subprocess, one_chip, watch_races, weights_like

from dcvit import dcmha
from dcvit.dcmha import plan
from dcvit.dcmha.backends.tpu import decode as kernel
from dcvit.dcmha.backends.xla import decode, reference
from dcvit.dcmha.inputs import Inputs, UnsupportedError, make_call
from dcvit.dcmha.selection import Selection, selecting

CASES = {
    "one key": {"keys": 1},
    "masks, batch 5": {"keys": 21, "batch": 5, "mask": (5, 1, 1, 21)},
    "shared mask": {"keys": 12, "batch": 2, "mask": (1, 1, 1, 12), "branches": "qg", "post": "kp"},
    "groups, shared keys": {"keys": 33, "heads": 8, "key_heads": 2, "groups": 2, "branches": "qkpgs"},
    "one key head, plain": {"keys": 16, "heads": 4, "key_heads": 1, "branches": None},
    "static": {"keys": 9, "heads": 4, "branches": "s", "mask": (1, 1, 1, 9)},
    "key-wise, rank 3": {"keys": 40, "branches": "kpg", "rank": 3},
    "window": {"keys": 5, "branches": "g", "window": 2},
    "pre only": {"keys": 18, "branches": "qkg", "post": None},
    "post only": {"keys": 18, "branches": None, "post": "qkpg"},
}
IMPLEMENTATIONS = {
    "XLA": (on_arrays(decode.run), {}),
    "kernel": (on_arrays(kernel.run), {"interpret": True}),
}
IN_EXHAUSTIVE = {  # covered by other cases in the default suite
    "kernel": ("one key", "shared mask", "static", "key-wise, rank 3", "window", "pre only", "post only"),
    "XLA": ("shared mask", "masks, batch 5", "one key head, plain", "pre only"),
}


def cases(implementations):
    """Every case, of which `IN_EXHAUSTIVE` has those of the exhaustive suite."""
    for name in CASES:
        for implementation in implementations:
            moved = name in IN_EXHAUSTIVE[implementation]
            yield pytest.param(name, implementation, marks=[pytest.mark.exhaustive] if moved else [])


@functools.partial(jax.jit, static_argnames=("causal", "window", "groups", "scale"))
def expected(*args, **options):
    return on_arrays(reference.run)(*args, **options)


def compare(implementation, *cases, **options):
    """Return the output of each of some arguments, and its largest error relative to the reference's largest value."""
    attention, more = IMPLEMENTATIONS[implementation]
    attend = jax.jit(lambda mask, *a: attention(*a, **options | {"mask": mask}, **more))
    for args in cases:
        out = attend(options["mask"], *args)
        assert out.dtype == args[0].dtype
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
        yield out, worst(relative_errors(out, expected(*wide, **options)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(kernel, "BLOCKS", (16,))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "implementation"), list(cases(IMPLEMENTATIONS)))
def test_output_equals_the_reference(name, implementation):
    args, options = random_case(1, **CASES[name])
    ((_, error),) = compare(implementation, args, **options)
    assert error < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["groups, shared keys", *map(exhaustive, ("masks, batch 5", "one key head, plain"))])
def test_bfloat16_is_close_to_float32(name, implementation):
    args, options = random_case(1, **CASES[name], dtype=jnp.bfloat16)
    ((_, error),) = compare(implementation, args, **options)
    assert error < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention"),
    [("groups, shared keys", on_arrays(decode.run)), ("static", on_arrays(kernel.run))],
)
def test_gradients_equal_the_reference(name, attention):
    """The kernel has the gradient of the XLA implementation, which computes it on every platform."""
    args, options = random_case(1, **CASES[name])
    right = output_and_gradients(on_arrays(reference.run), args, options)
    errors = relative_errors(output_and_gradients(attention, args, options), right)
    assert worst(errors) < 2e-5, errors


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masked_keys_have_no_effect_and_a_fully_masked_example_is_zero(implementation):
    args, options = random_case(1, **CASES["masks, batch 5"])
    mask = options["mask"].at[3].set(False).at[..., 0].set(False)
    options["mask"] = mask
    other = jax.tree.map(lambda x: x.at[:, 0].add(3) if x.shape[1] == mask.shape[3] else x, args)
    (out, error), (changed, _) = compare(implementation, args, other, **options)
    assert error < 2e-5
    assert not np.asarray(out[3]).any()
    np.testing.assert_array_equal(changed, out)


@pytest.mark.slow
def test_the_kernel_has_no_races_and_does_not_read_after_the_last_key(monkeypatch):
    """Memory after the last key is NaN in the interpreter that detects races."""
    watched = watch_races(monkeypatch)
    monkeypatch.setitem(IMPLEMENTATIONS, "races", (on_arrays(kernel.run), {"interpret": DETECT_RACES}))
    args, options = random_case(1, **CASES["masks, batch 5"] | {"batch": 2, "mask": (2, 1, 1, 21)})
    ((_, error),) = compare("races", args, **options)
    assert error < 2e-5
    assert [kernel.races_found for kernel in watched] == [False]


@pytest.mark.parametrize(
    ("attention", "change", "message"),
    [
        (on_arrays(decode.run), {"queries": 2}, "one query, found 2"),
        (on_arrays(kernel.run), {"queries": 2}, "one query, found 2"),
        (on_arrays(kernel.run), {"dtype": jnp.float16}, "float16"),
        (on_arrays(kernel.run), {"keys": 2**20}, "VMEM"),
    ],
)
def test_unsupported_cases_raise_a_reason(attention, change, message):
    sizes = {"queries": 1, "keys": 64, "dtype": jnp.float32, **change}
    q, k = (jax.ShapeDtypeStruct((2, sizes[name], 32, 128), sizes["dtype"]) for name in ("queries", "keys"))
    options = dict(causal=False, window=None, mask=None, groups=1, scale=1.0)
    with pytest.raises(UnsupportedError, match=message):
        jax.eval_shape(lambda q, k: attention(q, k, k, None, None, **options), q, k)


# Heads, dimensions, keys, batch, and whether it composes: layers of presets in dcvit/models/presets.py, and others.
COMPILED = {
    "v5e:2x2": [(16, 64, 2048, 64, True), (32, 128, 2048, 1, False)],
    "v6e:2x2": [(16, 64, 600, 1, True)],
    "v5p:2x2x1": [(32, 80, 2048, 2, True)],
}


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_the_tpu_compiler_accepts_the_shapes_of_the_models_and_copies_no_cache():
    compile_in_subprocess("test_decode", COMPILED)


def compile_for(topology, heads, head_dim, keys, batch, composed):
    """Compile a step of decoding for one chip of a topology, with keys and values in the layout of a cache.

    Called in a process of its own. The automatic choice must be the kernel.
    """
    mesh, array = one_chip(topology)

    def step(q, k, v, weights, mask):
        k, v = (x.reshape(batch, keys, heads, head_dim) for x in (k, v))
        assert plan.decide(make_call(Inputs(q, k, v, weights, weights, mask))) == "pallas_tpu_decode"
        return dcmha.attention(q, k, v, weights, weights, mask=mask)

    q, k = array(batch, 1, heads, head_dim), array(batch, keys, heads * head_dim)
    weights = weights_like(array, batch, 1, keys, heads) if composed else None
    with jax.set_mesh(mesh), selecting(Selection("trust")):
        mask = array(batch, 1, 1, keys, dtype=jnp.bool_)
        compiled = jax.jit(step).lower(q, k, k, weights, mask).compile()
    assert "dcmha_decode" in compiled.as_text(), "the kernel is not used"
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * 2 * k.size, "the cache is copied"
    print("compiled", topology, heads, head_dim, keys, batch, composed, flush=True)
