"""Loops over the strips of a tile in the TPU kernels for one example, and which keys of a strip are attended to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.pallas_tpu import mixing
from dcvit.dcmha.pallas_tpu.call import Refs
from dcvit.dcmha.pallas_tpu.config import LANES, ComposeLayout, ComposeName, Index, KernelConfig, Rows
from dcvit.dcmha.pallas_tpu.tile import dot, join, split
from dcvit.dcmha.shapes import Array, Ref, not_none


class Strip(NamedTuple):
    """A run of neighboring keys of a tile."""

    start: Index
    size: int
    may_pad: bool  # True if some rows of the strip may lie after the last key
    number: Index = 0  # of the strip in the tile; the number of strips for a repetition of the last one

    @property
    def rows(self) -> Rows:
        return pl.ds(self.start, self.size)


Body: TypeAlias = Callable[[Strip, Sequence["Ref | None"]], None]


def broadcast_columns(
    config: KernelConfig, layout: ComposeLayout | None, wk: Ref | None, rows: Rows, out: Ref | None
) -> None:
    """Broadcast the key-wise weights of one compose for the keys `rows` over the lanes of `out`."""
    if layout is None or not layout.key_runs:
        return
    x = not_none(wk)[0, rows, :]
    for n, c in enumerate(layout.key_columns(rounded=config.rounded)):
        not_none(out)[n] = jnp.broadcast_to(x[:, c : c + 1], (x.shape[0], LANES))


def over_strips(
    config: KernelConfig,
    refs: Refs,
    composes: Sequence[ComposeName],
    body: Body,
    product: Callable[[Strip, Ref], None],
    overlapped: Callable[[Array], None] | None = None,
) -> None:
    """Call body(strip, buffers) for each strip of a tile.

    `buffers` hold the broadcast weights of `composes`, or the planes that `product` has written, if the matrix unit
    mixes heads; see `over_mixed_strips`.

    A strip of few heads is short, and the latency of the broadcast would dominate it. One step of the loop therefore
    processes several strips and first broadcasts the weights of all of them, each into its own buffer. (The compiler
    assumes that a buffer selected by a traced index aliases the one that is being read.) `overlapped`, which gets the
    number of the step, runs while the broadcasts are in flight; it must not read what the step writes.
    """
    if config.family == "matrix":
        over_mixed_strips(config, refs["mixed"], body, product, overlapped)
        return
    unroll = config.strips_per_step
    layouts = {"pre": (config.pre, refs.get("broadcast_pre")), "post": (config.post, refs.get("broadcast_post"))}

    def step(i: Array, _: None) -> None:
        strips = strips_of(config, i)
        buffers = []
        for n in range(unroll):
            refs_of_step = [layouts[name][1] for name in composes]
            buffers.append([None if ref is None else ref.at[n] for ref in refs_of_step])
        for some, outs in zip(strips, buffers, strict=True):
            for name, out in zip(composes, outs, strict=True):
                broadcast_columns(config, layouts[name][0], refs.get("wk"), some.rows, out)
        if overlapped:
            overlapped(i)
        for some, outs in zip(strips, buffers, strict=True):
            body(some, outs)

    jax.lax.fori_loop(0, steps(config), step, None)


def steps(config: KernelConfig) -> int:
    """Return the number of steps of `strips_per_step` strips in a tile."""
    return config.block_k // config.strip // config.strips_per_step


def strips_of(config: KernelConfig, i: Index) -> list[Strip]:
    """Return the strips of step `i`; those of a step after the last one are repetitions of the last one's."""
    last_block_keys = config.keys - (config.blocks_k - 1) * config.block_k
    unroll, last, found = config.strips_per_step, steps(config) - 1, []
    for n in range(unroll):
        start = pl.multiple_of((jnp.minimum(i, last) * unroll + n) * config.strip, config.strip)
        may_pad = (last * unroll + n + 1) * config.strip > last_block_keys
        number = jnp.minimum(i * unroll + n, config.block_k // config.strip)
        found.append(Strip(start, config.strip, may_pad, number))
    return found


def over_mixed_strips(
    config: KernelConfig, buffers: Ref, body: Body, product: Callable[[Strip, Ref], None],
    overlapped: Callable[[Array], None] | None,
) -> None:  # fmt: skip
    """Call product(strip, buffer) for each strip of a tile, one step ahead of body(strip, buffers).

    So the matrix unit mixes the heads of the next strips beside the vector operations of the current ones. Two steps
    are unrolled, each of which has its own buffers, because the compiler assumes that buffers alias if a traced index
    selects them. After the last step, `product` is called for a repetition of it, whose results are not used: of 16
    strips in steps of two, 18 have products.
    """

    def compute(i: Index, half: int) -> None:
        for n, strip in enumerate(strips_of(config, i)):
            product(strip, buffers.at[half, n])

    def two_steps(pair: Array, _: None) -> None:
        for half in range(2):
            i = 2 * pair + half
            compute(i + 1, 1 - half)
            if overlapped:
                overlapped(i)
            strips = strips_of(config, i)
            size = len(strips) * config.strip
            start = pl.multiple_of(jnp.asarray(strips[0].start), size)
            together = Strip(start, size, any(strip.may_pad for strip in strips))
            body(together, [buffers.at[half, :, plane] for plane in range(buffers.shape[2])])

    compute(0, 0)
    jax.lax.fori_loop(0, steps(config) // 2, two_steps, None)


def key_wise_product(
    config: KernelConfig, refs: Refs, matrices: Ref | None, operand: Array, strip: Strip, out: Ref
) -> None:
    """Write the product of the matrices of a strip with the `stack` of all heads to `out`, if there are matrices."""
    if matrices is not None:
        number = jnp.minimum(strip.number, matrices.shape[1] - 1)
        matrix = mixing.block(config, matrices.at[0], refs["diagonal"], number)
        out[...] = dot(matrix, operand, (1, 0))


def stack(config: KernelConfig, planes: Sequence[Array]) -> Array:
    """Return planes, rounded together, as rows of one operand of a product."""
    return jnp.concatenate([join(x) for x in planes], axis=0).astype(config.operand_dtype)


def broadcast_scratch(config: KernelConfig) -> dict[str, pl.MemoryRef]:
    """Return the buffers of broadcast key-wise weights by name, one buffer for each strip of a step."""
    dtype = jnp.int32 if config.rounded else jnp.float32
    return {
        f"broadcast_{name}": pltpu.VMEM(
            (config.strips_per_step, len(layout.key_columns(rounded=config.rounded)), config.strip, LANES), dtype
        )
        for name, layout in (("pre", config.pre), ("post", config.post))
        if layout is not None and layout.key_runs and config.family == "vector"
    }  # fmt: skip


def mixed_scratch(config: KernelConfig) -> dict[str, pl.MemoryRef]:
    """Return the buffers of `over_mixed_strips` by name: two planes of all heads for each strip of two steps."""
    if config.family != "matrix":
        return {}
    shape = (2, config.strips_per_step, 2, config.heads * config.strip, config.block_q)
    return {"mixed": pltpu.VMEM(shape, jnp.float32), "diagonal": mixing.diagonal_scratch()}


def visible(
    config: KernelConfig, i: Index, j: Index, strip: Strip, mask: Ref | None, lanes: slice | None = None
) -> Array | None:
    """Return which keys of a strip of key block `j` the queries of block `i` attend to; None if they attend to all.

    `lanes` selects some queries of the block.
    """
    lanes = lanes or slice(0, config.block_q)
    shape = (strip.size // 8, 8, lanes.stop - lanes.start)
    conditions: list[Array] = []
    if config.is_ordered or strip.may_pad:
        row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * 8 + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        key = row + (j * config.block_k + strip.start)
        if config.is_ordered:
            first_query = i * config.block_q + (config.first_query + lanes.start)
            query = jax.lax.broadcasted_iota(jnp.int32, shape, 2) + first_query
            conditions.append(key <= query)
            if config.window is not None:
                conditions.append(key > query - config.window)
        if strip.may_pad:
            conditions.append(key < config.keys)
    if mask is not None:
        conditions.append(split(mask[0, strip.rows, lanes].astype(jnp.float32)) > 0.5)
    return functools.reduce(jnp.logical_and, conditions) if conditions else None
