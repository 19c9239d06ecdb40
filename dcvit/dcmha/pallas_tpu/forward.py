"""The forward TPU kernel. `dcvit.dcmha.pallas_tpu.api` describes the algorithm."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.numerics import MASKED_SCORE
from dcvit.dcmha.pallas_tpu import mixing
from dcvit.dcmha.pallas_tpu.call import Blocked, KernelCall, Refs
from dcvit.dcmha.pallas_tpu.config import Index, IndexMap, Interpret, KernelConfig, Rows, conditions
from dcvit.dcmha.pallas_tpu.matrices import with_matrices
from dcvit.dcmha.pallas_tpu.packing import with_columns
from dcvit.dcmha.pallas_tpu.strips import (
    Strip,
    broadcast_scratch,
    key_wise_product,
    mixed_scratch,
    over_strips,
    stack,
    visible,
)
from dcvit.dcmha.pallas_tpu.tile import (
    StoredPlanes,
    dot,
    join,
    logits,
    queries_together,
    scores,
    split,
    strip_compose,
    strip_rows,
)
from dcvit.dcmha.shapes import Array, Ref, not_none


def initialize_statistics(refs: Refs) -> None:
    """Reset the running maximum and sum at the first key block of a query block."""
    refs["m"][...] = jnp.full(refs["m"].shape, MASKED_SCORE, jnp.float32)
    refs["sums"][...] = jnp.zeros(refs["sums"].shape, jnp.float32)


def compute_scores(config: KernelConfig, refs: Refs, i: Index, j: Index, slot: Index, *, count: bool) -> None:
    """Write the composed and masked scores of a tile to `x`; `count` adds them to the running statistics."""
    scores(config, refs["k"], refs["q"], refs["x"].at[slot])
    step_keys = config.strip * config.strips_per_step

    def planes(strip: Strip, queries: slice) -> StoredPlanes:
        return StoredPlanes(lambda h: split(refs["x"][slot, h, strip.rows, queries]), config.heads)

    def product(strip: Strip, out: Ref) -> None:
        key_wise_product(
            config, refs, refs.get("mix_pre"), stack(config, planes(strip, slice(0, config.block_q))), strip, out.at[0]
        )

    def compose(strip: Strip, buffers: Sequence[Ref | None]) -> None:
        for queries in queries_together(config):
            pre = strip_compose(config, refs, "pre", buffers[0], queries)
            a: Sequence[Array] = planes(strip, queries)
            if config.family == "vector":  # static weights read all heads for each one, which replaces its scores
                a = list(a)
            out, _ = logits(config, a, pre, visible(config, i, j, strip, refs.get("mask"), queries))
            for h, x in enumerate(out):
                refs["x"][slot, h, strip.rows, queries] = join(x)

    def count_previous_step(step: Array) -> None:
        rows = pl.ds(pl.multiple_of(jnp.maximum(step - 1, 0) * step_keys, config.strip), step_keys)
        update_statistics(config, refs, slot, rows, step > 0)

    over_strips(config, refs, ("pre",), compose, product, count_previous_step if count else None)
    if count:
        update_statistics(config, refs, slot, slice(config.block_k - step_keys, config.block_k), True)


def update_statistics(config: KernelConfig, refs: Refs, slot: Index, rows: Rows, valid: Array | bool) -> None:
    """Add scores to the running maximum and sum of each sublane if `valid`."""
    for h in range(config.heads):
        x = split(refs["x"][slot, h, rows, :])
        before, sums = refs["m"][h], refs["sums"][h]
        m = jnp.maximum(before, jnp.max(x, axis=0))
        refs["m"][h] = jnp.where(valid, m, before)
        refs["sums"][h] = jnp.where(valid, sums * jnp.exp2(before - m) + jnp.sum(jnp.exp2(x - m[None]), axis=0), sums)


def finish_statistics(config: KernelConfig, refs: Refs) -> None:
    """Reduce the eight sublanes and store the log-sum-exp in `m` and `lse`; 0 for a fully masked query."""
    for h in range(config.heads):
        m = jnp.max(refs["m"][h], axis=0, keepdims=True)
        sums = jnp.sum(refs["sums"][h] * jnp.exp2(refs["m"][h] - m), axis=0, keepdims=True)
        lse = jnp.where(m > MASKED_SCORE / 2, m + jnp.log2(sums), 0.0)
        refs["lse"][0, h : h + 1, :] = lse
        refs["m"][h] = jnp.broadcast_to(lse, (8, config.block_q))


def compute_output(config: KernelConfig, refs: Refs, slot: Index) -> None:
    """Add the weights times the values of a tile to `acc`, or write them to `o` if there is no other tile."""

    def weights(strip: Strip, h: int, queries: slice) -> Array:
        return jnp.exp2(split(refs["x"][slot, h, strip.rows, queries]) - refs["m"][h, :, queries][None])

    def product(strip: Strip, out: Ref) -> None:
        for h in range(config.heads):
            out[1, strip_rows(config, h), :] = join(weights(strip, h, slice(0, config.block_q)))
        key_wise_product(config, refs, refs.get("mix_post"), out[1].astype(config.operand_dtype), strip, out.at[0])

    def computed(strip: Strip, buffers: Sequence[Ref | None], queries: slice) -> Sequence[Array]:
        if config.family == "matrix":
            return StoredPlanes(lambda h: not_none(buffers[1])[:, strip_rows(config, h), queries], config.heads)
        return [weights(strip, h, queries) for h in range(config.heads)]

    def compose_weights(strip: Strip, buffers: Sequence[Ref | None]) -> None:
        for queries in queries_together(config):
            post = strip_compose(config, refs, "post", buffers[0], queries)
            p = computed(strip, buffers, queries)
            for h, x in enumerate(p if post is None else post.compose(p)[0]):
                refs["w"][h, strip.rows, queries] = join(x).astype(refs["w"].dtype)

    over_strips(config, refs, ("post",), compose_weights, product)
    v = refs["v"][
        0, : config.block_k
    ].T  # values are far smaller than weights, which the matrix unit reads without a transposition
    out = [dot(v[config.key_lanes(h)], refs["w"][h], (1, 0)) for h in range(config.heads)]
    if "acc" not in refs:
        refs["o"][0] = jnp.concatenate([x.astype(refs["o"].dtype) for x in out], axis=0)
    else:
        for h in range(config.heads):
            refs["acc"][config.query_lanes(h)] += out[h]


def kernel(config: KernelConfig, refs: Refs) -> None:
    """Process one key block: statistics in phase 0, output in phase 1; grid index (b, i, phase, step)."""
    if "diagonal" in refs:
        mixing.write_diagonal(config, refs["diagonal"])
    i, phase, step = (0, 0, 0) if config.is_single_tile else (pl.program_id(1), pl.program_id(2), pl.program_id(3))
    j = config.first_key_block(i) + step
    slots, steps = refs["x"].shape[0], config.max_key_blocks
    slot = step if slots > 1 else 0
    if steps == 1:
        initialize_statistics(refs)
        compute_scores(config, refs, i, j, slot, count=True)
        finish_statistics(config, refs)
        compute_output(config, refs, slot)
        return
    attended = j <= config.last_key_block(i)
    acc = refs["acc"]

    @pl.when((phase == 0) & (step == 0))
    def _() -> None:
        initialize_statistics(refs)

    @pl.when((phase == 0) & attended)
    def _() -> None:
        compute_scores(config, refs, i, j, slot, count=True)

    @pl.when((phase == 1) & (step == 0))
    def _() -> None:
        finish_statistics(config, refs)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when((phase == 1) & attended)
    def _() -> None:
        if slots == 1:
            compute_scores(config, refs, i, j, slot, count=False)
        compute_output(config, refs, slot)

    @pl.when((phase == 1) & (step == steps - 1))
    def _() -> None:
        refs["o"][0] = acc[...].astype(refs["o"].dtype)


def forward(config: KernelConfig, inputs: dict[str, Blocked], interpret: Interpret) -> tuple[Array, Array]:
    """Return the output of all heads as an array of tokens, and each row's log-sum-exp (B H T) in units of log 2."""
    inputs = with_matrices(config, inputs, ("mix_pre", "mix_post"), interpret)
    letters = {"k": "K", "mix_pre": "K", "v": "V", "mix_post": "V"}
    inputs = {name: x._replace(axes=x.axes.replace("S", letters.get(name, "S"))) for name, x in inputs.items()}
    batch, blocks, steps, tiles = len(inputs["q"].array), config.blocks_q, config.max_key_blocks, config.attended_tiles
    phases = 1 if steps == 1 else 2
    lse = jax.ShapeDtypeStruct((batch, config.heads, blocks * config.block_q), jnp.float32)
    call = KernelCall(
        name="dcmha_forward",
        grid=(batch, blocks, phases, steps),
        index_maps=index_maps(config),
        inputs=inputs,
        outputs={"o": inputs["q"].like(config.dtype), "lse": with_columns(config, lse)},
        scratch=scratch(config),
        vmem_bytes=config.vmem_bytes,
        metadata=conditions(blocks * phases * steps, blocks, tiles, blocks, tiles, blocks) if steps > 1 else None,
    )
    results = call.run(functools.partial(kernel, config), interpret)
    return results["o"], results["lse"]


def index_maps(config: KernelConfig) -> dict[str, IndexMap]:
    """Return the index maps of the grid (b, i, phase, step): K of keys and V of values, which one phase reads alone."""
    keeps, phases = keeps_all_scores(config), 1 if config.max_key_blocks == 1 else 2

    def key_block(b: Index, i: Index, phase: Index, step: Index) -> Index:
        return jnp.minimum(config.first_key_block(i) + step, config.last_key_block(i))

    def block_of_k(b: Index, i: Index, phase: Index, step: Index) -> Index:
        block = key_block(b, i, phase, step)
        if not keeps or phases == 1:
            return block
        return jnp.where(phase == 0, block, config.last_key_block(i))  # with kept scores, phase 1 does not read keys

    def block_of_v(b: Index, i: Index, phase: Index, step: Index) -> Index:
        block = key_block(b, i, phase, step)
        return block if phases == 1 else jnp.where(phase == 1, block, config.first_key_block(i))

    return {"B": lambda b, *_: b, "T": lambda b, i, *_: i, "S": key_block, "K": block_of_k, "V": block_of_v}


def scratch(config: KernelConfig) -> dict[str, pl.MemoryRef]:
    """Return the buffers in VMEM by name."""
    heads, block_q, block_k = config.heads, config.block_q, config.block_k
    slots = config.max_key_blocks if keeps_all_scores(config) else 1
    found = {
        "x": pltpu.VMEM((slots, heads, block_k, block_q), jnp.float32),  # scores of one or of all key blocks
        "w": pltpu.VMEM((heads, block_k, block_q), config.operand_dtype),  # composed attention weights of a tile
        "m": pltpu.VMEM((heads, 8, block_q), jnp.float32),  # maximum of each sublane; later the log-sum-exp
        "sums": pltpu.VMEM((heads, 8, block_q), jnp.float32),  # sum of each sublane
    }
    found |= broadcast_scratch(config) | mixed_scratch(config)
    if config.max_key_blocks > 1:
        found["acc"] = pltpu.VMEM((heads * config.head_dim, block_q), jnp.float32)  # output of the key blocks so far
    return found


def keeps_all_scores(config: KernelConfig) -> bool:
    """Return True if the scores of a query block fit into two thirds of VMEM, so that they are computed only once."""
    plane = config.heads * config.block_k * config.block_q * 4
    return config.max_key_blocks * plane <= config.vmem_bytes * 2 // 3
