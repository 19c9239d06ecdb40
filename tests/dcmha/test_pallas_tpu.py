"""The TPU kernels: interpreted, compared with the reference; lowered for a TPU; and compiled by the real compiler."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import on_arrays, output_and_gradients, random_case, relative_errors, worst
from jax.experimental.pallas import tpu as pltpu
from pallas_checks import DETECT_RACES, compile_in_subprocess, one_chip, watch_races, weights_like

from dcvit.dcmha.backends.tpu import api, tiling
from dcvit.dcmha.backends.xla import reference
from dcvit.dcmha.inputs import Inputs, Options, UnsupportedError

# Small, since each access to VMEM is a callback of the interpreter. `block` is (Bq, Bk) where a chip would use one tile
# or larger ones, and `queries_per_pass` of the backward pass; `tiling` chooses everything else.
CASES = {
    "cross, groups, padding": {
        "queries": 12, "keys": 21, "heads": 4, "groups": 2, "mask": (1, 1, 1, 21), "branches": "kg", "post": "qkp",
        "rank": 1, "family": "matrix",
    },
    "blocks, masks, static": {
        "queries": 12, "keys": 40, "batch": 2, "mask": (2, 1, 12, 40), "branches": "s", "block": (128, 32),
        "family": "matrix",
    },
    "blocks, mixed, causal, passes, shared keys": {
        "queries": 132, "keys": 40, "heads": 4, "key_heads": 2, "groups": 2, "causal": True, "branches": "qkpgs",
        "post": "kgs", "rank": 1, "block": (128, 32), "queries_per_pass": 128, "family": "matrix",
    },
    "interleaved examples": {
        "queries": 9, "keys": 11, "batch": 8, "head_dim": 64, "mask": (8, 1, 9, 11), "branches": "qkp", "post": "qkgs",
        "rank": 1, "family": "interleaved",
    },
    "interleaved, causal, static, groups, shared keys": {
        "queries": 9, "batch": 8, "heads": 8, "key_heads": 4, "head_dim": 32, "groups": 2, "causal": True,
        "branches": "qkpgs", "post": "kgs", "rank": 1, "family": "interleaved",
    },
    "blocks, mixed, causal, segments, last queries, passes": {
        "queries": 140, "keys": 300, "batch": 2, "first_query": 160, "causal": True, "segments": 3, "branches": "kpg",
        "post": "qkp", "rank": 1, "block": (128, 32), "queries_per_pass": 128, "family": "matrix",
    },
    "blocks, mask, window, segments, last queries": {
        "queries": 12, "keys": 40, "first_query": 28, "mask": (1, 1, 12, 40), "window": 20, "segments": 3,
        "branches": "qkpgs", "post": "qkp", "rank": 1, "block": (128, 32), "family": "matrix",
    },
    "odd heads": {
        "queries": 12, "keys": 70, "heads": 3, "mask": (1, 1, 12, 70), "branches": "qkps", "post": "kg", "rank": 1,
        "block": (128, 64), "family": "matrix",
    },
    "blocks, composed window, groups, static, shared keys, last queries": {
        "queries": 12, "keys": 150, "heads": 4, "key_heads": 2, "groups": 2, "first_query": 138, "causal": True,
        "compose_window": 40, "branches": "qkpgs", "post": "kgs", "rank": 1, "block": (128, 32), "family": "matrix",
    },
    "blocks, composed window, segments, last queries, passes": {
        "queries": 140, "keys": 200, "first_query": 60, "causal": True, "compose_window": 50, "segments": 2,
        "branches": "qp", "post": "kpg", "rank": 1, "block": (128, 64), "queries_per_pass": 128, "family": "matrix",
    },
    "blocks, composed window, window, mask": {
        "queries": 140, "window": 100, "compose_window": 20, "mask": (1, 1, 140, 140), "branches": "kpg",
        "post": "qpgs", "rank": 1, "block": (128, 32), "family": "matrix",
    },
    "plain": {"queries": 8, "branches": None, "family": "matrix"},
    "query-wise, rank 3": {"queries": 8, "branches": "qp", "post": "qgs", "rank": 3, "family": "matrix"},
}  # fmt: skip
DEFAULT = {"interleaved examples", "blocks, mask, window, segments, last queries"}  # one of each family


def set_config(monkeypatch, family, block=None, **changes):
    """Replace the choice of blocks and some fields of a configuration, and check its family."""
    make_config = tiling.make_config

    def changed(*args):
        config = make_config(*args)._replace(**changes)
        assert config.family == family
        return config

    monkeypatch.setattr(tiling, "make_config", changed)
    if block:
        monkeypatch.setattr(tiling, "block_sizes", lambda sizes: [block])


def run(case, interpret, dtype=jnp.float32, **changes):
    """Output and gradients of the kernels, and those of the reference in float32.

    `changes` are of the configuration: `rounded` rounds the operands of products, as a TPU does.
    """
    case = dict(case)
    changes |= {name: case.pop(name) for name in ("family", "block", "queries_per_pass") if name in case}
    args, options = random_case(**case, dtype=dtype)
    if options["mask"] is not None:  # the last query attends to no key
        options["mask"] = options["mask"].at[:, :, 3:4].set(False)
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_config(monkeypatch, **changes)
        found = output_and_gradients(on_arrays(api.run), args, {**options, "interpret": interpret})
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    assert found[0].dtype == dtype
    return found, output_and_gradients(on_arrays(reference.run), wide, options)


def check(monkeypatch, name, tolerance, dtype=jnp.float32, **changes):
    """Compare with the reference, without races on two cores; return the output and the gradients."""
    watched, case = watch_races(monkeypatch), CASES[name]
    found, expected = run(case, DETECT_RACES, dtype, **changes)
    errors = relative_errors(found, expected)
    assert worst(errors) < tolerance, errors
    is_simple = case["family"] == "interleaved" or name == "plain"  # others have delta, and matrices in each direction
    assert len(watched) == (2 if is_simple else 5) + ("passes" in name)
    assert not any(kernel.races_found for kernel in watched)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.weekly) for name in CASES]
)
def test_kernels_have_no_races_on_two_cores_and_equal_the_reference(monkeypatch, name):
    out, _ = check(monkeypatch, name, 2e-5)
    if name == "interleaved examples":  # a query has no key
        assert not np.asarray(out[:, 3]).any()
        assert np.asarray(out[:, 4]).any()


@pytest.mark.weekly
@pytest.mark.parametrize("name", sorted(DEFAULT))
@pytest.mark.parametrize(("dtype", "changes"), [(jnp.bfloat16, {}), (jnp.float32, {"rounded": True})])
def test_kernels_with_products_of_bfloat16_have_no_races_and_are_close_to_float32(monkeypatch, name, dtype, changes):
    """All operations that are compiled for the models."""
    check(monkeypatch, name, 2e-2, dtype, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "branches", "first"),
    [
        pytest.param("matrix", "qkp", 16, id="MXU"),
        pytest.param("matrix", "qp", 21, id="VPU", marks=pytest.mark.weekly),
        pytest.param("interleaved", "qkp", 16, id="interleaved", marks=pytest.mark.weekly),
    ],
)
def test_nan_in_a_key_spreads_in_its_block_only_if_the_matrix_unit_mixes_heads(monkeypatch, family, branches, first):
    """Key 21 is NaN; queries attend to it from 21 on, and to its block of 8 or 16 keys from 16 on."""
    sizes = {"batch": 8, "head_dim": 64} if family == "interleaved" else {}
    (q, k, v, pre, post), options = random_case(40, causal=True, rank=1, branches=branches, **sizes)
    set_config(monkeypatch, family, None if family == "interleaved" else (128, 32))
    watch_races(monkeypatch)
    k = k.at[0, 21, 0].set(jnp.nan)
    out = on_arrays(api.run)(q, k, v, pre, post, **options, interpret=DETECT_RACES)
    example, query = np.nonzero(np.isnan(out).any((2, 3)))
    assert not example.any()
    np.testing.assert_array_equal(query, np.arange(first, 40))


def test_products_are_rounded_unless_the_precision_of_products_says_otherwise():
    assert tiling.rounds(jnp.float32)
    for precision in ("high", "highest", "float32"):
        with jax.default_matmul_precision(precision):
            assert not tiling.rounds(jnp.float32)
            assert tiling.rounds(jnp.bfloat16)


@pytest.mark.parametrize(("batch", "head_dim", "examples"), [(16, 64, 8), (12, 64, 1), (16, 72, 1)])
def test_examples_are_interleaved_if_batch_and_width_are_complete_registers(batch, head_dim, examples):
    q = jnp.zeros((batch, 196, 6, head_dim))
    config = tiling.make_config(Inputs(q, q, q), Options(), 120 * 2**20)
    assert config.examples == examples
    config = tiling.make_config(Inputs(q, q, q), Options(causal=True, compose_window=100), 120 * 2**20)
    assert config.family == "matrix"


@pytest.mark.weekly
@pytest.mark.parametrize("heads", [18, 40])
def test_matrices_of_several_registers_of_columns_equal_the_reference(heads):
    """18 heads of 8 keys have 144 columns, 40 heads have 320."""
    case = {"queries": 12, "keys": 40, "heads": heads, "branches": "kg", "block": (128, 32), "family": "matrix"}
    errors = relative_errors(*run(case, pltpu.InterpretParams()))
    assert worst(errors) < 2e-5, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branches", "post"),
    [
        ("qkpgs", "qkpg"),
        pytest.param("qkpg", None, marks=pytest.mark.weekly),
        pytest.param(None, "qkpg", marks=pytest.mark.weekly),
        pytest.param("qp", "qpg", marks=pytest.mark.weekly),
    ],
)
def test_a_window_of_composition_equals_the_reference(branches, post):
    """Of four tiles, the first is plain, and the second has pairs inside and outside of the window of composition."""
    case = {
        "queries": 12, "keys": 122, "first_query": 110, "causal": True, "compose_window": 60, "branches": branches,
        "post": post, "rank": 1, "block": (128, 32), "family": "matrix",
    }  # fmt: skip
    errors = relative_errors(*run(case, True))
    assert worst(errors) < 2e-5, errors


@pytest.mark.parametrize(
    ("dtype", "heads", "message"), [(jnp.float16, 4, "float16"), (jnp.float32, 512, "512 heads .* VMEM")]
)
def test_unsupported_cases_raise_a_reason(dtype, heads, message):
    q = jax.ShapeDtypeStruct((1, 4096, heads, 128), dtype)
    options = dict(causal=True, window=None, mask=None, groups=1, scale=1.0)
    with pytest.raises(UnsupportedError, match=message):
        jax.eval_shape(lambda q: on_arrays(api.run)(q, q, q, None, None, **options), q)


def gradient(options, layers=1):
    """A function of the output's cotangent, the arguments and segments that returns the output and all gradients."""

    def gradients(do, *args, segments=None):
        def attend(q, *others):
            for _ in range(layers):
                q = on_arrays(api.run)(q, *others, segments=segments, **options)
            return q

        out, backward = jax.vjp(attend, *args)
        return out, backward(do)

    return gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "dtype"), [(1, jnp.bfloat16), pytest.param(8, jnp.float32, marks=pytest.mark.weekly)]
)
def test_forward_and_backward_are_lowered_to_mosaic_once_for_equal_layers(batch, dtype):
    """Lowering finds operations that the interpreter accepts and Mosaic does not; it needs no TPU."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    q, weights = array(batch, 24, 2, 64), weights_like(array, batch, 24, 24, 2, rank=1)
    options = dict(causal=True, window=None, mask=None, groups=1, scale=0.125)
    traced = jax.jit(gradient(options, layers=2)).trace(q, q, q, q, weights, weights)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == (5 if batch == 1 else 2)


# Heads, dimensions, tokens, window (0: causal over all keys), batch and segments (True) of variants of the ViT, and of
# presets in dcvit/models/presets.py.
COMPILED = {
    "v5e:2x2": [(6, 64, 197, None, 8), (16, 64, 2048, 0, 1, True), (5, 64, 512, 0, 1, True)],
    "v6e:2x2": [(16, 64, 2048, 256, 1)],
    "v5p:2x2x1": [(16, 72, 196, None, 1), (40, 128, 512, 0, 1)],
    "tpu7x:2x2x1": [(6, 64, 196, None, 8)],
}


@pytest.mark.weekly
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_the_tpu_compiler_accepts_the_shapes_of_the_models():
    """Compile forward and backward in bfloat16; a kernel that passes the interpreter can still fail here."""
    compile_in_subprocess("test_pallas_tpu", COMPILED)


def compile_for(topology, heads, head_dim, tokens, window, batch, has_segments=False):
    """Compile attention and its gradient for one chip of a topology; called in a process of its own."""
    mesh, array = one_chip(topology)
    q, weights = array(batch, tokens, heads, head_dim), weights_like(array, batch, tokens, tokens, heads)
    options = dict(causal=window == 0, window=window or None, mask=None, groups=1, scale=head_dim**-0.5)
    with jax.set_mesh(mesh):
        segments = array(batch, tokens, dtype=jnp.int32) if has_segments else None
        jax.jit(gradient(options)).lower(q, q, q, q, weights, weights, segments=segments).compile()
    print("compiled", topology, heads, head_dim, tokens, window, flush=True)
