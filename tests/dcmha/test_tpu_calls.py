"""The calls of the TPU kernels: the VMEM that they declare, and how often their conditions hold."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import call_of
from jax.experimental import pallas as pl
from marks import exhaustive
from pallas_checks import weights_like

from dcvit.dcmha import ComposeWeights
from dcvit.dcmha.backends.tpu import api, backward_interleaved, tiling
from dcvit.dcmha.inputs import Inputs, Options
from dcvit.dcmha.segments import Segments

BLOCK_Q, BLOCK_K = 256, 128
ROWS = {4: 8, 2: 16}  # of a register, by the bytes of a number
MIB = 2**20
FAMILIES = {  # heads, key heads, their dimensions, tokens, dtype; MiB of VMEM, and more
    "interleaved": [
        ((6, 6, 64, 197, jnp.float32), 120, {}),
        ((8, 2, 64, 250, jnp.float32), 120, {"rank": 8, "groups": 2, "static": True}),
    ],
    "matrix": [  # one example is in several tiles
        ((32, 32, 128, 2048, jnp.bfloat16), 60, {}),
        ((18, 18, 64, 1024, jnp.bfloat16), 120, {}),
        ((40, 40, 128, 2048, jnp.bfloat16), 60, {"static": True}),
        ((3, 3, 64, 200, jnp.bfloat16), 120, {}),
        ((8, 2, 64, 1024, jnp.float32), 120, {}),
    ],
}


def calls(monkeypatch, inputs, options):
    """The arguments of all calls of kernels for a gradient, by the kernel's name, and the arrays of each."""
    found = {}

    def record(kernel, *, name, out_shape, **others):
        def call(*arrays):
            found[name] = {**others, "arrays": (*arrays, *out_shape)}
            return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

        return call

    def gradient(d_out, q, k, v, pre, post, *masks):
        def attend(*x):
            return api.run(call_of(Inputs(*x, *masks), options), interpret=False)

        return jax.vjp(attend, q, k, v, pre, post)[1](d_out)

    monkeypatch.setattr(pl, "pallas_call", record)
    jax.clear_caches()  # a kernel that was traced before would not be recorded
    jax.eval_shape(gradient, inputs.q, *inputs)
    jax.clear_caches()  # the recorded kernels compute nothing
    return found


def declared_bytes(call):
    """Bytes of two blocks of each array in VMEM, and of the buffers."""
    grid_spec = call["grid_spec"]
    specs, arrays = (*grid_spec.in_specs, *grid_spec.out_specs), call["arrays"][grid_spec.num_scalar_prefetch :]
    blocks = [
        in_registers(spec.block_shape, x.dtype)
        for spec, x in zip(specs, arrays, strict=True)
        if spec.block_shape is not None
    ]
    return 2 * sum(blocks) + sum(in_registers(x.shape, x.dtype) for x in grid_spec.scratch_shapes)


def in_registers(shape, dtype):
    """Bytes of an array whose last two axes are padded to complete registers."""
    bytes_each = np.dtype(dtype).itemsize
    rows, lanes = (-(-size // n) * n for size, n in zip(shape[-2:], (ROWS[bytes_each], 128), strict=True))
    return math.prod(shape[:-2]) * rows * lanes * bytes_each


@pytest.mark.slow
@pytest.mark.parametrize(("family", "case"), [(family, case) for family, cases in FAMILIES.items() for case in cases])
def test_the_estimated_vmem_is_at_least_what_is_declared(monkeypatch, family, case):
    (heads, key_heads, head_dim, tokens, dtype), limit, more = case
    monkeypatch.setattr(tiling, "vmem_limit", lambda: limit * MIB)
    batch, groups = 8 if family == "interleaved" else 1, more.get("groups", 1)
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    q, k = (array(batch, tokens, n, head_dim) for n in (heads, key_heads))
    weights = weights_like(array, batch, tokens, tokens, heads, more.get("rank", 2))
    if "static" in more:
        weights = weights._replace(static=array(groups, heads // groups, heads // groups))
    inputs, options, configs = Inputs(q, k, k, weights, weights), Options(groups=groups), []
    jax.eval_shape(lambda *x: configs.append(tiling.make_config(Inputs(*x), options, limit * MIB)), *inputs[:5])
    assert configs[0].family == family
    if family == "interleaved":
        estimate, least = backward_interleaved.vmem_bytes(configs[0]), 0.95
        inputs = inputs._replace(mask=array(batch, 1, tokens, tokens, dtype=jnp.bool_))
    else:
        estimate, least = tiling.backward_vmem_bytes(configs[0]) - tiling.COMPILER_BYTES, 0.8
        ids = array(batch, tokens, dtype=jnp.int32)
        inputs = inputs._replace(segments=Segments(ids, ids))
    assert estimate + tiling.COMPILER_BYTES <= limit * MIB
    assert least * estimate < declared_bytes(calls(monkeypatch, inputs, options)["dcmha_gradients"]) <= estimate


def stated(monkeypatch, queries, keys, causal, window, compose_window=None, *, composed=True):
    """The metadata of each kernel of a gradient by name, as numbers; heads and batch have no influence."""
    q, k = (jax.ShapeDtypeStruct((1, tokens, 2, 64), jnp.bfloat16) for tokens in (queries, keys))
    post = ComposeWeights(qg=jax.ShapeDtypeStruct(q.shape[:3], jnp.bfloat16)) if composed else None
    options = Options(causal=causal, window=window, compose_window=compose_window)
    found = calls(monkeypatch, Inputs(q, k, k, None, post), options)
    return {
        name: {key: [int(n) for n in text.split()] for key, text in call["metadata"].items()}
        for name, call in found.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "window"), [(700, 700, True, 100), exhaustive(512, 640, False, None)]
)
def test_the_kernels_state_the_tiles_that_a_query_attends_to(monkeypatch, queries, keys, causal, window):
    distance = np.arange(queries)[:, None] - np.arange(keys)
    attended = np.ones((queries, keys), bool)
    if causal:
        attended = (distance >= 0) & (distance < (window or keys))
    rows = [attended[i : i + BLOCK_Q] for i in range(0, queries, BLOCK_Q)]
    blocks = np.array([[row[:, j : j + BLOCK_K].any() for j in range(0, keys, BLOCK_K)] for row in rows])
    tiles, (blocks_q, blocks_k), longest = int(blocks.sum()), blocks.shape, int(blocks.sum(axis=1).max())
    conditions = [blocks_q, tiles, blocks_q, tiles, blocks_q]
    assert stated(monkeypatch, queries, keys, causal, window) == {
        "dcmha_forward": {"steps": [2 * blocks_q * longest], "conditions": conditions},
        "dcmha_delta": {"steps": [blocks_q * longest], "conditions": [blocks_q, tiles, blocks_q]},
        "dcmha_gradients": {
            "steps": [blocks_q * blocks_k], "conditions": [blocks_k, blocks_q, tiles, blocks_k, blocks_q]
        },
    }  # fmt: skip


@pytest.mark.slow
def test_the_kernels_state_the_tiles_that_are_composed_before_the_plain_tiles(monkeypatch):
    """With a window of 256 keys, query block i of 256 has the keys from 256·(i-1)+1 on in it: two or four blocks."""
    tiles = [2 + 7 * 4, 72 - 30]
    found = stated(monkeypatch, 2048, 2048, True, None, 256)
    assert {name: one["conditions"] for name, one in found.items()} == {
        "dcmha_forward": [8, *tiles, 8, *tiles, 8],
        "dcmha_delta": [8, *tiles, 8],
        "dcmha_gradients": [16, 8, *tiles, 16, 8],
    }


def test_delta_needs_a_kernel_only_after_a_compose_of_the_weights(monkeypatch):
    assert {*stated(monkeypatch, 512, 512, True, None, composed=False)} == {"dcmha_forward", "dcmha_gradients"}
