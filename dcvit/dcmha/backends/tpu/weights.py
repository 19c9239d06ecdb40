"""Conversion of packed dynamic weights to the layouts that the TPU kernels read.

The packed weights of a side, query-wise or key-wise, are (tokens, columns);
`dcvit.dcmha.backends.tpu.packing.compose_layouts` says which column is which weight. The kernels use query-wise weights
as rows along lanes (`rows_of`), and key-wise weights as matrices (`dcvit.dcmha.backends.tpu.mixing`). Kernels of the
family "interleaved" convert the weights in VMEM, where a transposition costs little; they read both sides from one
array, with the query-wise columns first. In the family "matrix", XLA converts query-wise weights, and the kernel that
makes the matrices converts key-wise weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, ComposeLayout, KernelConfig
from dcvit.dcmha.numerics import LOG2_E, round_up
from dcvit.dcmha.shapes import Array, Ref

Side = Literal["q", "k"]


def packed_columns(config: KernelConfig, side: Side) -> int:
    """Return the number of packed columns of the weights of one side."""
    return max((stop for _, _, _, stop in _parts(config, side)), default=0)


def _parts(config: KernelConfig, side: Side) -> Iterator[tuple[ComposeLayout, str, int, int]]:
    """Yield (compose, "down", "up" or "gate", first column, end column) of each packed weight of one side."""
    for layout in (config.pre, config.post):
        if layout is None:
            continue
        offsets, rank = (layout.query, layout.query_rank) if side == "q" else (layout.key, layout.key_rank)
        for name, start in offsets._asdict().items():
            if start is not None:
                yield layout, name, start, start + (1 if name == "gate" else rank) * config.heads


def scaled(config: KernelConfig, x: Array, start: int = 0) -> Array:
    """Return query-wise weights with scale·log2(e) of the pre-compose in them, and the skip connection in gates.

    A compose C is linear, C(c·a) = c·C(a), so that its up projections and gates can include the scale; the kernels
    compute softmax in base 2.

    Args:
      config: the layout of the columns.
      x: weights, with the columns as the last axis.
      start: number of the first column of `x` among the query-wise columns.
    """
    column = _column(x) + start
    factor, term = (jnp.full(column.shape, value, jnp.float32) for value in (1.0, 0.0))
    for layout, name, first, stop in _parts(config, "q"):
        inside = (column >= first) & (column < stop)
        if name != "down":
            factor = jnp.where(inside, layout.skip_factor, factor)
        if name == "gate":
            term = jnp.where(inside, layout.skip_factor, term)
    return x * factor + term


def corrected(config: KernelConfig, x: Array, side: Side) -> Array:
    """Return the gradients of the weights from those of the weights that `scaled` returned.

    The kernels use scores without the factor `scale`, and pre-compose weights with the factor scale·log2(e).
    """
    column = _column(x)
    factor = jnp.ones(column.shape, jnp.float32)
    for layout, name, start, stop in _parts(config, side):
        if layout is config.pre:
            times = 1 / LOG2_E if name == "down" else config.scale
            factor = jnp.where((column >= start) & (column < stop), times, factor)
    return x * factor


def _column(x: Array) -> Array:
    """Return the numbers of the columns, (1, …, 1, columns)."""
    return jax.lax.broadcasted_iota(jnp.int32, (*[1] * (x.ndim - 1), x.shape[-1]), x.ndim - 1)


def rows_of(config: KernelConfig, weights: Ref, wq_rows: Ref | None, wk_rows: Ref | None) -> None:
    """Transpose the weights of an example, so that each weight is a row with the tokens along lanes.

    Args:
      config: the layout of the columns.
      weights: all weights of the example, (columns/128, tokens, 128).
      wq_rows: output for query-wise weights, as `scaled` returns them, (1, Bq/128, columns, 128).
      wk_rows: output for key-wise weights, for `mixing.build`, (columns + 8, keys); only `used_key_rows` are written.
    """
    for n in range(weights.shape[0]):
        start = n * LANES
        rows = scaled(config, weights[n], start).T
        if wq_rows is not None and start < wq_rows.shape[2]:
            stop = min(wq_rows.shape[2], start + LANES)
            for register in range(wq_rows.shape[1]):
                lanes = slice(register * LANES, (register + 1) * LANES)
                wq_rows[0, register, start:stop] = rows[: stop - start, lanes]
        if wk_rows is not None:
            first = max(used_key_rows(config).start - start, 0)
            if first < LANES:
                wk_rows[start + first : start + LANES] = rows[first:, : wk_rows.shape[1]]


def used_key_rows(config: KernelConfig) -> slice:
    """Return the slice of rows of `wk_rows` (see `rows_of`) from the register with the first key-wise weight on."""
    first = min((start for _, _, start, _ in _parts(config, "k")), default=0)
    return slice(first // SUBLANES * SUBLANES, None)


def rows_scratch(config: KernelConfig) -> tuple[pl.MemoryRef | None, pl.MemoryRef | None]:
    """Return buffers for the results of `rows_of`, None for a side without weights."""
    queries, keys = packed_columns(config, "q"), packed_columns(config, "k")
    shape = (1, config.block_q // LANES, round_up(queries, SUBLANES), LANES)
    wq_rows = pltpu.VMEM(shape, jnp.float32) if queries else None
    size = round_up(keys, LANES) + SUBLANES, round_up(config.block_k, LANES)
    return wq_rows, pltpu.VMEM(size, jnp.float32) if keys else None


def transpose_key_weights(wk: Ref, out: Ref) -> None:
    """Transpose key-wise weights (1, Bk, columns) for `mixing.build` to `out`, a buffer from `key_rows_scratch`."""
    for start in range(0, wk.shape[2], LANES):
        out[start : start + LANES, : wk.shape[1]] = wk[0, :, start : start + LANES].T


def key_rows_scratch(columns: int) -> pl.MemoryRef:
    """Return a buffer for the key-wise weights of at most 128 keys, (columns + 8, 128)."""
    found: pl.MemoryRef = pltpu.VMEM((columns + SUBLANES, LANES), jnp.float32)
    return found
