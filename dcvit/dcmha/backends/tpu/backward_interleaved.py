"""The gradient TPU kernel for blocks of eight examples whose scores are one tile each.

An example has three stages (`dcvit.dcmha.backends.tpu.backward_stages`). Matrix products, and vector operations of
neighboring examples, overlap with the vector operations of each stage:

| stage | overlapping work |
|---|---|
| score | gradient of the composed weights; dq and the gradients of all weights of the previous example |
| post | dk of the previous example |
| logit | dv; scores of the next example |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.backends.tpu import backward_stages, interleaved, mixing, mixing_gradients
from dcvit.dcmha.backends.tpu.backward_stages import (
    compose_tensors,
    logit_products,
    logit_vectors,
    post_products,
    post_vectors,
    weight_products,
)
from dcvit.dcmha.backends.tpu.call import Blocked, KernelCall, Refs
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, ComposeName, Index, Interpret, KernelConfig
from dcvit.dcmha.backends.tpu.forward_stages import score_products
from dcvit.dcmha.backends.tpu.strips import Task, mask_of, ring, run_all, run_stage
from dcvit.dcmha.backends.tpu.tile import (
    Strip,
    broadcast_rows,
    dot,
    operand_scratch,
    planes,
    query_slices,
    save,
    split,
    visible,
)
from dcvit.dcmha.backends.tpu.weights import packed_columns, rows_of, rows_scratch, used_key_rows
from dcvit.dcmha.numerics import LOG2_E, cdiv, round_up
from dcvit.dcmha.shapes import Array, Ref

TOKENS = ("q", "k", "v", "d_out", "weights")  # inputs with an axis of tokens


def kernel(config: KernelConfig, refs: Refs) -> None:
    """Compute all gradients of the examples of a block."""
    last = config.examples - 1
    initialize(config, refs)
    run_all(prepare_next(config, refs, 0))
    jax.lax.fori_loop(0, config.examples, lambda e, _: differentiate(config, refs, e), None)
    advance_weights(config, refs)
    run_all([*query_gradients(config, refs, last), *weight_gradients(config, refs, last)])
    run_all(key_gradients(config, refs, last))


def differentiate(config: KernelConfig, refs: Refs, e: Index) -> None:
    """Run the three stages of example `e`, with the last tasks of the previous example and the first of the next one.

    For the first example, the tasks of the previous one compute values that are overwritten later.
    """
    previous, following = jnp.maximum(e - 1, 0), jnp.minimum(e + 1, config.examples - 1)
    advance_weights(config, refs)
    broadcast_rows(refs["lse"].at[pl.ds(e, 1)], refs["m"], config.heads, config.block_q)
    current = {**refs, "wq": refs["wq_rows"]} if "wq_rows" in refs else refs
    run_stage(
        config,
        refs["mixed"],
        functools.partial(score_products, config, {**current, "x": refs["x_next"]}),
        functools.partial(score_vectors, config, current, mask_of(refs, e)),
        [
            *output_products(config, refs, e),
            *query_gradients(config, refs, previous),
            *weight_gradients(config, refs, previous),
            *build(config, refs, "post", refs.get("wk_cur")),
            *build(config, refs, "post", refs.get("wk_cur"), back=True),
        ],
    )
    run_stage(
        config,
        refs["mixed"],
        functools.partial(post_products, config, current),
        functools.partial(post_vectors, config, current),
        [*key_gradients(config, refs, previous), *build(config, refs, "pre", refs.get("wk_cur"), back=True)],
        functools.partial(post_sums, config, refs),
    )
    finish_delta(config, refs)
    run_stage(
        config,
        refs["mixed"],
        functools.partial(logit_products, config, current),
        functools.partial(logit_vectors, config, current),
        [*value_gradients(config, refs, e), *prepare_next(config, refs, following)],
        functools.partial(query_weight_gradients, config, refs, "pre"),
    )


def score_vectors(config: KernelConfig, refs: Refs, mask: Ref | None, strip: Strip, buffers: Sequence[Ref]) -> None:
    """Compute a strip's attention weights, and copy scores from `x_next`, which the next example overwrites, to `x`."""
    for queries in query_slices(config):
        save(planes(config, refs["x_next"], strip, queries), refs["x"], strip, queries)
    is_visible = functools.partial(visible, config, 0, 0, mask)
    backward_stages.score_vectors(config, {**refs, "x": refs["x_next"]}, is_visible, strip, buffers)


def post_sums(config: KernelConfig, refs: Refs, keys: slice) -> None:
    """Add the share of `keys` to sums over keys: the post-compose's query-wise gradients, and delta in `d`."""
    query_weight_gradients(config, refs, "post", keys)
    for queries in query_slices(config):
        for h in range(config.heads):
            part = jnp.sum(split(refs["p"][h, keys, queries]) * split(refs["dp"][h, keys, queries]), axis=0)
            refs["d"][h, :, queries] = part if keys.start == 0 else refs["d"][h, :, queries] + part


def finish_delta(config: KernelConfig, refs: Refs) -> None:
    """Sum delta = Σ_s P·dP over the eight sublanes of `d`, and broadcast the sum to all of them."""
    for h in range(config.heads):
        refs["d"][h] = jnp.broadcast_to(jnp.sum(refs["d"][h], axis=0, keepdims=True), (SUBLANES, config.block_q))


def query_weight_gradients(config: KernelConfig, refs: Refs, compose_name: ComposeName, keys: slice) -> None:
    """Add the share of `keys` to the gradients `gq` of a compose's query-wise weights, which are sums over keys."""
    tensors = compose_tensors(config, refs, compose_name)
    if tensors is None:
        return
    for queries in query_slices(config):
        for h in range(config.heads):
            for column, product in weight_products(config, tensors, h, keys, queries):
                part, gq = jnp.sum(split(product), axis=0), refs["gq"]
                gq[column, :, queries] = part if keys.start == 0 else gq[column, :, queries] + part


def initialize(config: KernelConfig, refs: Refs) -> None:
    """Write the parts of the buffers that are the same for all examples."""
    for name in TOKENS:
        if name in refs:
            interleaved.clear_rest(refs[f"{name}_tile"], refs[name].shape[0])
    if "diagonal" in refs:
        mixing.write_diagonal(config, refs["diagonal"])


def advance_weights(config: KernelConfig, refs: Refs) -> None:
    """Shift the weight buffers by one example: current to previous, next to current."""
    if "wk_cur" in refs:
        rows = used_key_rows(config)
        refs["wk_prev"][rows] = refs["wk_cur"][rows]
        refs["wk_cur"][rows] = refs["wk_next"][rows]
    if "wq_rows" in refs:
        refs["wq_rows"][...] = refs["wq_next"][...]


def prepare_next(config: KernelConfig, refs: Refs, e: Index) -> list[Task]:
    """Return tasks that read example `e`, and compute its scores and the matrices of its pre-compose."""
    q, k = refs["q_tile"], refs["k_tile"]

    def tokens() -> None:
        interleaved.read(refs["q"], e, q)
        interleaved.read(refs["k"], e, k)

    def scores(h: int) -> None:
        refs["x_next"][h] = score_product(config, k, q, h)

    def weights() -> None:
        if "weights" in refs:
            interleaved.read(refs["weights"], e, refs["weights_tile"])
            rows_of(config, refs["weights_tile"], refs.get("wq_next"), refs.get("wk_next"))

    first = [tokens, weights, *build(config, refs, "pre", refs.get("wk_next"))]
    return [*first, *(functools.partial(scores, h) for h in range(config.heads))]


def build(
    config: KernelConfig, refs: Refs, compose_name: ComposeName, rows: Ref | None, *, back: bool = False
) -> list[Task]:
    """Return the task, if any, that builds the matrices of a compose, or with `back` of its transpose, from `rows`."""
    out, static = (
        refs.get(f"mix_{compose_name}_back" if back else f"mix_{compose_name}"),
        refs.get(f"static_{compose_name}"),
    )
    return [] if out is None else [lambda: mixing.build(config, compose_name, rows, static, out, transposed=back)]


def score_product(config: KernelConfig, keys: Ref, queries: Ref, h: int) -> Array:
    """Return the products of the tokens `keys` and `queries` of head `h`, (Bk, Bq)."""
    return dot(
        interleaved.columns(keys, config.key_lanes(h)), interleaved.columns(queries, config.query_lanes(h)), (1, 1)
    )


def output_products(config: KernelConfig, refs: Refs, e: Index) -> list[Task]:
    """Return tasks that compute the gradients dO·v of the composed weights of example `e`."""
    v, d_out = refs["v_tile"], refs["d_out_tile"]

    def tokens() -> None:
        interleaved.read(refs["v"], e, v)
        interleaved.read(refs["d_out"], e, d_out)

    def product(h: int) -> None:
        refs["y"][h] = score_product(config, v, d_out, h)

    return [tokens, *(functools.partial(product, h) for h in range(config.heads))]


def query_gradients(config: KernelConfig, refs: Refs, e: Index) -> list[Task]:
    """Return tasks that compute dqᵀ = kᵀ·dAᵀ of example `e` from the gradients dA of its scores."""
    k = refs["k_tile"]
    read = functools.partial(interleaved.read, refs["k"], e, k)
    return [read, *interleaved.query_products(config, refs["dq"], e, k, refs["da"], score_factor(config))]


def key_gradients(config: KernelConfig, refs: Refs, e: Index) -> list[Task]:
    """Return tasks that compute dkᵀ = qᵀ·dA of example `e` from the gradients dA of its scores."""
    q = refs["q_tile"]
    read = functools.partial(interleaved.read, refs["q"], e, q)
    return [read, *interleaved.key_products(config, refs["dk"], e, q, refs["da"], score_factor(config))]


def value_gradients(config: KernelConfig, refs: Refs, e: Index) -> list[Task]:
    """Return tasks that compute dvᵀ = dOᵀ·W of example `e` from its composed weights W."""
    return interleaved.key_products(config, refs["dv"], e, refs["d_out_tile"], refs["w"])


def score_factor(config: KernelConfig) -> float:
    """Return the factor that converts gradients of scores in units of log 2 to gradients of q·k."""
    return 1 / LOG2_E if config.pre is not None else config.scale


def weight_gradients(config: KernelConfig, refs: Refs, e: Index) -> list[Task]:
    """Return tasks that write the gradients of the compose weights of example `e`."""

    def query_wise() -> None:
        for c in range(refs["gq"].shape[0]):
            refs["dweights_rows"][c : c + 1, : config.block_q] = jnp.sum(refs["gq"][c], axis=0, keepdims=True)

    def write() -> None:
        rows = refs["dweights_rows"]
        interleaved.write(refs["dweights"], e, slice(0, rows.shape[0]), rows[...].T)

    work: list[Task] = []
    if "gq" in refs:
        work.append(query_wise)
    for name, layout in (("pre", config.pre), ("post", config.post)):
        if layout is not None and f"dmix_{name}" in refs:
            static = refs[f"dstatic_{name}"].at[e] if f"dstatic_{name}" in refs else None
            packed, wk, dwk = refs[f"dmix_{name}"], refs.get("wk_prev"), refs.get("dweights_rows")
            tensors = mixing_gradients.MatrixTensors(layout, packed, wk, dwk, static)
            for tile in range(cdiv(config.block_k, LANES)):
                task = functools.partial(mixing_gradients.matrix_gradients, config, tensors, tile, add_static=tile > 0)
                work.append(task)
    return [*work, write] if "dweights" in refs else work


def gradients(config: KernelConfig, inputs: dict[str, Blocked], interpret: Interpret) -> dict[str, Array]:
    """Return all gradients by name, as `dcvit.dcmha.backends.tpu.backward.backward`."""
    columns = inputs["weights"].array.shape[2] * LANES if "weights" in inputs else 0
    blocks = inputs["q"].array.shape[1]
    outputs = {f"d{name}": inputs[name].like(jnp.float32) for name in TOKENS if name in inputs and name != "d_out"}
    for name in ("static_pre", "static_post"):
        if name in inputs:
            block = (config.examples, config.heads * cdiv(config.heads, SUBLANES), SUBLANES, LANES)
            array = jax.ShapeDtypeStruct((blocks * block[0], *block[1:]), jnp.float32)
            outputs[f"d{name}"] = Blocked(array, block, "B...")
    call = KernelCall(
        name="dcmha_gradients",
        grid=(blocks,),
        index_maps=interleaved.INDEX_MAPS,
        inputs=inputs,
        outputs=outputs,
        scratch=scratch(config, columns),
        vmem_bytes=config.vmem_bytes,
    )
    found = call.run(functools.partial(kernel, config), interpret)
    return {name: mixing_gradients.static_gradients(config, x) if "static" in name else x for name, x in found.items()}


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
    for x in scratch(config, columns).values():
        itemsize = np.dtype(x.dtype).itemsize
        rows = round_up(x.shape[-2], SUBLANES * 4 // itemsize)  # complete registers
        total += math.prod((*x.shape[:-2], rows, x.shape[-1])) * itemsize
    return total


def scratch(config: KernelConfig, columns: int) -> dict[str, pl.MemoryRef]:
    """Return the VMEM buffers by name. `columns` is the number of columns of the packed weights in HBM."""
    heads, keys, queries, operand = config.heads, config.block_k, config.block_q, config.operand_dtype
    wide, narrow = heads * config.head_dim, config.key_heads * config.head_dim
    plane, row = (pltpu.VMEM((heads, rows, queries), jnp.float32) for rows in (keys, SUBLANES))
    found = {
        "x_next": plane,  # scores before the first stage
        "x": plane,  # scores after it
        "y": plane,  # gradient of the composed weights
        "p": plane,  # attention weights before the post-compose
        "dp": plane,  # their gradient
        "dl": plane,  # gradient of the logits
        "w": operand_scratch(config),  # attention weights after the post-compose
        "da": operand_scratch(config),  # gradient of the scores
        "m": row,  # log-sum-exp of each query, broadcast over sublanes
        "d": row,  # sums of P·dP in each sublane, later delta
        "mixed": ring(config),  # key-wise parts of composes and of transposed composes, for the strips in work
    }
    found |= {name: interleaved.tile(queries, wide, operand) for name in ("q_tile", "d_out_tile")}
    found |= {name: interleaved.tile(keys, narrow, operand) for name in ("k_tile", "v_tile")}
    if columns:
        tokens = max(queries, round_up(keys, LANES))
        found["weights_tile"] = interleaved.tile(tokens, columns, jnp.float32)
        found["dweights_rows"] = pltpu.VMEM((columns, tokens), jnp.float32)  # gradients of the previous example
    wq_rows, wk_rows = rows_scratch(config)
    if wq_rows is not None:
        found |= {"wq_rows": wq_rows, "wq_next": wq_rows}  # of the current example, and of the next one
        found["gq"] = pltpu.VMEM((packed_columns(config, "q"), SUBLANES, queries), jnp.float32)
    if wk_rows is not None:
        found |= dict.fromkeys(("wk_cur", "wk_next", "wk_prev"), wk_rows)
    return found | compose_scratch(config)


def compose_scratch(config: KernelConfig) -> dict[str, pl.MemoryRef]:
    """Return the buffers of hidden planes, of the matrices of `mixing`, and of the gradients of these matrices."""
    found: dict[str, pl.MemoryRef] = {}
    planes = [0]
    for name, layout in (("pre", config.pre), ("post", config.post)):
        if layout is None:
            continue
        planes.append(layout.hidden_planes(config.groups))
        if planes[-1]:
            found[f"{name}_hidden"] = pltpu.VMEM((planes[-1], config.block_k, config.block_q), jnp.float32)
        if layout.mixes:
            found[f"mix_{name}"] = found[f"mix_{name}_back"] = mixing.scratch(config)
            found[f"dmix_{name}"] = mixing_gradients.scratch(config, config.block_k // config.strip)
            found["diagonal"] = mixing.diagonal_scratch()
    if max(planes):
        found["g_hidden"] = pltpu.VMEM((max(planes), config.block_k, config.block_q), jnp.float32)
    return found
