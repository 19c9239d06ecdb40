"""Blockwise attention: correct with several blocks, and memory that does not grow with H×T×S."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import on_arrays, output_and_gradients, random_case, relative_errors, worst
from marks import exhaustive

from dcvit.dcmha import ComposeWeights, attention, device
from dcvit.dcmha.backends.xla import blockwise, reference
from dcvit.dcmha.inputs import Options

CASES = {
    "causal, more keys, groups, shared keys": {
        "queries": 33, "keys": 90, "groups": 2, "key_heads": 2, "causal": True, "branches": "qkpgs",
    },
    "window, fewer keys, key padding": {"queries": 70, "keys": 33, "window": 9, "mask": (2, 1, 1, 33)},
    "window of 1, mask, query-wise": {"queries": 37, "window": 1, "mask": (2, 1, 37, 37), "branches": "qpg"},
    "more keys, fully masked rows, static": {"queries": 33, "keys": 90, "mask": (1, 1, 33, 1), "branches": "s"},
    "plain": {"queries": 50, "window": 20, "branches": None},
    "segments, shared keys, groups": {
        "queries": 330, "causal": True, "segments": 6, "groups": 2, "key_heads": 2, "branches": "qkpgs",
    },
    "last queries, causal": {"queries": 70, "keys": 330, "first_query": 260, "causal": True},
    "last queries, window": {"queries": 70, "keys": 90, "first_query": 20, "window": 20, "branches": "qkpgs"},
    "last queries, causal, segments, shared keys": {
        "queries": 140, "keys": 400, "first_query": 260, "causal": True, "segments": 4, "key_heads": 2,
    },
    "composed window, groups": {
        "queries": 190, "causal": True, "compose_window": 30, "groups": 2, "key_heads": 2, "branches": "qkpgs",
    },
    "composed window, window, mask": {
        "queries": 190, "window": 90, "compose_window": 7, "mask": (1, 1, 1, 190), "post": None,
    },
    "composed window, last queries, segments": {
        "queries": 140, "keys": 400, "first_query": 260, "causal": True, "compose_window": 50, "segments": 4,
        "branches": None, "post": "qkpg",
    },
    "segments, more keys, mask": {"queries": 70, "keys": 333, "segments": 5, "mask": (2, 1, 1, 333), "branches": "kp"},
}  # fmt: skip
# Together, these contain every branch, a mask, more and fewer keys, and shared keys.
DEFAULT = (
    "causal, more keys, groups, shared keys", "window, fewer keys, key padding", "segments, shared keys, groups",
    "last queries, window", "last queries, causal, segments, shared keys", "composed window, groups",
    "composed window, last queries, segments",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_device(monkeypatch):
    """The loop over examples, as on one device; tests have eight."""
    monkeypatch.setattr(device, "splits_arrays", lambda: False)


def run(case, dtype=jnp.float32):
    """Output and gradients of blockwise attention in `dtype`, and those of the reference in float32."""
    args, options = random_case(**{"heads": 4, "batch": 2, "rank": 1, **case})
    layout = Options(options["causal"], options["window"])
    group = blockwise.GROUP if "segments" in options else None
    size = blockwise.BlockSize(16, 16)
    runs = blockwise.runs(args[0].shape[1], args[1].shape[1], layout, size, group)
    assert sum(run.blocks for run in runs) > 2
    narrow = jax.tree.map(lambda x: x.astype(dtype), args)
    found = output_and_gradients(on_arrays(blockwise.run), narrow, options)
    assert all(x.dtype == dtype for x in jax.tree.leaves(found))
    return found, output_and_gradients(on_arrays(reference.run), args, options)


def test_a_causal_layer_that_exceeds_a_block_skips_keys():
    causal = Options(causal=True)
    for size, length in ((blockwise.COMPOSED, 256), (blockwise.PLAIN, 320)):
        assert length * length > size.scores
        computed = sum(run.blocks * run.rows * run.keys for run in blockwise.runs(length, length, causal, size))
        assert computed <= 0.8 * length * length


def test_padded_queries_have_the_blocks_of_the_queries():
    """The backward pass divides the padded queries."""
    for queries in (1, 15, 33, 36, 70, 1000):
        for keys in (40, 70, 2222, 2600):
            for options in (Options(), Options(causal=True), Options(window=50)):
                for size in (blockwise.PLAIN, blockwise.COMPOSED):
                    runs = blockwise.runs(queries, keys, options, size)
                    end = runs[-1].first + runs[-1].blocks * runs[-1].rows
                    assert blockwise.runs(end, keys, options, size) == runs


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 queries."""
    monkeypatch.setattr(blockwise, "PLAIN", blockwise.BlockSize(16, 16))
    monkeypatch.setattr(blockwise, "COMPOSED", blockwise.BlockSize(16, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.exhaustive) for name in CASES]
)
def test_several_blocks_equal_the_reference_in_output_and_gradients(name, small_blocks):
    errors = relative_errors(*run(CASES[name]))
    assert worst(errors) < 2e-5, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ({"queries": 700, "causal": True, "segments": 9}, [256, 512, 700]),
        exhaustive({"queries": 90, "keys": 700, "segments": 3}, [256, 512, 700]),
        exhaustive({"queries": 500, "window": 300, "segments": 4}, [256, 363]),
    ],
)
def test_segments_equal_the_reference_to_rounding(x64, case, sizes):
    case = {"heads": 2, "batch": 2, "rank": 1, "dtype": jnp.float64, **case}
    args, options = random_case(**case)
    most = min(args[1].shape[1], (options["window"] or 10**6) + blockwise.GROUP - 1)
    assert blockwise.document_sizes(most) == sizes
    found, right = (output_and_gradients(on_arrays(f), args, options) for f in (blockwise.run, reference.run))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert x.dtype == jnp.float64
        assert float(jnp.abs(x - y).max()) <= 1e-12 * float(jnp.abs(y).max())


def test_blocks_without_a_common_document_are_not_computed(monkeypatch):
    """Count the blocks that a program computes, and their keys."""
    computed, forward = [], blockwise.forward_block

    def count(block, options):
        jax.debug.callback(lambda _: computed.append(block.inputs.k.shape[1]), block.start["q"])
        return forward(block, options)

    monkeypatch.setattr(blockwise, "forward_block", count)
    tokens, ids = 2048, jnp.repeat(jnp.arange(8, dtype=jnp.int32), 256)[None]
    q = jnp.ones((1, tokens, 1, 4))
    for segments, most in ((ids, 256), (jnp.zeros_like(ids), tokens)):
        computed.clear()
        jax.block_until_ready(attention(q, q, q, segments=segments, implementation="blockwise"))
        jax.effects_barrier()
        rows = blockwise._rows_of_group(blockwise.GROUP, most, blockwise.PLAIN)
        assert computed == [most] * (tokens // rows)
    computed.clear()
    none = ids, ids + 10
    assert not attention(q, q, q, segments=none, implementation="blockwise").any()
    assert not computed


@pytest.mark.slow
def test_examples_that_are_computed_at_once_have_the_bits_of_one_after_the_other(monkeypatch):
    args, options = random_case(12, heads=4, batch=6, groups=2, branches="qkpgs", mask=(6, 1, 12, 12))

    def compute(count):
        monkeypatch.setattr(blockwise, "SCORES_AT_ONCE", count * 4 * 12 * 12)
        blockwise._arrange_and_attend.clear_cache()
        return output_and_gradients(on_arrays(blockwise.run), args, options)

    one_by_one = compute(1)
    for count in (3, 6):
        assert worst(relative_errors(compute(count), one_by_one)) == 0


@pytest.mark.slow
def test_gradients_of_a_batch_by_vmap_are_those_of_each(small_blocks):
    """Also of weights that all elements of the batch share."""
    (q, *others), options = random_case(24, heads=4, batch=2, causal=True, mask=(2, 1, 24, 24))
    rows = jnp.stack([q, q / 2])

    def loss(q, others):
        return jnp.sum(jnp.sin(on_arrays(blockwise.run)(q, *others, **options)))

    gradients = jax.jit(jax.grad(lambda rows, others: jnp.sum(jax.vmap(loss, (0, None))(rows, others)), (0, 1)))
    found = gradients(rows, others)
    first, second = (jax.jit(jax.grad(loss, (0, 1)))(row, others) for row in rows)
    expected = jnp.stack([first[0], second[0]]), jax.tree.map(jnp.add, first[1], second[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)


@pytest.mark.slow
def test_bfloat16_is_close_to_float32(small_blocks):
    found, right = run({"queries": 50, "branches": "qkgs"}, jnp.bfloat16)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        error = jnp.linalg.norm((x.astype(jnp.float32) - y).ravel()) / jnp.linalg.norm(y.ravel())
        assert float(error) < 2e-2


def test_a_scale_does_not_exceed_the_range_of_float16():
    """scale·q is 90,000."""
    (q, k, v, *_), options = random_case(6, branches=None, dtype=jnp.float16)
    args = (jnp.sign(q) * 300, k / 8192, v)
    found, right = (on_arrays(f)(*args, **{**options, "scale": 300.0}) for f in (blockwise.run, reference.run))
    assert np.isfinite(right).all()
    np.testing.assert_allclose(found.astype(jnp.float32), right.astype(jnp.float32), atol=2e-3)


def test_the_scale_is_not_rounded_to_the_dtype_of_the_queries():
    """The scale by least squares from many weights of two keys; 0.3 in bfloat16 is larger by 0.26 %."""
    q = jnp.linspace(-3, 3, 400).astype(jnp.bfloat16).reshape(1, 400, 1, 1)
    k = jnp.asarray([1, 0], jnp.bfloat16).reshape(1, 2, 1, 1)
    weight = np.float64(attention(q, k, k, scale=0.3, implementation="blockwise")).ravel()
    logits, queries = np.log(weight / (1 - weight)), np.float64(q).ravel()
    assert abs(logits @ queries / (queries @ queries) / 0.3 - 1) < 5e-4


@functools.cache
def temporary_bytes(implementation, length, window=None):
    """Temporary memory of the compiled gradient of a causal layer of DCFormer++-6.9B, with H = 32 and D = 128."""
    struct = lambda *shape: jax.ShapeDtypeStruct((1, length, *shape), jnp.float32)  # noqa: E731
    weights = ComposeWeights(*(struct(2, 32), struct(2, 32), struct(32)) * 2)

    def loss(*arguments):
        return jnp.sum(attention(*arguments, causal=True, window=window, implementation=implementation) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))
    arguments = (*[struct(32, 128)] * 3, weights, weights)
    return gradient.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.exhaustive
def test_memory_of_a_local_layer_is_linear_in_its_length():
    assert temporary_bytes("blockwise", 8192, window=256) <= 4.5 * temporary_bytes("blockwise", 2048, window=256)
