"""The forward TPU kernel for blocks of eight examples whose scores are one tile each.

An example has two stages, in which matrix products of its neighbors overlap with its vector operations:

| stage | vector operations | overlapping matrix products |
|---|---|---|
| 1 | pre-compose, and the statistics of the softmax | output of the previous example |
| 2 | attention weights, and post-compose | scores of the next example |
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.backends.tpu import interleaved, mixing
from dcvit.dcmha.backends.tpu.call import Blocked, KernelCall, Refs
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, Index, Interpret, KernelConfig
from dcvit.dcmha.backends.tpu.forward_stages import (
    finish_statistics,
    score_products,
    score_vectors,
    update_statistics,
    weight_products,
    weight_vectors,
)
from dcvit.dcmha.backends.tpu.packing import with_columns
from dcvit.dcmha.backends.tpu.strips import Task, mask_of, ring, run_all, run_stage
from dcvit.dcmha.backends.tpu.tile import dot, operand_scratch, visible
from dcvit.dcmha.backends.tpu.weights import rows_of, rows_scratch
from dcvit.dcmha.numerics import round_up
from dcvit.dcmha.shapes import Array

TOKENS = ("q", "k", "v", "weights")  # inputs with an axis of tokens


def kernel(config: KernelConfig, refs: Refs) -> None:
    """Compute the outputs and the log-sum-exp of the examples of a block, one after the other."""
    for name in TOKENS:
        if name in refs:
            interleaved.clear_rest(refs[f"{name}_tile"], refs[name].shape[0])
    if "diagonal" in refs:
        mixing.write_diagonal(config, refs["diagonal"])
    run_all(score_tasks(config, refs, 0))
    jax.lax.fori_loop(0, config.examples, lambda e, _: attend(config, refs, e), None)
    run_all(output_tasks(config, refs, config.examples - 1))


def attend(config: KernelConfig, refs: Refs, e: Index) -> None:
    """Run both stages of example `e`, with the output of the previous example and the scores of the next one."""
    previous, following = jnp.maximum(e - 1, 0), jnp.minimum(e + 1, config.examples - 1)
    pre_refs, post_refs = ({**refs, "wq": refs[rows]} if rows in refs else refs for rows in ("wq_rows", "wq_late"))
    is_visible = functools.partial(visible, config, 0, 0, mask_of(refs, e))
    run_stage(
        config,
        refs["mixed"],
        functools.partial(score_products, config, pre_refs),
        functools.partial(score_vectors, config, pre_refs, is_visible),
        [functools.partial(prepare_post, config, refs), *output_tasks(config, refs, previous)],
        lambda keys: update_statistics(config, refs, keys, is_first=keys.start == 0),
    )
    finish_statistics(config, refs, e)
    run_stage(
        config,
        refs["mixed"],
        functools.partial(weight_products, config, post_refs),
        functools.partial(weight_vectors, config, post_refs),
        score_tasks(config, refs, following),
    )


def score_tasks(config: KernelConfig, refs: Refs, e: Index) -> list[Task]:
    """Return tasks that compute the scores of example `e` and its pre-compose weights, before its first stage."""

    def tokens() -> None:
        interleaved.read(refs["q"], e, refs["q_tile"])
        interleaved.read(refs["k"], e, refs["k_tile"])

    def weights() -> None:
        if "weights" in refs:
            interleaved.read(refs["weights"], e, refs["weights_tile"])
            rows_of(config, refs["weights_tile"], refs.get("wq_rows"), refs.get("wk_cur"))
        if "mix_pre" in refs:
            mixing.build(config, "pre", refs.get("wk_cur"), refs.get("static_pre"), refs["mix_pre"])

    def scores(h: int) -> None:
        keys, queries = refs["k_tile"], refs["q_tile"]
        refs["x"][h] = dot(
            interleaved.columns(keys, config.key_lanes(h)), interleaved.columns(queries, config.query_lanes(h)), (1, 1)
        )

    return [tokens, *(functools.partial(scores, h) for h in range(config.heads)), weights]


def prepare_post(config: KernelConfig, refs: Refs) -> None:
    """Prepare the weights of the post-compose; later tasks overwrite `wq_rows` and `wk_cur` for the next example."""
    if "wq_late" in refs:
        refs["wq_late"][...] = refs["wq_rows"][...]
    if "mix_post" in refs:
        mixing.build(config, "post", refs.get("wk_cur"), refs.get("static_post"), refs["mix_post"])


def output_tasks(config: KernelConfig, refs: Refs, e: Index) -> list[Task]:
    """Return tasks that compute the output of example `e`."""
    v = refs["v_tile"]
    read = functools.partial(interleaved.read, refs["v"], e, v)
    return [read, *interleaved.query_products(config, refs["o"], e, v, refs["w"])]


def forward(config: KernelConfig, inputs: dict[str, Blocked], interpret: Interpret) -> tuple[Array, Array]:
    """Return the output of all heads as interleaved tokens, and each query's log-sum-exp (B H T) in units of log 2."""
    blocks = inputs["q"].array.shape[1]
    lse = jax.ShapeDtypeStruct((blocks * config.examples, config.heads, config.block_q), jnp.float32)
    call = KernelCall(
        name="dcmha_forward",
        grid=(blocks,),
        index_maps=interleaved.INDEX_MAPS,
        inputs=inputs,
        outputs={"o": inputs["q"].like(jnp.float32), "lse": with_columns(config, lse)},
        scratch=scratch(config, inputs),
        vmem_bytes=config.vmem_bytes,
    )
    results = call.run(functools.partial(kernel, config), interpret)
    return results["o"], results["lse"]


def scratch(config: KernelConfig, inputs: dict[str, Blocked]) -> dict[str, pl.MemoryRef]:
    """Return the VMEM buffers of the kernel by name."""
    heads, keys, queries, operand = config.heads, config.block_k, config.block_q, config.operand_dtype
    wide, narrow = heads * config.head_dim, config.key_heads * config.head_dim
    plane, row = (pltpu.VMEM((heads, rows, queries), jnp.float32) for rows in (keys, SUBLANES))
    found = {
        "x": plane,  # scores
        "y": plane,  # composed and masked scores
        "m": row,  # maximum of each sublane; later the log-sum-exp
        "sums": row,  # sum of each sublane
        "w": operand_scratch(config),  # composed attention weights
        "mixed": ring(config),  # key-wise parts and attention weights of the strips in work
        "q_tile": interleaved.tile(queries, wide, operand),  # tokens of one example
        "k_tile": interleaved.tile(keys, narrow, operand),
        "v_tile": interleaved.tile(keys, narrow, operand),
    }
    if "weights" in inputs:
        columns = inputs["weights"].array.shape[2] * LANES
        found["weights_tile"] = interleaved.tile(max(queries, round_up(keys, LANES)), columns, jnp.float32)
    wq_rows, wk_rows = rows_scratch(config)
    if wq_rows is not None:
        found |= {"wq_rows": wq_rows, "wq_late": wq_rows}  # for the pre-compose, and for the post-compose
    if wk_rows is not None:
        found["wk_cur"] = wk_rows
    for name, layout in (("pre", config.pre), ("post", config.post)):
        if layout is not None and layout.mixes:
            found[f"mix_{name}"], found["diagonal"] = mixing.scratch(config), mixing.diagonal_scratch()
    return found
