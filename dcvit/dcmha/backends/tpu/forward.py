"""The forward TPU kernel. `dcvit.dcmha.backends.tpu.api` describes the algorithm."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.backends.tpu import mixing, tile
from dcvit.dcmha.backends.tpu.call import Blocked, KernelCall, Refs
from dcvit.dcmha.backends.tpu.config import Index, IndexMap, Interpret, KernelConfig, conditions
from dcvit.dcmha.backends.tpu.forward_stages import (
    finish_statistics,
    score_products,
    score_vectors,
    update_statistics,
    weight_products,
    weight_vectors,
)
from dcvit.dcmha.backends.tpu.mixing import with_matrices
from dcvit.dcmha.backends.tpu.packing import with_columns
from dcvit.dcmha.backends.tpu.strips import mixed_scratch, over_strips
from dcvit.dcmha.backends.tpu.tile import dot, scores
from dcvit.dcmha.numerics import MASKED_SCORE
from dcvit.dcmha.shapes import Array, Ref


def initialize_statistics(refs: Refs) -> None:
    """Reset the running maximum and sum at the first key block of a query block."""
    refs["m"][...] = jnp.full(refs["m"].shape, MASKED_SCORE, jnp.float32)
    refs["sums"][...] = jnp.zeros(refs["sums"].shape, jnp.float32)


def compute_scores(config: KernelConfig, refs: Refs, i: Index, j: Index, *, count: bool) -> None:
    """Write the composed and masked scores of a tile to `y`; `count` adds them to the running statistics."""
    scores(config, refs["k"], refs["q"], refs["x"])
    step_keys = config.strip * config.strips_per_step

    def count_previous_step(step: Array) -> None:
        rows = pl.ds(pl.multiple_of(jnp.maximum(step - 1, 0) * step_keys, config.strip), step_keys)
        update_statistics(config, refs, rows, valid=step > 0)

    vectors = functools.partial(score_vectors, config, refs, tile.visible_with_segments(config, refs, i, j))
    products = functools.partial(score_products, config, refs)
    over_strips(config, refs["mixed"], vectors, products, count_previous_step if count else None)
    if count:
        update_statistics(config, refs, slice(config.block_k - step_keys, config.block_k))


def compute_output(config: KernelConfig, refs: Refs) -> None:
    """Add the weights times the values of a tile to `acc`."""
    vectors, products = (functools.partial(stage, config, refs) for stage in (weight_vectors, weight_products))
    over_strips(config, refs["mixed"], vectors, products)
    # Values are far smaller than weights, which the MXU reads without a transposition.
    v = refs["v"][0, : config.block_k].T
    out = [dot(v[config.key_lanes(h)], refs["w"][h], (1, 0)) for h in range(config.heads)]
    for h in range(config.heads):
        refs["acc"][config.query_lanes(h)] += out[h]


def kernel(config: KernelConfig, refs: Refs) -> None:
    """Process one key block: statistics in phase 0, output in phase 1; grid index (b, i, phase, step)."""
    mixing.write_diagonal(config, refs["diagonal"])
    i, phase, step = pl.program_id(1), pl.program_id(2), pl.program_id(3)
    j = config.first_key_block(i) + step
    slots, steps = refs["x"].shape[0], config.max_key_blocks
    scores_of_block = refs["x"].at[step if slots > 1 else 0]
    refs = {**refs, "x": scores_of_block, "y": scores_of_block}
    attended = j <= config.last_key_block(i)
    attended &= tile.is_needed(refs, pl.program_id(0) * config.blocks_q + i, j)
    acc = refs["acc"]

    @pl.when((phase == 0) & (step == 0))
    def _() -> None:
        initialize_statistics(refs)

    @pl.when((phase == 0) & attended)
    def _() -> None:
        compute_scores(config, refs, i, j, count=True)

    @pl.when((phase == 1) & (step == 0))
    def _() -> None:
        finish_statistics(config, refs)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when((phase == 1) & attended)
    def _() -> None:
        if slots == 1:
            compute_scores(config, refs, i, j, count=False)
        compute_output(config, refs)

    @pl.when((phase == 1) & (step == steps - 1))
    def _() -> None:
        refs["o"][0] = acc[...].astype(refs["o"].dtype)


def forward(config: KernelConfig, inputs: dict[str, Blocked], interpret: Interpret) -> tuple[Array, Array]:
    """Return the output of all heads as an array of tokens, and each row's log-sum-exp (B H T) in units of log 2."""
    inputs = with_matrices(config, inputs, ("mix_pre", "mix_post"), interpret)
    letters = {"k": "K", "ids_k": "K", "mix_pre": "K", "v": "V", "mix_post": "V"}
    inputs = {name: x._replace(axes=x.axes.replace("S", letters.get(name, "S"))) for name, x in inputs.items()}
    batch, blocks, steps, tiles = len(inputs["q"].array), config.blocks_q, config.max_key_blocks, config.attended_tiles
    lse = jax.ShapeDtypeStruct((batch, config.heads, blocks * config.block_q), jnp.float32)
    call = KernelCall(
        name="dcmha_forward",
        grid=(batch, blocks, 2, steps),
        index_maps=index_maps(config),
        inputs=inputs,
        prefetched=tile.needed_blocks(config, inputs),
        outputs={"o": inputs["q"].like(config.dtype), "lse": with_columns(config, lse)},
        scratch=scratch(config),
        vmem_bytes=config.vmem_bytes,
        metadata=conditions(blocks * 2 * steps, blocks, tiles, blocks, tiles, blocks),
    )
    results = call.run(functools.partial(kernel, config), interpret)
    return results["o"], results["lse"]


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


def scratch(config: KernelConfig) -> dict[str, pl.MemoryRef]:
    """Return the VMEM buffers of the kernel by name."""
    heads, block_q, block_k = config.heads, config.block_q, config.block_k
    slots = config.max_key_blocks if keeps_all_scores(config) else 1
    return {
        "x": pltpu.VMEM((slots, heads, block_k, block_q), jnp.float32),  # scores of one or of all key blocks
        "w": pltpu.VMEM((heads, block_k, block_q), config.operand_dtype),  # composed attention weights of a tile
        "m": pltpu.VMEM((heads, 8, block_q), jnp.float32),  # maximum of each sublane; later the log-sum-exp
        "sums": pltpu.VMEM((heads, 8, block_q), jnp.float32),  # sum of each sublane
        "acc": pltpu.VMEM((heads * config.head_dim, block_q), jnp.float32),  # output of the key blocks so far
        **mixed_scratch(config),
    }


def keeps_all_scores(config: KernelConfig) -> bool:
    """Return True if the scores of a query block fit into two thirds of VMEM, so that they are computed only once."""
    plane = config.heads * config.block_k * config.block_q * 4
    return config.max_key_blocks * plane <= config.vmem_bytes * 2 // 3
