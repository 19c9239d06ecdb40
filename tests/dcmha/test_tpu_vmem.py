"""The estimated VMEM of the TPU gradient kernels covers all blocks and buffers that they declare."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import call_of
from jax.experimental import pallas as pl

from dcvit.dcmha import ComposeWeights
from dcvit.dcmha.backends.tpu import api, backward_interleaved, tiling
from dcvit.dcmha.inputs import Inputs, Options
from dcvit.dcmha.segments import Segments

LIMIT = 120 * 2**20
ROWS = {4: 8, 2: 16}  # of a register, by the bytes of a number


class DeclaredError(Exception):
    """Raised with the bytes that the kernel declares."""


def in_registers(shape, dtype):
    """Bytes of an array whose last two axes are padded to complete registers."""
    bytes_each = np.dtype(dtype).itemsize
    sizes = [1 if size is None else size for size in (1, *shape)]
    rows, lanes = (-(-size // n) * n for size, n in zip(sizes[-2:], (ROWS[bytes_each], 128), strict=True))
    return math.prod(sizes[:-2]) * rows * lanes * bytes_each


def declared(monkeypatch, q, k, weights, groups, *masks):
    """Bytes of the gradient kernel: two blocks of each array in VMEM, and its buffers."""

    def record(kernel, *, grid_spec, out_shape, name, **options):
        def call(*arrays):
            if name != "dcmha_gradients":
                return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)
            specs = (*grid_spec.in_specs, *grid_spec.out_specs)
            arrays = zip(specs, (*arrays[grid_spec.num_scalar_prefetch :], *out_shape), strict=True)
            blocks = [in_registers(spec.block_shape, x.dtype) for spec, x in arrays if spec.block_shape is not None]
            raise DeclaredError(2 * sum(blocks) + sum(in_registers(x.shape, x.dtype) for x in grid_spec.scratch_shapes))

        return call

    monkeypatch.setattr(pl, "pallas_call", record)
    options = Options(groups=groups)

    def gradient(q, k, v, pre, post, do, *masks):
        return jax.vjp(lambda *x: api.run(call_of(Inputs(*x, *masks), options)), q, k, v, pre, post)[1](do)

    jax.clear_caches()  # a kernel that was traced before would not be recorded
    with pytest.raises(DeclaredError) as found:
        jax.eval_shape(gradient, q, k, k, weights, weights, q, *masks)
    jax.clear_caches()  # the recorded kernels compute nothing
    return found.value.args[0]


def choose(q, k, weights, options, limit):
    """The configuration of a call with these shapes."""
    configs = []
    jax.eval_shape(lambda *x: configs.append(tiling.make_config(Inputs(*x), options, limit)), q, k, k, weights, weights)
    return configs[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim", "tokens", "rank", "groups", "static", "dtype"),
    [
        (6, 6, 64, 197, 2, 1, False, jnp.float32),
        (12, 12, 64, 197, 2, 1, True, jnp.bfloat16),
        (8, 2, 64, 250, 8, 2, True, jnp.float32),
        (4, 4, 32, 64, 1, 1, True, jnp.float32),
        (16, 16, 8, 40, 1, 1, True, jnp.float32),
    ],
)
def test_the_estimate_is_at_least_what_is_declared(
    monkeypatch, heads, key_heads, head_dim, tokens, rank, groups, static, dtype
):
    monkeypatch.setattr(tiling, "vmem_limit", lambda: LIMIT)
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    q, k = array(8, tokens, heads, head_dim), array(8, tokens, key_heads, head_dim)
    side = [array(8, tokens, rank, heads), array(8, tokens, rank, heads), array(8, tokens, heads)]
    weights = ComposeWeights(*side, *side, array(groups, heads // groups, heads // groups) if static else None)
    mask = array(8, 1, tokens, tokens, dtype=jnp.bool_)
    config = choose(q, k, weights, Options(groups=groups), LIMIT)
    assert config.family == "interleaved"
    estimate = backward_interleaved.vmem_bytes(config)
    assert estimate + tiling.COMPILER_BYTES <= LIMIT
    assert 0.95 * estimate < declared(monkeypatch, q, k, weights, groups, mask) <= estimate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim", "tokens", "limit", "dtype"),
    [
        (32, 32, 128, 2048, 60, jnp.bfloat16),
        (16, 16, 64, 2048, 120, jnp.bfloat16),
        (12, 12, 64, 577, 60, jnp.float32),
        (18, 18, 64, 1024, 120, jnp.bfloat16),
        (8, 2, 64, 1024, 120, jnp.float32),
    ],
)
def test_the_estimate_of_several_tiles_is_at_least_what_is_declared(
    monkeypatch, heads, key_heads, head_dim, tokens, limit, dtype
):
    monkeypatch.setattr(tiling, "vmem_limit", lambda: limit * 2**20)
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    q, k = array(1, tokens, heads, head_dim), array(1, tokens, key_heads, head_dim)
    side = [array(1, tokens, 2, heads), array(1, tokens, 2, heads), array(1, tokens, heads)]
    weights = ComposeWeights(*side, *side)
    config = choose(q, k, weights, Options(), limit * 2**20)
    assert config.family == "matrix"
    estimate = tiling.backward_vmem_bytes(config) - tiling.COMPILER_BYTES
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    assert 0.8 * estimate < declared(monkeypatch, q, k, weights, 1) <= estimate
    assert declared(monkeypatch, q, k, weights, 1, None, Segments(ids, ids)) <= estimate


def test_shapes_whose_matrices_do_not_fit_are_mixed_by_vector_units(monkeypatch):
    q = jnp.zeros((1, 512, 4, 64), jnp.bfloat16)
    weights = ComposeWeights(kg=jnp.zeros((1, 512, 4), jnp.bfloat16))
    inputs = Inputs(q, q, q, weights, weights)
    assert tiling.make_config(inputs, Options(), LIMIT).family == "matrix"
    monkeypatch.setattr(tiling, "backward_vmem_bytes", lambda config: LIMIT + 1 if config.family == "matrix" else LIMIT)
    assert tiling.make_config(inputs, Options(), LIMIT).family == "vector"
