"""The gradient TPU kernel for blocks of eight examples whose scores are one tile each.

An example has three stages (`dcvit.dcmha.backends.tpu.stages`). Matrix products, and vector operations of neighboring
examples, overlap with the vector operations of each stage:

| stage | overlapping work |
|---|---|
| score | gradient of the composed weights; dq and the gradients of all weights of the previous example |
| post | dk of the previous example |
| logit | dv; scores of the next example |
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Generic

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from dcvit.dcmha.backends.tpu import interleaved, mixing
from dcvit.dcmha.backends.tpu.call import Blocked, ComposePair, ComposeRefs, Declared, KernelCall, Memory, Packed, vmem
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, Index, Interpret, KernelConfig
from dcvit.dcmha.backends.tpu.interleaved import Task, run_all, run_stage
from dcvit.dcmha.backends.tpu.packing import packed_columns, rows_buffers, rows_of, used_key_rows
from dcvit.dcmha.backends.tpu.stages import Compose, GradientStages, composes
from dcvit.dcmha.backends.tpu.tile import Strip, broadcast_rows, planes, query_parts, save, split, visible
from dcvit.dcmha.numerics import cdiv, round_up
from dcvit.dcmha.shapes import Array, Ref, not_none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs(Generic[Memory]):
    """References of the kernel."""

    inputs: Packed[Memory]
    composes: ComposePair[Memory]
    grads: Packed[Memory]  # outputs
    x_next: Memory  # scores before the first stage
    x: Memory  # scores after it
    y: Memory  # gradient of the composed weights
    p: Memory  # attention weights before the post-compose
    dp: Memory  # their gradient
    dl: Memory  # gradient of the logits
    w: Memory  # attention weights after the post-compose
    da: Memory  # gradient of the scores
    m: Memory  # log-sum-exp of each query, broadcast over sublanes
    d: Memory  # sums of P·dP in each sublane, later delta
    mixed: Memory  # key-wise parts of composes and of transposed composes, for the strips in work
    tiles: Packed[Memory]  # tokens and weights of one example
    dweights_rows: Memory | None  # gradients of the weights of the previous example
    wq_rows: Memory | None  # query-wise weights of the current example, and of the next one
    wq_next: Memory | None
    gq: Memory | None  # gradients of query-wise weights, not yet summed over sublanes
    wk_prev: Memory | None  # key-wise weights of three examples
    wk_rows: Memory | None
    wk_next: Memory | None
    g_hidden: Memory | None  # hidden planes of the transposed compose in use
    diagonal: Memory | None


def kernel(config: KernelConfig, refs: Refs[Ref]) -> None:
    """Compute all gradients of the examples of a block."""
    last = config.examples - 1
    interleaved.clear_rest(refs.tiles, refs.inputs)
    if refs.diagonal is not None:
        mixing.write_diagonal(config, refs.diagonal)
    run_all(prepare_next(config, refs, 0))
    jax.lax.fori_loop(0, config.examples, lambda e, _: differentiate(config, refs, e), None)
    advance_weights(config, refs)
    run_all([*query_gradients(config, refs, last), *weight_gradients(config, refs, last)])
    run_all(key_gradients(config, refs, last))


def differentiate(config: KernelConfig, refs: Refs[Ref], e: Index) -> None:
    """Run the three stages of example `e`, with the last tasks of the previous example and the first of the next one.

    For the first example, the tasks of the previous one compute values that are overwritten later.
    """
    previous, following = jnp.maximum(e - 1, 0), jnp.minimum(e + 1, config.examples - 1)
    advance_weights(config, refs)
    broadcast_rows(not_none(refs.inputs.lse).at[pl.ds(e, 1)], refs.m)
    pre, post = composes(config, refs.composes, (refs.wq_rows, refs.wq_rows), refs.diagonal, refs.g_hidden)
    stages = GradientStages(
        config=config, visible=visible(config, interleaved.inputs_of(refs.inputs, e), 0, 0), pre=pre, post=post,
        x=refs.x, y=refs.y, m=refs.m, d=refs.d, p=refs.p, dp=refs.dp, dl=refs.dl, w=refs.w, da=refs.da,
    )  # fmt: skip
    first_stage = dataclasses.replace(stages, x=refs.x_next)

    def score_vectors(strip: Strip, buffers: Sequence[Ref]) -> None:
        for part in query_parts(config, strip):  # the next example overwrites `x_next`
            save(planes(config, refs.x_next, part), refs.x, part)
        first_stage.score_vectors(strip, buffers)

    def post_sums(keys: slice) -> None:
        query_weight_gradients(stages, post, refs.gq, keys)
        add_delta(config, refs, keys)

    run_stage(
        config,
        refs.mixed,
        first_stage.score_products,
        score_vectors,
        [
            *output_products(config, refs, e),
            *query_gradients(config, refs, previous),
            *weight_gradients(config, refs, previous),
            *build(config, refs, 1, refs.wk_rows),
            *build(config, refs, 1, refs.wk_rows, transposed=True),
        ],
    )
    run_stage(
        config,
        refs.mixed,
        stages.post_products,
        stages.post_vectors,
        [*key_gradients(config, refs, previous), *build(config, refs, 0, refs.wk_rows, transposed=True)],
        post_sums,
    )
    finish_delta(config, refs.d)
    run_stage(
        config,
        refs.mixed,
        stages.logit_products,
        stages.logit_vectors,
        [*value_gradients(config, refs, e), *prepare_next(config, refs, following)],
        functools.partial(query_weight_gradients, stages, pre, refs.gq),
    )


def add_delta(config: KernelConfig, refs: Refs[Ref], keys: slice) -> None:
    """Add the share of `keys` to the sums Σ_s P·dP in each sublane of `d`."""
    for part in query_parts(config, Strip(keys.start, keys.stop - keys.start, False, slice(0, config.block_q))):
        queries = part.queries
        for h in range(config.heads):
            product = jnp.sum(split(refs.p[h, keys, queries]) * split(refs.dp[h, keys, queries]), axis=0)
            refs.d[h, :, queries] = product if keys.start == 0 else refs.d[h, :, queries] + product


def finish_delta(config: KernelConfig, d: Ref) -> None:
    """Sum delta = Σ_s P·dP over the eight sublanes of `d`, and broadcast the sum to all of them."""
    for h in range(config.heads):
        d[h] = jnp.broadcast_to(jnp.sum(d[h], axis=0, keepdims=True), (SUBLANES, config.block_q))


def query_weight_gradients(stages: GradientStages, compose: Compose | None, gq: Ref | None, keys: slice) -> None:
    """Add the share of `keys` to the gradients `gq` of a compose's query-wise weights, which are sums over keys."""
    config = stages.config
    if compose is None or gq is None:
        return
    for start in range(0, config.block_q, LANES):
        queries = slice(start, start + LANES)
        for h in range(config.heads):
            for column, product in stages.query_weight_products(compose, h, keys, queries):
                part = jnp.sum(split(product), axis=0)
                gq[column, :, queries] = part if keys.start == 0 else gq[column, :, queries] + part


def advance_weights(config: KernelConfig, refs: Refs[Ref]) -> None:
    """Shift the weight buffers by one example: current to previous, next to current."""
    if refs.wk_prev is not None and refs.wk_rows is not None and refs.wk_next is not None:
        rows = used_key_rows(config)
        refs.wk_prev[rows] = refs.wk_rows[rows]
        refs.wk_rows[rows] = refs.wk_next[rows]
    if refs.wq_rows is not None and refs.wq_next is not None:
        refs.wq_rows[...] = refs.wq_next[...]


def prepare_next(config: KernelConfig, refs: Refs[Ref], e: Index) -> list[Task]:
    """Return tasks that read example `e`, and compute its scores and the matrices of its pre-compose."""
    inputs, tiles = refs.inputs, refs.tiles

    def tokens() -> None:
        interleaved.read(inputs.q, e, tiles.q)
        interleaved.read(inputs.k, e, tiles.k)

    def weights() -> None:
        if inputs.weights is not None and tiles.weights is not None:
            interleaved.read(inputs.weights, e, tiles.weights)
            rows_of(config, tiles.weights, refs.wq_next, refs.wk_next)

    scores = interleaved.score_tasks(config, refs.x_next, tiles.k, tiles.q)
    return [tokens, weights, *build(config, refs, 0, refs.wk_next), *scores]


def build(config: KernelConfig, refs: Refs[Ref], n: int, rows: Ref | None, *, transposed: bool = False) -> list[Task]:
    """Return the task, if any, that builds matrices of the pre-compose (0) or of the post-compose (1) from `rows`."""
    layout, compose = config.layouts[n], refs.composes[n]
    out = compose.transposed if transposed else compose.matrices
    if layout is None or out is None:
        return []
    weights = mixing.MatrixWeights(layout, rows, refs.inputs.static[n], transposed)
    return [functools.partial(mixing.build, config, weights, out)]


def output_products(config: KernelConfig, refs: Refs[Ref], e: Index) -> list[Task]:
    """Return tasks that compute the gradients dO·v of the composed weights of example `e`."""
    v, d_out = refs.tiles.v, not_none(refs.tiles.d_out)

    def tokens() -> None:
        interleaved.read(refs.inputs.v, e, v)
        interleaved.read(not_none(refs.inputs.d_out), e, d_out)

    return [tokens, *interleaved.score_tasks(config, refs.y, v, d_out)]


def query_gradients(config: KernelConfig, refs: Refs[Ref], e: Index) -> list[Task]:
    """Return tasks that compute dqᵀ = kᵀ·dAᵀ of example `e` from the gradients dA of its scores."""
    k = refs.tiles.k
    read = functools.partial(interleaved.read, refs.inputs.k, e, k)
    return [read, *interleaved.query_products(config, refs.grads.q, e, k, refs.da, config.score_factor)]


def key_gradients(config: KernelConfig, refs: Refs[Ref], e: Index) -> list[Task]:
    """Return tasks that compute dkᵀ = qᵀ·dA of example `e` from the gradients dA of its scores."""
    q = refs.tiles.q
    read = functools.partial(interleaved.read, refs.inputs.q, e, q)
    return [read, *interleaved.key_products(config, refs.grads.k, e, q, refs.da, config.score_factor)]


def value_gradients(config: KernelConfig, refs: Refs[Ref], e: Index) -> list[Task]:
    """Return tasks that compute dvᵀ = dOᵀ·W of example `e` from its composed weights W."""
    return interleaved.key_products(config, refs.grads.v, e, not_none(refs.tiles.d_out), refs.w)


def weight_gradients(config: KernelConfig, refs: Refs[Ref], e: Index) -> list[Task]:
    """Return tasks that write the gradients of the compose weights of example `e`."""
    work: list[Task] = []

    def query_wise() -> None:
        gq, rows = not_none(refs.gq), not_none(refs.dweights_rows)
        for c in range(gq.shape[0]):
            rows[c : c + 1, : config.block_q] = jnp.sum(gq[c], axis=0, keepdims=True)

    def write() -> None:
        rows = not_none(refs.dweights_rows)
        interleaved.write(not_none(refs.grads.weights), e, slice(0, rows.shape[0]), rows[...].T)

    if refs.gq is not None:
        work.append(query_wise)
    for layout, compose, out in zip(config.layouts, refs.composes, refs.grads.static, strict=True):
        if layout is not None and compose.d_matrices is not None:
            static = None if out is None else out.at[e]
            tensors = mixing.MatrixTensors(layout, compose.d_matrices, refs.wk_prev, refs.dweights_rows, static)
            for tile in range(cdiv(config.block_k, LANES)):
                task = functools.partial(mixing.matrix_gradients, config, tensors, tile, add_static=tile > 0)
                work.append(task)
    return work if refs.grads.weights is None else [*work, write]


def gradients(config: KernelConfig, inputs: Packed[Blocked], interpret: Interpret) -> Packed[Array]:
    """Return all gradients, with the layouts of the packed inputs; those of weights are float32."""
    blocks = inputs.q.array.shape[1]
    columns = 0 if inputs.weights is None else inputs.weights.array.shape[2] * LANES
    block = (config.examples, config.heads * cdiv(config.heads, SUBLANES), SUBLANES, LANES)
    static = Blocked(jax.ShapeDtypeStruct((blocks * block[0], *block[1:]), jnp.float32), block, "B...")
    outputs = Packed(
        inputs.q.like(jnp.float32), inputs.k.like(jnp.float32), inputs.v.like(jnp.float32),
        weights=inputs.weights and inputs.weights.like(jnp.float32),
        static=(inputs.static[0] and static, inputs.static[1] and static),
    )  # fmt: skip
    call = KernelCall(
        name="dcmha_gradients",
        grid=(blocks,),
        index_maps=interleaved.INDEX_MAPS,
        refs=dataclasses.replace(buffers(config, columns), inputs=inputs, grads=outputs),
        vmem_bytes=config.vmem_bytes,
    )
    grads: Packed[Array] = call.run(functools.partial(kernel, config), interpret).grads
    return dataclasses.replace(grads, static=mixing.static_gradients(config, grads.static))


def vmem_bytes(config: KernelConfig) -> int:
    """Return the bytes of VMEM of the buffers, and of two blocks (double buffering) of every input and output."""
    columns = round_up(max(packed_columns(config, "q"), packed_columns(config, "k")), LANES)
    wide, narrow = config.heads * config.head_dim, config.key_heads * config.head_dim
    words = config.queries * 3 * wide + config.keys * 4 * narrow + max(config.queries, config.keys) * 2 * columns
    rows = round_up(config.heads, SUBLANES) + round_up(config.block_k, interleaved.TILE_ROWS) // 2
    words += rows * config.block_q  # log-sum-exp and a mask of bfloat16
    mixed = [layout for layout in (config.pre, config.post) if layout is not None and layout.has_static]
    words += len(mixed) * config.heads * cdiv(config.heads, SUBLANES) * SUBLANES * LANES
    total = 2 * config.examples * words * 4
    for x in jax.tree.leaves(buffers(config, columns)):
        itemsize = np.dtype(x.dtype).itemsize
        rows = round_up(x.shape[-2], SUBLANES * 4 // itemsize)  # complete registers
        total += math.prod((*x.shape[:-2], rows, x.shape[-1])) * itemsize
    return total


def buffers(config: KernelConfig, columns: int) -> Refs[Declared]:
    """Return the declared buffers without inputs and outputs, for packed weights of `columns` columns in HBM."""
    heads, keys, queries = config.heads, config.block_k, config.block_q
    plane, row = (vmem((heads, rows, queries)) for rows in (keys, SUBLANES))
    hidden = [0 if layout is None else layout.hidden_planes(config.groups) for layout in config.layouts]
    rows, d_matrices = mixing.rows_buffer(config), mixing.gradient_buffer(config, keys // config.strip)
    pre, post = (
        ComposeRefs(
            matrices=rows if mixes else None,
            transposed=rows if mixes else None,
            d_matrices=d_matrices if mixes else None,
            hidden=vmem((n, keys, queries)) if n else None,
        )
        for n, mixes in zip(hidden, config.mixes, strict=True)
    )
    absent: Packed[Declared] = Packed(None, None, None)
    wq_rows, wk_rows = rows_buffers(config)
    operand = interleaved.operand_buffer(config)
    return Refs(
        inputs=absent, composes=(pre, post), grads=absent, x_next=plane, x=plane, y=plane, p=plane, dp=plane, dl=plane,
        w=operand, da=operand, m=row, d=row, mixed=interleaved.mixed_buffer(config),
        tiles=interleaved.tile_buffers(config, columns, backward=True),
        dweights_rows=vmem((columns, max(queries, round_up(keys, LANES)))) if columns else None, wq_rows=wq_rows,
        wq_next=wq_rows, gq=vmem((packed_columns(config, "q"), SUBLANES, queries)) if wq_rows else None,
        wk_prev=wk_rows, wk_rows=wk_rows, wk_next=wk_rows,
        g_hidden=vmem((max(hidden), keys, queries)) if any(hidden) else None,
        diagonal=mixing.diagonal_buffer() if any(config.mixes) else None,
    )  # fmt: skip
