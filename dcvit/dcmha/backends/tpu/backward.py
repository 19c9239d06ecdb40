"""Calls of the backward TPU kernels. `dcvit.dcmha.backends.tpu.api` describes the algorithm."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.backends.tpu import mixing_gradients, tile
from dcvit.dcmha.backends.tpu.backward_tile import delta_kernel, gradient_kernel
from dcvit.dcmha.backends.tpu.call import Blocked, KernelCall
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, Index, Interpret, KernelConfig, conditions
from dcvit.dcmha.backends.tpu.mixing import MATRICES, with_matrices
from dcvit.dcmha.backends.tpu.packing import with_columns
from dcvit.dcmha.backends.tpu.strips import mixed_scratch
from dcvit.dcmha.backends.tpu.weights import key_rows_scratch, packed_columns
from dcvit.dcmha.numerics import cdiv
from dcvit.dcmha.shapes import Array, Ref


def backward(config: KernelConfig, inputs: dict[str, Blocked], interpret: Interpret) -> dict[str, Array]:
    """Return all gradients by name.

    dq, dk and dv have the layouts of the packed q, k and v. dwq, dwk and dstatic_… are float32 gradients of the packed
    weights.
    """
    inputs = with_matrices(config, inputs, MATRICES, interpret) | {k: inputs[k] for k in ("wk",) if k in inputs}
    if "delta" not in inputs:
        inputs = {**inputs, "delta": delta(config, inputs, interpret)}
    if config.queries_per_pass >= config.queries:
        return gradients(config, inputs, interpret)
    results = []
    for first in range(0, config.queries, config.queries_per_pass):
        queries = min(config.queries_per_pass, config.queries - first)
        part = config._replace(first_query=config.first_query + first, queries=queries)
        span = slice(first, first + part.blocks_q * part.block_q)
        by_column = ("q", "d_out", "lse", "delta", "mask", "ids_q")
        some = inputs | {name: part_of(inputs[name], (..., span)) for name in by_column if name in inputs}
        if "wq" in inputs:
            some["wq"] = part_of(inputs["wq"], (slice(None), slice(first // LANES, span.stop // LANES)))
        results.append(gradients(part, some, interpret))
    return {
        name: jnp.concatenate([x[name] for x in results], axis=2) if name in ("dq", "dwq")
        else functools.reduce(jnp.add, [x[name].astype(jnp.float32) for x in results])
        for name in results[0]
    }  # fmt: skip


def part_of(x: Blocked, index: tuple[Any, ...]) -> Blocked:
    """Return the declaration `x` with a part of its array, `array[index]`, and with the same blocks."""
    return x._replace(array=jnp.asarray(x.array)[index])


def delta(config: KernelConfig, inputs: dict[str, Blocked], interpret: Interpret) -> Blocked:
    """Return Σ_s P·dP of each row, (B H T) in float32, where dP is the gradient of the attention weights P."""

    def key_block(b: Index, i: Index, step: Index, *needed: Ref) -> Index:
        block = jnp.minimum(config.first_key_block(i) + step, config.last_key_block(i))
        return tile.nearest_needed(needed, b * config.blocks_q + i, block)

    inputs = {name: x for name, x in inputs.items() if name not in ("wk", "mix_post", "mix_pre_back")}
    blocks, steps = config.blocks_q, config.max_key_blocks
    out = inputs["lse"].like(jnp.float32)
    call = KernelCall(
        name="dcmha_delta",
        grid=(len(inputs["q"].array), blocks, steps),
        index_maps={"B": lambda b, *_: b, "T": lambda b, i, *_: i, "S": key_block},
        inputs=inputs,
        prefetched=tile.needed_blocks(config, inputs),
        outputs={"delta": out},
        scratch=tile_scratch(config),
        vmem_bytes=config.vmem_bytes,
        metadata=conditions(blocks * steps, blocks, config.attended_tiles, blocks),
    )
    return out._replace(array=call.run(functools.partial(delta_kernel, config), interpret)["delta"])


def gradients(config: KernelConfig, inputs: dict[str, Blocked], interpret: Interpret) -> dict[str, Array]:
    """Return all gradients by name, as `backward`, from a call of the gradient kernel, for the queries of a pass."""

    def query_block(b: Index, j: Index, i: Index, *needed: Ref) -> Index:
        return tile.nearest_needed(needed, b * config.blocks_k + j, config.query_block(j, i))

    def completed(
        b: Index, j: Index, i: Index, *_: Ref
    ) -> Index:  # the last key block completes the gradients of the queries
        return jnp.where(j == config.blocks_k - 1, i, 0)

    outputs = gradient_outputs(config, inputs)
    call = KernelCall(
        name="dcmha_gradients",
        grid=(len(inputs["q"].array), config.blocks_k, config.blocks_q),
        index_maps={"B": lambda b, *_: b, "T": query_block, "S": lambda b, j, *_: j, "C": completed},
        inputs=inputs,
        prefetched=tile.needed_blocks(config, inputs, of_keys=True),
        outputs=outputs,
        scratch=gradient_scratch(config, inputs, outputs),
        vmem_bytes=config.vmem_bytes,
        metadata=gradient_conditions(config, outputs),
    )
    found = call.run(functools.partial(gradient_kernel, config), interpret)
    return {name: mixing_gradients.static_gradients(config, x) if "static" in name else x for name, x in found.items()}


def gradient_conditions(config: KernelConfig, outputs: Mapping[str, Blocked]) -> dict[str, str]:
    """Return the metadata of the gradient kernel for scripts/tpu/step.py, see `conditions`."""
    once = [1] if any(name.startswith("dstatic") for name in outputs) else []
    blocks = config.blocks_k, config.blocks_q  # in which the first, or the last, block of the other side is visited
    return conditions(config.blocks_q * config.blocks_k, *blocks, *once, config.attended_tiles, *blocks, *once)


def gradient_outputs(config: KernelConfig, inputs: dict[str, Blocked]) -> dict[str, Blocked]:
    """Return the declared outputs of the gradient kernel by name; the axis letter C selects a complete query block."""
    batch = len(inputs["q"].array)
    found = {"dq": inputs["q"].like(config.dtype)._replace(axes="B.C")}
    found |= {f"d{name}": inputs[name].like(config.dtype) for name in ("k", "v")}
    if "wq" in inputs:
        shape = (batch, inputs["wq"].array.shape[2], config.blocks_q * config.block_q)
        found["dwq"] = with_columns(config, jax.ShapeDtypeStruct(shape, jnp.float32))._replace(axes="B.C")
    if "wk" in inputs:
        found["dwk"] = inputs["wk"].like(jnp.float32)
    for name, layout in (("pre", config.pre), ("post", config.post)):
        if layout is not None and layout.has_static:
            block = (config.heads * cdiv(config.heads, SUBLANES), SUBLANES, LANES)
            found[f"dstatic_{name}"] = Blocked(jax.ShapeDtypeStruct((batch, *block), jnp.float32), (1, *block), "B...")
    return found


def tile_scratch(config: KernelConfig) -> dict[str, pl.MemoryRef]:
    """Return the VMEM buffers that both backward kernels have, by name."""
    plane = pltpu.VMEM((config.heads, config.block_k, config.block_q), jnp.float32)
    row = pltpu.VMEM((config.heads, 8, config.block_q), jnp.float32)
    return {
        "x": plane,  # scores
        "y": plane,  # gradient of the composed weights; later the gradient of the logits
        "m": row,  # log-sum-exp of each query, broadcast over sublanes
        "d": row,  # delta, as `m`
        **mixed_scratch(config),
    }


def gradient_scratch(
    config: KernelConfig, inputs: dict[str, Blocked], outputs: dict[str, Blocked]
) -> dict[str, pl.MemoryRef]:
    """Return the VMEM buffers of the gradient kernel by name: planes of a tile, and accumulators of gradients."""
    plane, wide = (config.block_k, config.block_q), config.heads * config.head_dim
    scratch = tile_scratch(config)
    scratch["p"] = pltpu.VMEM((config.heads, *plane), jnp.float32)  # attention weights before the post-compose
    scratch["dp"] = scratch["p"]  # their gradient
    scratch["w"] = pltpu.VMEM((config.heads, *plane), config.operand_dtype)  # attention weights after it
    scratch["da"] = scratch["w"]  # gradient of the scores
    scratch["dq_acc"] = pltpu.VMEM((config.blocks_q, wide, config.block_q), jnp.float32)  # of all queries
    scratch["dk_acc"] = pltpu.VMEM((config.key_heads * config.head_dim, config.block_k), jnp.float32)
    scratch["dv_acc"] = scratch["dk_acc"]
    layouts = {"pre_hidden": config.pre, "post_hidden": config.post}
    hidden = {name: layout.hidden_planes(config.groups) if layout else 0 for name, layout in layouts.items()}
    hidden["g_hidden"] = max(hidden.values())  # of the transposed compose in use
    scratch |= {name: pltpu.VMEM((n, *plane), jnp.float32) for name, n in hidden.items() if n}
    if "dwq" in outputs:
        n = packed_columns(config, "q")
        scratch["gq"] = pltpu.VMEM((n, 8, config.block_q), jnp.float32)  # gradients of query-wise weights of a tile
        scratch["gq_acc"] = pltpu.VMEM((config.blocks_q, n, config.block_q), jnp.float32)  # of all queries
    if "dwk" in outputs:
        columns = inputs["wk"].array.shape[2]
        scratch["wk_cur"] = key_rows_scratch(columns)
        scratch["dwk_rows"] = pltpu.VMEM((columns, LANES), jnp.float32)  # gradients of key-wise weights
    for name in ("pre", "post"):
        if f"mix_{name}" in inputs:  # gradients of matrices, see `dcvit.dcmha.backends.tpu.mixing_gradients.diagonals`
            scratch[f"dmix_{name}"] = mixing_gradients.scratch(config, config.block_k // config.strip + 1)
    for name in ("pre", "post"):
        if f"dstatic_{name}" in outputs:  # not yet summed over a register
            scratch[f"gstatic_{name}"] = pltpu.VMEM(outputs[f"dstatic_{name}"].array.shape[1:], jnp.float32)
    return scratch
