"""The GPU kernels in JAX's interpreter, which executes the ring of shared-memory slots and its barriers.

The interpreter has no matrix products with an operand in registers, and before JAX 0.12 no layouts of registers and no
transposed operands. These few operations are replaced here; the kernels have one path, that of a GPU.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret.params import force_gpu_interpret_mode
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dcvit.dcmha.backends.gpu import block, ring, staging
from dcvit.dcmha.backends.gpu.config import DEPTH, QUERIES, swizzled

HAS_LAYOUTS = jax.__version_info__ >= (0, 12)


def store(where, x):
    where[...] = x


def product(block, slot, pair):
    """`ring.product` without accumulators and transposed operands."""
    left, right = (side.at[slot] for side in block.scratch.scores[pair])
    return jnp.dot(left[...].astype(jnp.float32), right[block.own_keys].astype(jnp.float32).T)


def products_during(block, slot, pairs, work):
    """`ring.products_during`, one after the other."""
    return [product(block, slot, pair) for pair in pairs], work()


def add_products(self, accumulator, head):
    """`Staging.add_products` with the one-hot matrix in shared memory."""
    w, shape = self.block.warpgroup, (QUERIES, DEPTH)
    if HAS_LAYOUTS:
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    else:
        rows = lax.broadcasted_iota(jnp.int32, shape, 0)

    def multiply(onehot):
        onehot[w] = jnp.where(rows == head, 1.0, 0.0).astype(jnp.bfloat16)
        for first in range(0, QUERIES, DEPTH):
            plgpu.wgmma(accumulator, onehot.at[w], self.scratch.products.at[w, pl.ds(first, DEPTH)])

    shape = self.config.warpgroups, *shape
    pl.run_scoped(multiply, plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(DEPTH)), collective_axes="w")


@contextlib.contextmanager
def interpreted():
    """Context manager: the kernels of functions that are traced in it are interpreted."""
    with pytest.MonkeyPatch.context() as patch, force_gpu_interpret_mode():
        patch.setattr(staging.Staging, "add_products", add_products)
        if not HAS_LAYOUTS:
            patch.setattr(block.Block, "as_tile", lambda self, x: x)
            patch.setattr(block.Block, "as_vector", lambda self, x, axis: x)
            patch.setattr(block, "load_any", lambda where: where[...])
            patch.setattr(block, "store_any", store)
            patch.setattr(staging, "store_any", store)
            patch.setattr(ring, "product", product)
            patch.setattr(ring, "products_during", products_during)
        yield
