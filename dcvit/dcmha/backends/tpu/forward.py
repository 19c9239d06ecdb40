"""The forward TPU kernel for one example in tiles. `dcvit.dcmha.backends.tpu.api` describes the algorithm."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Generic

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dcvit.dcmha.backends.tpu import mixing, tile
from dcvit.dcmha.backends.tpu.call import Blocked, ComposePair, Declared, KernelCall, Memory, Packed, vmem
from dcvit.dcmha.backends.tpu.config import Index, IndexMap, Interpret, KernelConfig, conditions
from dcvit.dcmha.backends.tpu.packing import with_columns
from dcvit.dcmha.backends.tpu.stages import ForwardStages, composes, in_tile
from dcvit.dcmha.numerics import MASKED_SCORE
from dcvit.dcmha.shapes import Array, Ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs(Generic[Memory]):
    """References of the kernel."""

    needed: Memory | None  # see `tile.needed_blocks`
    inputs: Packed[Memory]
    composes: ComposePair[Memory]
    o: Memory  # output
    lse: Memory  # log-sum-exp of each query, an output
    x: Memory  # scores of one or of all key blocks, later composed and masked
    w: Memory  # composed attention weights of a tile
    m: Memory  # maximum of each sublane; later the log-sum-exp
    sums: Memory  # sum of each sublane
    acc: Memory  # output of the key blocks so far
    mixed: Memory  # see `tile.over_strips`
    diagonal: Memory


def compute_scores(refs: Refs[Ref], stages: ForwardStages, *, count: bool) -> None:
    """Write the composed and masked scores of a tile to `x`; `count` adds them to the running statistics."""
    config = stages.config
    tile.scores(config, refs.inputs.k, refs.inputs.q, stages.x)
    step_keys = config.strip * config.strips_per_step

    def count_previous_step(step: Array) -> None:
        rows = pl.ds(pl.multiple_of(jnp.maximum(step - 1, 0) * step_keys, config.strip), step_keys)
        stages.update_statistics(rows, valid=step > 0)

    tile.over_strips(
        config, refs.mixed, stages.score_vectors, stages.score_products, count_previous_step if count else None
    )
    if count:
        stages.update_statistics(slice(config.block_k - step_keys, config.block_k))


def compute_output(refs: Refs[Ref], stages: ForwardStages) -> None:
    """Add the weights times the values of a tile to `acc`."""
    config = stages.config
    tile.over_strips(config, refs.mixed, stages.weight_vectors, stages.weight_products)
    # Values are far smaller than weights, which the MXU reads without a transposition.
    v = refs.inputs.v[0, : config.block_k].T
    out = [tile.dot(v[config.key_lanes(h)], refs.w[h], (1, 0)) for h in range(config.heads)]
    for h in range(config.heads):
        refs.acc[config.query_lanes(h)] += out[h]


def kernel(config: KernelConfig, refs: Refs[Ref]) -> None:
    """Process one key block: statistics in phase 0, output in phase 1; grid index (b, i, phase, step)."""
    mixing.write_diagonal(config, refs.diagonal)
    i, phase, step = pl.program_id(1), pl.program_id(2), pl.program_id(3)
    j = config.first_key_block(i) + step
    slots, steps = refs.x.shape[0], config.max_key_blocks
    x = refs.x.at[step if slots > 1 else 0]
    pre, post = composes(
        config, refs.composes, (refs.inputs.wq, refs.inputs.wq), refs.diagonal, near=tile.near(config, i, j)
    )  # fmt: skip
    stages = ForwardStages(
        config=config, visible=tile.visible(config, refs.inputs, i, j), pre=pre, post=post, x=x, y=x, m=refs.m,
        w=refs.w, sums=refs.sums,
    )  # fmt: skip
    attended = j <= config.last_key_block(i)
    attended &= tile.is_needed(refs.needed, pl.program_id(0) * config.blocks_q + i, j)

    @pl.when((phase == 0) & (step == 0))
    def _() -> None:
        refs.m[...] = jnp.full(refs.m.shape, MASKED_SCORE, jnp.float32)
        refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)

    in_tile(stages, i, j, (phase == 0) & attended, functools.partial(compute_scores, refs, count=True))

    @pl.when((phase == 1) & (step == 0))
    def _() -> None:
        stages.finish_statistics(refs.lse)
        refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)

    def compute_phase_1(stages: ForwardStages) -> None:
        if slots == 1:
            compute_scores(refs, stages, count=False)
        compute_output(refs, stages)

    in_tile(stages, i, j, (phase == 1) & attended, compute_phase_1)

    @pl.when((phase == 1) & (step == steps - 1))
    def _() -> None:
        refs.o[0] = refs.acc[...].astype(refs.o.dtype)


def forward(config: KernelConfig, inputs: Packed[Blocked], interpret: Interpret) -> tuple[Array, Array]:
    """Return the output of all heads as an array of tokens, and each row's log-sum-exp (B H T) in units of log 2."""
    pre, post = mixing.matrices(config, inputs, interpret, transposed=False)
    pre = dataclasses.replace(pre, matrices=pre.matrices and pre.matrices.read_by("K"))
    post = dataclasses.replace(post, matrices=post.matrices and post.matrices.read_by("V"))
    k, v, ids_k = inputs.k.read_by("K"), inputs.v.read_by("V"), inputs.ids_k and inputs.ids_k.read_by("K")
    inputs = dataclasses.replace(inputs, k=k, v=v, ids_k=ids_k, wk=None, static=(None, None))
    batch, blocks, steps, tiles = len(inputs.q.array), config.blocks_q, config.max_key_blocks, config.tile_counts
    lse = jax.ShapeDtypeStruct((batch, config.heads, blocks * config.block_q), jnp.float32)
    heads, plane = config.heads, (config.heads, config.block_k, config.block_q)
    refs: Refs[Declared] = Refs(
        tile.needed_blocks(config, inputs), inputs, (pre, post), o=inputs.q.like(config.dtype),
        lse=with_columns(config, lse), x=vmem((steps if keeps_all_scores(config) else 1, *plane)),
        w=vmem(plane, config.operand_dtype), m=vmem((heads, 8, config.block_q)), sums=vmem((heads, 8, config.block_q)),
        acc=vmem((heads * config.head_dim, config.block_q)), mixed=tile.mixed_buffer(config),
        diagonal=mixing.diagonal_buffer(),
    )  # fmt: skip
    call = KernelCall(
        name="dcmha_forward",
        grid=(batch, blocks, 2, steps),
        index_maps=index_maps(config),
        refs=refs,
        vmem_bytes=config.vmem_bytes,
        metadata=conditions(blocks * 2 * steps, blocks, *tiles, blocks, *tiles, blocks),
    )
    found: Refs[Array] = call.run(functools.partial(kernel, config), interpret)
    return found.o, found.lse


def index_maps(config: KernelConfig) -> dict[str, IndexMap]:
    """Return the index maps of the grid (b, i, phase, step): V for inputs of phase 1, K for phase 0 or both."""
    keeps = keeps_all_scores(config)

    def nearest(b: Index, i: Index, block: Index, needed: Sequence[Ref]) -> Index:
        return tile.nearest_needed(needed, b * config.blocks_q + i, block)

    def key_block(b: Index, i: Index, phase: Index, step: Index, *needed: Ref) -> Index:
        return nearest(b, i, jnp.minimum(config.first_key_block(i) + step, config.last_key_block(i)), needed)

    def block_of_k(b: Index, i: Index, phase: Index, step: Index, *needed: Ref) -> Index:
        block = key_block(b, i, phase, step, *needed)
        if not keeps:
            return block
        last = nearest(b, i, config.last_key_block(i), needed)
        return jnp.where(phase == 0, block, last)  # with kept scores, phase 1 does not read keys

    def block_of_v(b: Index, i: Index, phase: Index, step: Index, *needed: Ref) -> Index:
        block = key_block(b, i, phase, step, *needed)
        return jnp.where(phase == 1, block, nearest(b, i, config.first_key_block(i), needed))

    return {"B": lambda b, *_: b, "T": lambda b, i, *_: i, "S": key_block, "K": block_of_k, "V": block_of_v}


def keeps_all_scores(config: KernelConfig) -> bool:
    """Return True if the scores of a query block fit into two thirds of VMEM, so that they are computed only once."""
    plane = config.heads * config.block_k * config.block_q * 4
    return config.max_key_blocks * plane <= config.vmem_bytes * 2 // 3
