"""The estimated VMEM of the TPU gradient kernels covers all blocks and buffers that they declare."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import call_of
from jax.experimental import pallas as pl
from pallas_checks import weights_like

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


BFLOAT16, FLOAT32 = jnp.bfloat16, jnp.float32
SIZES = ("heads", "key_heads", "head_dim", "tokens", "dtype")
CASES = [  # the family of kernels, and sizes; one example is in several tiles
    *[("interleaved", dict(zip(SIZES, sizes, strict=True)) | {"batch": 8, **more}) for sizes, more in (
        ((6, 6, 64, 197, FLOAT32), {}),
        ((8, 2, 64, 250, FLOAT32), {"rank": 8, "groups": 2, "static": True}),
        ((16, 16, 8, 40, FLOAT32), {"rank": 1, "static": True}),
    )],
    *[("matrix", dict(zip(SIZES, sizes, strict=True)) | {"limit": limit, "static": on}) for sizes, limit, on in (
        ((32, 32, 128, 2048, BFLOAT16), 60 * 2**20, False),
        ((18, 18, 64, 1024, BFLOAT16), LIMIT, False),
        ((52, 52, 128, 2048, BFLOAT16), 60 * 2**20, False),
        ((40, 40, 128, 2048, BFLOAT16), 60 * 2**20, True),
        ((3, 3, 64, 200, BFLOAT16), LIMIT, False),
        ((8, 2, 64, 1024, FLOAT32), LIMIT, False),
    )],
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "case"), CASES)
def test_the_estimate_is_at_least_what_is_declared(monkeypatch, family, case):
    c = {"batch": 1, "rank": 2, "groups": 1, "static": False, "limit": LIMIT, **case}
    monkeypatch.setattr(tiling, "vmem_limit", lambda: c["limit"])
    batch, tokens, heads, groups = c["batch"], c["tokens"], c["heads"], c["groups"]
    array = lambda *shape, dtype=c["dtype"]: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    q, k = (array(batch, tokens, n, c["head_dim"]) for n in (heads, c["key_heads"]))
    weights = weights_like(array, batch, tokens, tokens, heads, c["rank"])
    if c["static"]:
        weights = weights._replace(static=array(groups, heads // groups, heads // groups))
    config = choose(q, k, weights, Options(groups=groups), c["limit"])
    assert config.family == family
    ids = array(batch, tokens, dtype=jnp.int32)
    if family == "interleaved":
        estimate, least = backward_interleaved.vmem_bytes(config), 0.95
        masks = [(array(batch, 1, tokens, tokens, dtype=jnp.bool_),)]
    else:
        estimate, least = tiling.backward_vmem_bytes(config) - tiling.COMPILER_BYTES, 0.8
        masks = [(), (None, Segments(ids, ids))]
    assert estimate + tiling.COMPILER_BYTES <= c["limit"]
    first, *others = (declared(monkeypatch, q, k, weights, groups, *mask) for mask in masks)
    assert least * estimate < first <= estimate
    assert all(found <= estimate for found in others)
