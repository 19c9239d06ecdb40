"""Choice of blocks for the TPU kernels, and the cases that they do not support."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dcvit.dcmha.backends.tpu import backward_interleaved, mixing, second_layer
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, KernelConfig
from dcvit.dcmha.backends.tpu.packing import compose_layouts, key_rows_buffer, packed_columns
from dcvit.dcmha.backends.tpu.tile import mixed_buffer
from dcvit.dcmha.compose import ONE_TILE
from dcvit.dcmha.device import device_kind
from dcvit.dcmha.inputs import Inputs, Options, UnsupportedError
from dcvit.dcmha.numerics import round_up
from dcvit.dcmha.shapes import Array

# Bytes of VMEM that a kernel may use, of 128 MiB on v5e and v6e, and of 64 MiB on each core of v5p and TPU7x. The
# kernels have been compiled for these chips only.
VMEM_BYTES = {
    "TPU v5 lite": 120 * 2**20, "TPU v5e": 120 * 2**20, "TPU v6": 120 * 2**20, "TPU v5": 60 * 2**20,
    "TPU7x": 60 * 2**20,
}  # fmt: skip
COMPILER_BYTES = 4 * 2**20  # reserved for what the compiler adds to a kernel that mixes heads on the MXU


def check_device() -> None:
    """Raise UnsupportedError if no TPU kernel of this package supports the device or JAX's configuration."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise UnsupportedError("the TPU kernels do not support 64-bit mode (jax_enable_x64)")
    kind = device_kind()
    if kind.startswith("TPU") and not kind.startswith(tuple(VMEM_BYTES)):
        raise UnsupportedError(f"the TPU kernels support v5e, v5p, v6e and TPU7x, found a {kind}")


def check_dtypes(q: Array, k: Array, v: Array) -> None:
    """Raise UnsupportedError unless q, k and v are all float32 or all bfloat16."""
    if q.dtype not in (jnp.float32, jnp.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise UnsupportedError(
            "the TPU kernels support q, k and v that are all float32 or all bfloat16,"
            f" found {q.dtype}, {k.dtype} and {v.dtype}"
        )


def rounds(dtype: DTypeLike) -> bool:
    """Return True if a TPU rounds operands of `dtype` to bfloat16: float32 only at JAX's default matmul precision."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return dtype == jnp.bfloat16 or precision in (None, "default", "fastest", "bfloat16")


def vmem_limit() -> int:
    """Return the bytes of VMEM that a kernel may use; on a host without TPUs, the smallest limit of all chips."""
    kind = device_kind()
    return next((size for known, size in VMEM_BYTES.items() if kind.startswith(known)), min(VMEM_BYTES.values()))


def strips_per_step(sizes: KernelConfig, block_k: int) -> int:
    """Return the number of strips that one step of a loop over `block_k` keys processes.

    Loops unroll two steps. A step has 16 keys or more, the rows of a register of bfloat16, and several strips of few
    heads, whose work would not hide the latency of its operations: up to 32 registers of 8 keys × 128 queries.
    """
    fitting = [n for n in (4, 2, 1) if block_k % (2 * n * sizes.strip) == 0 and n * sizes.strip >= 2 * SUBLANES]
    return next((n for n in fitting if n * sizes.heads * sizes.strip <= 32 * SUBLANES), fitting[-1])


def backward_vmem_bytes(config: KernelConfig) -> int:
    """Return an estimate of the bytes of VMEM of the gradient kernel, which uses the most of all kernels."""
    itemsize: int = jnp.dtype(config.dtype).itemsize
    plane = config.heads * config.block_k * config.block_q
    wide, narrow = config.heads * config.head_dim, config.key_heads * config.head_dim
    layouts = [layout for layout in (config.pre, config.post) if layout is not None]
    rows = sum(config.heads * (2 * layout.query_rank + 1) for layout in layouts)
    columns = packed_columns(config, "k")
    hidden = [layout.hidden_planes(config.groups) for layout in layouts] or [0]
    queries = round_up(min(config.queries_per_pass, config.queries), config.block_q)
    windows = (3 * config.block_q * wide + 4 * config.block_k * round_up(narrow, LANES)) * itemsize
    windows += (2 * rows + 3 * round_up(config.heads, SUBLANES)) * config.block_q * 4  # log-sum-exp, delta, ids
    windows += config.block_k * (2 * round_up(columns, LANES) + LANES) * 4
    mixes = sum(layout.mixes for layout in layouts)
    matrices: int = math.prod(mixing.rows_buffer(config).shape) * 4
    windows += 2 * mixes * matrices
    buffers = [mixed_buffer(config), key_rows_buffer(2 * round_up(columns, LANES))]
    static = sum(layout.has_static for layout in layouts) * config.heads * round_up(config.heads, SUBLANES) * LANES
    scratch: int = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in buffers)
    scratch += mixes * (matrices + matrices // config.block_k * config.strip) + COMPILER_BYTES
    scratch += plane * (16 + 2 * itemsize) + (sum(hidden) + max(hidden)) * config.block_k * config.block_q * 4
    scratch += queries * wide * 4 + round_up(config.block_k, LANES) * 2 * narrow * 4
    scratch += (rows * (8 * config.block_q + queries) + 16 * config.heads * config.block_q) * 4
    scratch += (config.block_k * (columns + LANES) + 3 * static) * 4
    return 2 * windows + scratch


def make_config(inputs: Inputs, options: Options, vmem_bytes: int) -> KernelConfig:
    """Return the first of the `candidates` that fits into `vmem_bytes`.

    Raises:
      UnsupportedError: none fits.
    """
    batch, queries, heads, head_dim = inputs.q.shape
    keys, key_heads = inputs.k.shape[1:3]
    dtype, scale = inputs.q.dtype, float(options.scale)
    pre, post = compose_layouts(inputs.pre, inputs.post, scale)
    sizes = KernelConfig(
        family="matrix", heads=heads, key_heads=key_heads, head_dim=head_dim, groups=options.groups,
        first_query=options.first_query, queries=queries, keys=keys, block_q=LANES, block_k=LANES,
        queries_per_pass=queries, strip=SUBLANES if heads % 2 == 0 else 2 * SUBLANES, strips_per_step=1,
        causal=options.causal, window=options.window, scale=scale, pre=pre, post=post, vmem_bytes=vmem_bytes,
        dtype=dtype, rounded=dtype == jnp.bfloat16, compose_window=options.compose_window,
    )  # fmt: skip
    for config in candidates(sizes, batch if inputs.segments is None else None):
        if fits(config):
            has_hidden = inputs.hidden is not None and second_layer.supports(inputs.hidden)
            return config._replace(has_hidden=has_hidden and config.family == "interleaved")
    raise UnsupportedError(f"{heads} heads of {head_dim} dimensions do not fit into a TPU's VMEM")


def fits(config: KernelConfig) -> bool:
    """Return True if the gradient kernel, which uses the most VMEM of all, fits into `config.vmem_bytes`."""
    if config.family == "interleaved":
        return backward_interleaved.vmem_bytes(config) + COMPILER_BYTES <= config.vmem_bytes
    return backward_vmem_bytes(config) <= config.vmem_bytes


def candidates(sizes: KernelConfig, batch: int | None) -> Iterator[KernelConfig]:
    """Yield configurations of a call with these sizes, the fastest first.

    First comes that of interleaved examples, unless `batch` is None. The others have one example in a block, in tiles
    of at most 256 queries by 128 keys, the largest first; their backward pass processes all queries, or fewer in each
    of several passes.
    """
    if batch is not None and (config := interleaved(sizes, batch)) is not None:
        yield config
    fewer = [n for n in (4096, 2048, 1024, 512, 256) if n <= sizes.queries]
    for block_q, block_k in block_sizes(sizes):
        for queries in (sizes.queries, *fewer):
            yield sizes._replace(
                block_q=block_q, block_k=block_k, strips_per_step=strips_per_step(sizes, block_k),
                queries_per_pass=queries,
            )  # fmt: skip


def interleaved(sizes: KernelConfig, batch: int) -> KernelConfig | None:
    """Return the configuration of the family "interleaved", or None if the sizes exclude it.

    One tile must hold all scores of an example, the batch must be a multiple of 8, and the widths of queries and keys
    multiples of 128. A matrix that mixes heads has heads·strip rows, at most 128. All pairs must be composed.
    """
    heads, key_heads, width = sizes.heads, sizes.key_heads, sizes.head_dim
    fills_registers = batch % SUBLANES == heads * width % LANES == key_heads * width % LANES == 0
    is_one_tile = sizes.queries <= ONE_TILE and sizes.keys <= 2 * ONE_TILE
    if sizes.compose_window is not None or not (is_one_tile and fills_registers):
        return None
    if heads <= LANES // (2 * SUBLANES):
        strip = 2 * SUBLANES
    elif heads <= LANES // SUBLANES and heads % 2 == 0:
        strip = SUBLANES
    else:
        return None
    block_q, block_k = round_up(sizes.queries, LANES), round_up(sizes.keys, strip)
    query_columns = packed_columns(sizes, "q")
    pre, post = (layout and layout.with_keys_after(query_columns) for layout in (sizes.pre, sizes.post))
    return sizes._replace(family="interleaved", strip=strip, block_q=block_q, block_k=block_k, pre=pre, post=post)


def block_sizes(sizes: KernelConfig) -> list[tuple[int, int]]:
    """Return the numbers of queries and keys that a tile may have, the largest first."""
    most_q, most_k = round_up(sizes.queries, LANES), round_up(sizes.keys, 4 * SUBLANES)
    return [(min(block_q, most_q), min(block_k, most_k)) for block_q, block_k in ((256, 128), (128, 128), (128, 64))]
