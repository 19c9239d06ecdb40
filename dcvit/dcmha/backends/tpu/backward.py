"""The backward TPU kernels for one example in tiles. `dcvit.dcmha.backends.tpu.api` describes the algorithm."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Generic

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dcvit.dcmha.backends.tpu import mixing, tile
from dcvit.dcmha.backends.tpu.call import Blocked, ComposePair, ComposeRefs, Declared, KernelCall, Memory, Packed, vmem
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, Index, Interpret, KernelConfig, conditions
from dcvit.dcmha.backends.tpu.packing import key_rows_buffer, packed_columns, transpose_key_weights, with_columns
from dcvit.dcmha.backends.tpu.stages import Compose, DeltaStages, GradientStages, composes, in_tile
from dcvit.dcmha.backends.tpu.tile import broadcast_rows, dot, over_strips, split
from dcvit.dcmha.numerics import cdiv
from dcvit.dcmha.shapes import Array, Ref, not_none

CHUNK = 40  # keys that `weight_gradients` loads once for all sums of a head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaRefs(Generic[Memory]):
    """References of the kernel of delta."""

    needed: Memory | None  # see `tile.needed_blocks`
    inputs: Packed[Memory]
    composes: ComposePair[Memory]
    delta: Memory  # output
    x: Memory  # scores
    y: Memory  # gradient of the composed weights
    m: Memory  # log-sum-exp of each query, broadcast over sublanes
    d: Memory  # sums of P·dP in each sublane
    mixed: Memory  # see `tile.over_strips`
    diagonal: Memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs(Generic[Memory]):
    """References of the gradient kernel: planes of a tile, and accumulators of gradients."""

    needed: Memory | None  # see `tile.needed_blocks`
    inputs: Packed[Memory]
    composes: ComposePair[Memory]
    grads: Packed[Memory]  # outputs
    x: Memory  # scores
    y: Memory  # gradient of the composed weights; later the gradient of the logits
    p: Memory  # attention weights before the post-compose
    dp: Memory  # their gradient
    w: Memory  # attention weights after the post-compose
    da: Memory  # gradient of the scores
    m: Memory  # log-sum-exp of each query, broadcast over sublanes
    d: Memory  # delta, as `m`
    mixed: Memory  # see `tile.over_strips`
    diagonal: Memory
    dq: Memory  # of all queries
    dk: Memory
    dv: Memory
    g_hidden: Memory | None  # hidden planes of the transposed compose in use
    gq: Memory | None  # gradients of query-wise weights of a tile
    dwq: Memory | None  # … of all queries
    wk_rows: Memory | None
    dwk_rows: Memory | None  # gradients of key-wise weights


def delta_kernel(config: KernelConfig, refs: DeltaRefs[Ref]) -> None:
    """Add one key block to delta_h = Σ_s P_h·dP_h of a query block; grid index (b, i, j)."""
    mixing.write_diagonal(config, refs.diagonal)
    i, step = pl.program_id(1), pl.program_id(2)
    j, inputs = config.first_key_block(i) + step, refs.inputs

    @pl.when(step == 0)
    def _() -> None:
        broadcast_rows(not_none(inputs.lse), refs.m)
        refs.d[...] = jnp.zeros(refs.d.shape, jnp.float32)

    is_needed = tile.is_needed(refs.needed, pl.program_id(0) * config.blocks_q + i, j)
    near = tile.near(config, i, j)
    pre, post = composes(config, refs.composes, (inputs.wq, inputs.wq), refs.diagonal, near=near)
    all_stages = DeltaStages(
        config=config, visible=tile.visible(config, inputs, i, j), pre=pre, post=post, x=refs.x, y=refs.y, m=refs.m,
        d=refs.d,
    )  # fmt: skip

    def add_tile(stages: DeltaStages) -> None:
        tile.scores(config, inputs.k, inputs.q, refs.x)
        tile.scores(config, inputs.v, not_none(inputs.d_out), refs.y)
        over_strips(config, refs.mixed, stages.add_delta, stages.delta_products)

    in_tile(all_stages, i, j, (j <= config.last_key_block(i)) & is_needed, add_tile)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        for h in range(config.heads):
            refs.delta[0, h : h + 1, :] = jnp.sum(refs.d[h], axis=0, keepdims=True)


def gradient_stages(config: KernelConfig, refs: Refs[Ref], i: Index, j: Index) -> GradientStages:
    """Return the stages of the tile of query block `i` and key block `j`."""
    inputs, near = refs.inputs, tile.near(config, i, j)
    pre, post = composes(config, refs.composes, (inputs.wq, inputs.wq), refs.diagonal, refs.g_hidden, near)
    return GradientStages(
        config=config, visible=tile.visible(config, inputs, i, j), pre=pre, post=post, x=refs.x, y=refs.y, m=refs.m,
        d=refs.d, p=refs.p, dp=refs.dp, dl=refs.y, w=refs.w, da=refs.da,
    )  # fmt: skip


def tile_gradients(refs: Refs[Ref], stages: GradientStages) -> None:
    """Compute composed weights W and gradients dA of scores of a tile; add its share to all weights' gradients."""
    config, inputs, pre, post = stages.config, refs.inputs, stages.pre, stages.post
    tile.scores(config, inputs.k, inputs.q, refs.x)
    tile.scores(config, inputs.v, not_none(inputs.d_out), refs.y)
    over_strips(config, refs.mixed, stages.score_vectors, stages.score_products)
    over_strips(config, refs.mixed, stages.post_vectors, stages.post_products)
    weight_gradients(stages, post, refs.gq)
    over_strips(config, refs.mixed, stages.logit_vectors, stages.logit_products)
    weight_gradients(stages, pre, refs.gq)


def weight_gradients(stages: GradientStages, compose: Compose | None, gq: Ref | None) -> None:
    """Write a tile's share of the gradients of one compose's query-wise weights to the rows of `gq`.

    Heads are processed one by one, so that a head's sums over keys stay in registers.
    """
    config = stages.config
    for h in range(config.heads) if compose is not None else ():
        sums: dict[int, Array] = {}
        for start in range(0, config.block_k, CHUNK):
            keys = slice(start, min(start + CHUNK, config.block_k))
            for column, product in stages.query_weight_products(not_none(compose), h, keys, slice(0, config.block_q)):
                part = jnp.sum(split(product), axis=0)
                sums[column] = sums[column] + part if column in sums else part
        for column, part in sums.items():
            not_none(gq)[column] = part


def token_gradients(config: KernelConfig, refs: Refs[Ref], i: Index) -> None:
    """Add dqᵀ = kᵀ·dAᵀ, dkᵀ = qᵀ·dA and dvᵀ = dOᵀ·W of a tile to the accumulators.

    Tokens are transposed, not planes, because they are far smaller.
    """
    q, k, d_out = refs.inputs.q[0], refs.inputs.k[0, : config.block_k].T, not_none(refs.inputs.d_out)[0]
    for h in range(config.heads):
        lanes = config.query_lanes(h)
        refs.dq[i, lanes] += dot(k[config.key_lanes(h)], refs.da[h], (1, 0))
        refs.dk[config.key_lanes(h)] += dot(q[lanes], refs.da[h], (1, 1))
        refs.dv[config.key_lanes(h)] += dot(d_out[lanes], refs.w[h], (1, 1))


def gradient_kernel(config: KernelConfig, refs: Refs[Ref]) -> None:
    """Compute a tile's share of all gradients of an example; grid index (b, j, i), for key block j and query block i.

    Gradients of a key block accumulate over i. Gradients of all query blocks stay in VMEM and accumulate over j.
    """
    mixing.write_diagonal(config, refs.diagonal)
    j, i = pl.program_id(1), pl.program_id(2)
    first_i, last_i = i == 0, i == config.blocks_q - 1
    first_j, last_j = j == 0, j == config.blocks_k - 1

    @pl.when(first_i)
    def _() -> None:
        clear(refs.dk, refs.dv, *(compose.d_matrices for compose in refs.composes))

    @pl.when(first_j)
    def _() -> None:
        clear(refs.dq.at[i], None if refs.dwq is None else refs.dwq.at[i])

    @pl.when(first_i & first_j)
    def _() -> None:
        clear(*(compose.static_sums for compose in refs.composes))

    is_needed = tile.is_needed(refs.needed, pl.program_id(0) * config.blocks_k + j, i)

    attended = (config.first_key_block(i) <= j) & (j <= config.last_key_block(i)) & is_needed

    def add_tile(stages: GradientStages) -> None:
        broadcast_rows(not_none(refs.inputs.lse), refs.m)
        broadcast_rows(not_none(refs.inputs.delta), refs.d)
        tile_gradients(refs, stages)
        token_gradients(config, refs, i)
        if refs.gq is not None and refs.dwq is not None and not stages.is_plain:
            for c in range(refs.gq.shape[0]):
                refs.dwq[i, c : c + 1, :] += jnp.sum(refs.gq[c], axis=0, keepdims=True)

    in_tile(gradient_stages(config, refs, i, j), i, j, attended, add_tile)

    @pl.when(last_i)
    def _() -> None:
        refs.grads.k[0] = (refs.dk[...] * config.score_factor).astype(refs.grads.k.dtype).T
        refs.grads.v[0] = refs.dv[...].astype(refs.grads.v.dtype).T
        write_matrix_gradients(config, refs)

    @pl.when(last_j)
    def _() -> None:
        refs.grads.q[0] = (refs.dq[i] * config.score_factor).astype(refs.grads.q.dtype)
        if refs.dwq is not None and refs.grads.wq is not None:
            refs.grads.wq[0, : refs.dwq.shape[1]] = refs.dwq[i]

    @pl.when(last_i & last_j)
    def _() -> None:
        for out, compose in zip(refs.grads.static, refs.composes, strict=True):
            if out is not None and compose.static_sums is not None:
                out[0] = compose.static_sums[...]


def clear(*refs: Ref | None) -> None:
    """Fill references with zeros; None is ignored."""
    for ref in refs:
        if ref is not None:
            ref[...] = jnp.zeros(ref.shape, ref.dtype)


def write_matrix_gradients(config: KernelConfig, refs: Refs[Ref]) -> None:
    """Write gradients of a key block's key-wise weights, and add those of static weights, from those of matrices."""
    if refs.inputs.wk is not None and refs.wk_rows is not None:
        transpose_key_weights(refs.inputs.wk, refs.wk_rows)
    for layout, compose in zip(config.layouts, refs.composes, strict=True):
        if layout is not None and compose.d_matrices is not None:
            blocks = compose.d_matrices.at[: compose.d_matrices.shape[0] - 1]
            tensors = mixing.MatrixTensors(layout, blocks, refs.wk_rows, refs.dwk_rows, compose.static_sums)
            mixing.matrix_gradients(config, tensors, 0, add_static=True)
    if refs.dwk_rows is not None and refs.grads.wk is not None:
        refs.grads.wk[0] = refs.dwk_rows[...].T[: config.block_k]


def backward(config: KernelConfig, inputs: Packed[Blocked], interpret: Interpret) -> Packed[Array]:
    """Return all gradients, with the layouts of the packed inputs; those of weights are float32."""
    pair = mixing.matrices(config, inputs, interpret, transposed=True)
    inputs = dataclasses.replace(inputs, static=(None, None))
    if inputs.delta is None:
        inputs = dataclasses.replace(inputs, delta=delta(config, inputs, pair, interpret))
    if config.queries_per_pass >= config.queries:
        return gradients(config, inputs, pair, interpret)
    found: list[Any] = []
    for first in range(0, config.queries, config.queries_per_pass):
        queries = min(config.queries_per_pass, config.queries - first)
        part = config._replace(first_query=config.first_query + first, queries=queries)
        some = inputs_of_queries(inputs, slice(first, first + part.blocks_q * part.block_q))
        found.append(gradients(part, some, pair, interpret))
    by_column: dict[str, Any] = {"q": jnp.concatenate([x.q for x in found], axis=2), "wq": None}
    if inputs.wq is not None:
        by_column["wq"] = jnp.concatenate([x.wq for x in found], axis=2)
    rest = [dataclasses.replace(x, q=None, wq=None) for x in found]
    summed: Packed[Array] = jax.tree.map(
        lambda *parts: functools.reduce(jnp.add, [x.astype(jnp.float32) for x in parts]), *rest
    )
    return dataclasses.replace(summed, **by_column)


def inputs_of_queries(inputs: Packed[Blocked], queries: slice) -> Packed[Blocked]:
    """Return the inputs of a slice of the queries, which are complete blocks."""

    def columns(x: Blocked | None) -> Any:
        return x and x._replace(array=jnp.asarray(x.array)[..., queries])

    wq, registers = inputs.wq, slice(queries.start // LANES, queries.stop // LANES)
    return dataclasses.replace(
        inputs, q=columns(inputs.q), d_out=columns(inputs.d_out), lse=columns(inputs.lse), delta=columns(inputs.delta),
        mask=columns(inputs.mask), ids_q=columns(inputs.ids_q),
        wq=wq and wq._replace(array=jnp.asarray(wq.array)[:, registers]),
    )  # fmt: skip


def delta(
    config: KernelConfig, inputs: Packed[Blocked], pair: ComposePair[Blocked], interpret: Interpret
) -> Blocked:  # fmt: skip
    """Return Σ_s P·dP of each row, (B H T) in float32, where dP is the gradient of the attention weights P."""

    def key_block(b: Index, i: Index, step: Index, *needed: Ref) -> Index:
        block = jnp.minimum(config.first_key_block(i) + step, config.last_key_block(i))
        return tile.nearest_needed(needed, b * config.blocks_q + i, block)

    pre, post = dataclasses.replace(pair[0], transposed=None), dataclasses.replace(pair[1], matrices=None)
    blocks, steps = config.blocks_q, config.max_key_blocks
    plane, row = (vmem((config.heads, rows, config.block_q)) for rows in (config.block_k, SUBLANES))
    out = not_none(inputs.lse).like(jnp.float32)
    refs: DeltaRefs[Declared] = DeltaRefs(
        tile.needed_blocks(config, inputs), dataclasses.replace(inputs, wk=None), (pre, post), out, x=plane, y=plane,
        m=row, d=row, mixed=tile.mixed_buffer(config), diagonal=mixing.diagonal_buffer(),
    )  # fmt: skip
    call = KernelCall(
        name="dcmha_delta",
        grid=(len(inputs.q.array), blocks, steps),
        index_maps={"B": lambda b, *_: b, "T": lambda b, i, *_: i, "S": key_block},
        refs=refs,
        vmem_bytes=config.vmem_bytes,
        metadata=conditions(blocks * steps, blocks, *config.tile_counts, blocks),
    )
    return out._replace(array=call.run(functools.partial(delta_kernel, config), interpret).delta)


def gradients(
    config: KernelConfig, inputs: Packed[Blocked], pair: ComposePair[Blocked], interpret: Interpret
) -> Packed[Array]:
    """Return all gradients, as `backward`, from a call of the gradient kernel, for the queries of a pass."""

    def query_block(b: Index, j: Index, i: Index, *needed: Ref) -> Index:
        return tile.nearest_needed(needed, b * config.blocks_k + j, config.query_block(j, i))

    def completed(
        b: Index, j: Index, i: Index, *_: Ref
    ) -> Index:  # the last key block completes the gradients of the queries
        return jnp.where(j == config.blocks_k - 1, i, 0)

    refs = gradient_refs(config, inputs, pair)
    once = [1] if any(x is not None for x in refs.grads.static) else []
    blocks = config.blocks_k, config.blocks_q  # in which the first, or the last, block of the other side is visited
    call = KernelCall(
        name="dcmha_gradients",
        grid=(len(inputs.q.array), config.blocks_k, config.blocks_q),
        index_maps={"B": lambda b, *_: b, "T": query_block, "S": lambda b, j, *_: j, "C": completed},
        refs=refs,
        vmem_bytes=config.vmem_bytes,
        metadata=conditions(config.blocks_q * config.blocks_k, *blocks, *once, *config.tile_counts, *blocks, *once),
    )
    grads: Packed[Array] = call.run(functools.partial(gradient_kernel, config), interpret).grads
    return dataclasses.replace(grads, static=mixing.static_gradients(config, grads.static))


def gradient_refs(config: KernelConfig, inputs: Packed[Blocked], pair: ComposePair[Blocked]) -> Refs[Declared]:
    """Return the declarations of the gradient kernel."""
    heads, block_q, block_k = config.heads, config.block_q, config.block_k
    plane, row = (vmem((heads, rows, block_q)) for rows in (block_k, SUBLANES))
    operand, narrow = vmem((heads, block_k, block_q), config.operand_dtype), config.key_heads * config.head_dim
    grads = gradient_outputs(config, inputs)
    hidden = [0 if layout is None else layout.hidden_planes(config.groups) for layout in config.layouts]
    columns = 0 if inputs.wk is None else inputs.wk.array.shape[2]
    query_columns = 0 if inputs.wq is None else packed_columns(config, "q")
    d_matrices = mixing.gradient_buffer(config, block_k // config.strip + 1)
    pre, post = (
        ComposeRefs(
            compose.matrices,
            compose.transposed,
            d_matrices=compose.matrices and d_matrices,
            static_sums=static and vmem(static.array.shape[1:]),
            hidden=vmem((n, block_k, block_q)) if n else None,
        )
        for n, compose, static in zip(hidden, pair, grads.static, strict=True)
    )
    return Refs(
        tile.needed_blocks(config, inputs, of_keys=True), inputs, (pre, post), grads, x=plane, y=plane, p=plane,
        dp=plane, w=operand, da=operand, m=row, d=row, mixed=tile.mixed_buffer(config),
        diagonal=mixing.diagonal_buffer(), dq=vmem((config.blocks_q, heads * config.head_dim, block_q)),
        dk=vmem((narrow, block_k)), dv=vmem((narrow, block_k)),
        g_hidden=vmem((max(hidden), block_k, block_q)) if any(hidden) else None,
        gq=vmem((query_columns, SUBLANES, block_q)) if query_columns else None,
        dwq=vmem((config.blocks_q, query_columns, block_q)) if query_columns else None,
        wk_rows=key_rows_buffer(columns) if columns else None, dwk_rows=vmem((columns, LANES)) if columns else None,
    )  # fmt: skip


def gradient_outputs(config: KernelConfig, inputs: Packed[Blocked]) -> Packed[Blocked]:
    """Return the declared outputs of the gradient kernel; the axis letter C selects a complete query block."""
    batch, wq, wk = len(inputs.q.array), inputs.wq, inputs.wk
    if wq is not None:
        shape = (batch, wq.array.shape[2], config.blocks_q * config.block_q)
        wq = with_columns(config, jax.ShapeDtypeStruct(shape, jnp.float32))._replace(axes="B.C")
    block = (config.heads * cdiv(config.heads, SUBLANES), SUBLANES, LANES)
    static = Blocked(jax.ShapeDtypeStruct((batch, *block), jnp.float32), (1, *block), "B...")
    pre, post = (static if layout is not None and layout.has_static else None for layout in config.layouts)
    return Packed(
        inputs.q.like(config.dtype)._replace(axes="B.C"), inputs.k.like(config.dtype), inputs.v.like(config.dtype),
        wq=wq, wk=wk and wk.like(jnp.float32), static=(pre, post),
    )  # fmt: skip
