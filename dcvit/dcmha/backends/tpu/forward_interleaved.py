"""The forward TPU kernel for blocks of eight examples whose scores are one tile each.

An example has two stages, in which matrix products of its neighbors overlap with its vector operations:

| stage | vector operations | overlapping matrix products |
|---|---|---|
| 1 | pre-compose, and the statistics of the softmax | output of the previous example |
| 2 | attention weights, and post-compose | scores of the next example |
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Generic

import jax
import jax.numpy as jnp

from dcvit.dcmha.backends.tpu import interleaved, mixing
from dcvit.dcmha.backends.tpu.call import Blocked, ComposePair, ComposeRefs, Declared, KernelCall, Memory, Packed, vmem
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, Index, Interpret, KernelConfig
from dcvit.dcmha.backends.tpu.interleaved import Task, run_all, run_stage
from dcvit.dcmha.backends.tpu.packing import rows_buffers, rows_of, with_columns
from dcvit.dcmha.backends.tpu.stages import ForwardStages, composes
from dcvit.dcmha.backends.tpu.tile import visible
from dcvit.dcmha.shapes import Array, Ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs(Generic[Memory]):
    """References of the kernel."""

    inputs: Packed[Memory]
    composes: ComposePair[Memory]
    o: Memory  # output
    lse: Memory  # log-sum-exp of each query, an output
    x: Memory  # scores
    y: Memory  # composed and masked scores
    m: Memory  # maximum of each sublane; later the log-sum-exp
    sums: Memory  # sum of each sublane
    w: Memory  # composed attention weights
    mixed: Memory  # key-wise parts and attention weights of the strips in work
    tiles: Packed[Memory]  # tokens and weights of one example
    wq_rows: Memory | None  # query-wise weights for the pre-compose
    wq_late: Memory | None  # … and for the post-compose
    wk_rows: Memory | None
    diagonal: Memory | None


def kernel(config: KernelConfig, refs: Refs[Ref]) -> None:
    """Compute the outputs and the log-sum-exp of the examples of a block, one after the other."""
    interleaved.clear_rest(refs.tiles, refs.inputs)
    if refs.diagonal is not None:
        mixing.write_diagonal(config, refs.diagonal)
    run_all(score_tasks(config, refs, 0))
    jax.lax.fori_loop(0, config.examples, lambda e, _: attend(config, refs, e), None)
    run_all(output_tasks(config, refs, config.examples - 1))


def attend(config: KernelConfig, refs: Refs[Ref], e: Index) -> None:
    """Run both stages of example `e`, with the output of the previous example and the scores of the next one."""
    previous, following = jnp.maximum(e - 1, 0), jnp.minimum(e + 1, config.examples - 1)
    pre, post = composes(config, refs.composes, (refs.wq_rows, refs.wq_late), refs.diagonal)
    stages = ForwardStages(
        config=config, visible=visible(config, interleaved.inputs_of(refs.inputs, e), 0, 0), pre=pre, post=post,
        x=refs.x, m=refs.m, y=refs.y, w=refs.w, sums=refs.sums,
    )  # fmt: skip
    run_stage(
        config,
        refs.mixed,
        stages.score_products,
        stages.score_vectors,
        [functools.partial(prepare_post, config, refs), *output_tasks(config, refs, previous)],
        lambda keys: stages.update_statistics(keys, is_first=keys.start == 0),
    )
    stages.finish_statistics(refs.lse, e)
    run_stage(
        config, refs.mixed, stages.weight_products, stages.weight_vectors, score_tasks(config, refs, following)
    )  # fmt: skip


def score_tasks(config: KernelConfig, refs: Refs[Ref], e: Index) -> list[Task]:
    """Return tasks that compute the scores of example `e` and its pre-compose weights, before its first stage."""
    inputs, tiles = refs.inputs, refs.tiles

    def tokens() -> None:
        interleaved.read(inputs.q, e, tiles.q)
        interleaved.read(inputs.k, e, tiles.k)

    def weights() -> None:
        if inputs.weights is not None and tiles.weights is not None:
            interleaved.read(inputs.weights, e, tiles.weights)
            rows_of(config, tiles.weights, refs.wq_rows, refs.wk_rows)
        build(config, refs, 0)

    return [tokens, *interleaved.score_tasks(config, refs.x, tiles.k, tiles.q), weights]


def build(config: KernelConfig, refs: Refs[Ref], n: int) -> None:
    """Build the matrices, if any, of the pre-compose (0) or of the post-compose (1)."""
    layout, out = config.layouts[n], refs.composes[n].matrices
    if layout is not None and out is not None:
        mixing.build(config, mixing.MatrixWeights(layout, refs.wk_rows, refs.inputs.static[n]), out)


def prepare_post(config: KernelConfig, refs: Refs[Ref]) -> None:
    """Prepare the weights of the post-compose; later tasks overwrite `wq_rows` and `wk_rows` for the next example."""
    if refs.wq_rows is not None and refs.wq_late is not None:
        refs.wq_late[...] = refs.wq_rows[...]
    build(config, refs, 1)


def output_tasks(config: KernelConfig, refs: Refs[Ref], e: Index) -> list[Task]:
    """Return tasks that compute the output of example `e`."""
    v = refs.tiles.v
    read = functools.partial(interleaved.read, refs.inputs.v, e, v)
    return [read, *interleaved.query_products(config, refs.o, e, v, refs.w)]


def forward(config: KernelConfig, inputs: Packed[Blocked], interpret: Interpret) -> tuple[Array, Array]:
    """Return the output of all heads as interleaved tokens, and each query's log-sum-exp (B H T) in units of log 2."""
    blocks, columns = inputs.q.array.shape[1], 0 if inputs.weights is None else inputs.weights.array.shape[2] * LANES
    lse = jax.ShapeDtypeStruct((blocks * config.examples, config.heads, config.block_q), jnp.float32)
    pre, post = (ComposeRefs(mixing.rows_buffer(config) if mixes else None) for mixes in config.mixes)
    plane, row = (vmem((config.heads, rows, config.block_q)) for rows in (config.block_k, SUBLANES))
    wq_rows, wk_rows = rows_buffers(config)
    refs: Refs[Declared] = Refs(
        inputs, (pre, post), o=inputs.q.like(jnp.float32), lse=with_columns(config, lse), x=plane, y=plane, m=row,
        sums=row, w=interleaved.operand_buffer(config), mixed=interleaved.mixed_buffer(config),
        tiles=interleaved.tile_buffers(config, columns), wq_rows=wq_rows, wq_late=wq_rows, wk_rows=wk_rows,
        diagonal=mixing.diagonal_buffer() if any(config.mixes) else None,
    )  # fmt: skip
    call = KernelCall(
        name="dcmha_forward", grid=(blocks,), index_maps=interleaved.INDEX_MAPS, refs=refs, vmem_bytes=config.vmem_bytes
    )
    found: Refs[Array] = call.run(functools.partial(kernel, config), interpret)
    return found.o, found.lse
