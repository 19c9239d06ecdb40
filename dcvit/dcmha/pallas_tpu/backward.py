"""Calls of the backward TPU kernels. `dcvit.dcmha.pallas_tpu.api` describes the algorithm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from dcvit.dcmha.numerics import cdiv
from dcvit.dcmha.pallas_tpu import mixing_gradients
from dcvit.dcmha.pallas_tpu.backward_tile import delta_kernel, gradient_kernel
from dcvit.dcmha.pallas_tpu.config import (
    LANES,
    MATRICES,
    SUBLANES,
    Index,
    Interpret,
    KernelConfig,
    block_specs,
    conditions,
    hidden_planes,
    key_shape,
    key_spec,
    query_shape,
    query_spec,
)
from dcvit.dcmha.pallas_tpu.matrices import with_matrices
from dcvit.dcmha.pallas_tpu.strips import broadcast_scratch, mixed_scratch
from dcvit.dcmha.pallas_tpu.weights import key_rows_scratch, packed_columns
from dcvit.dcmha.shapes import Array


class Output(NamedTuple):
    """Shape and block specification of one output of a kernel."""

    shape: jax.ShapeDtypeStruct
    spec: pl.BlockSpec


def backward(config: KernelConfig, inputs: dict[str, Array], interpret: Interpret) -> dict[str, Array]:
    """Return all gradients by name.

    dq, dk and dv are arrays of tokens, as their inputs. dwq, dwk and dstatic_… are float32 gradients of the packed
    weights.
    """
    inputs = with_matrices(config, inputs, MATRICES, interpret) | {k: inputs[k] for k in ("wk",) if k in inputs}
    if config.blocks_k > 1 and "delta" not in inputs:
        inputs = {**inputs, "delta": delta(config, inputs, interpret)}
    if config.queries_per_pass >= config.queries:
        return gradients(config, inputs, interpret)
    results = []
    for first in range(0, config.queries, config.queries_per_pass):
        queries = min(config.queries_per_pass, config.queries - first)
        part = config._replace(first_query=first, queries=queries)
        span = slice(first, first + part.blocks_q * part.block_q)
        by_column = ("q", "do", "lse", "delta", "mask")
        some = inputs | {name: inputs[name][..., span] for name in by_column if name in inputs}
        some |= {name: inputs[name][:, first // LANES : span.stop // LANES] for name in ("wq",) if name in inputs}
        results.append(gradients(part, some, interpret))
    return {
        name: jnp.concatenate([x[name] for x in results], axis=2) if name in ("dq", "dwq")
        else functools.reduce(jnp.add, [x[name].astype(jnp.float32) for x in results])
        for name in results[0]
    }  # fmt: skip


def delta(config: KernelConfig, inputs: dict[str, Array], interpret: Interpret) -> Array:
    """Return Σ_s P·dP of each row, (B H T) in float32, where dP is the gradient of the attention weights P."""
    batch, padded = len(inputs["q"]), config.blocks_q * config.block_q

    def key_block(i: Index, step: Index) -> Index:
        return jnp.minimum(config.first_key_block(i) + step, config.last_key_block(i))

    if config.mix_keys:
        inputs = {name: x for name, x in inputs.items() if name not in ("wk", "mix_post", "mix_pre_back")}
    specs = block_specs(config, inputs, lambda i, step: i, key_block)
    scratch = tile_scratch(config)
    names = (*inputs, "delta", *scratch)
    blocks = config.blocks_q
    out: Array = pl.pallas_call(
        lambda *refs: delta_kernel(config, names, *refs),
        grid=(batch, config.blocks_q, config.max_key_blocks),
        in_specs=list(specs.values()),
        out_specs=pl.BlockSpec((1, config.heads, config.block_q), lambda b, i, s: (b, 0, i)),
        out_shape=jax.ShapeDtypeStruct((batch, config.heads, padded), jnp.float32),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=config.vmem_bytes
        ),
        interpret=interpret,
        name="dcmha_delta",
        metadata=conditions(blocks * config.max_key_blocks, blocks, config.attended_tiles, blocks),
    )(*inputs.values())
    return out


def gradients(config: KernelConfig, inputs: dict[str, Array], interpret: Interpret) -> dict[str, Array]:
    """Return all gradients by name for the queries of one pass."""
    specs = block_specs(config, inputs, config.query_block, lambda j, i: j)
    outputs = gradient_outputs(config, inputs)
    scratch = gradient_scratch(config, inputs, outputs)
    names = (*inputs, *outputs, *scratch)
    results = pl.pallas_call(
        lambda *refs: gradient_kernel(config, names, *refs),
        grid=(len(inputs["q"]), config.blocks_k, config.blocks_q),
        in_specs=list(specs.values()),
        out_specs=[output.spec for output in outputs.values()],
        out_shape=[output.shape for output in outputs.values()],
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=config.vmem_bytes
        ),
        interpret=interpret,
        name="dcmha_gradients",
        metadata=None if config.is_single_tile else gradient_conditions(config, outputs),
    )(*inputs.values())
    found = dict(zip(outputs, results, strict=True))
    if config.mix_keys:
        found |= {name: mixing_gradients.static_gradients(config, x) for name, x in found.items() if "static" in name}
    return found


def gradient_conditions(config: KernelConfig, outputs: Mapping[str, Output]) -> dict[str, str]:
    """Return the metadata of the gradient kernel; a condition for gradients of static weights is empty without them."""
    once = [1] if any(name.startswith("dstatic") for name in outputs) else []
    blocks = config.blocks_k, config.blocks_q  # in which the first, or the last, block of the other side is visited
    return conditions(config.blocks_q * config.blocks_k, *blocks, *once, config.attended_tiles, *blocks, *once)


def gradient_outputs(config: KernelConfig, inputs: dict[str, Array]) -> dict[str, Output]:
    """Return the outputs of the gradient kernel by name."""
    batch, wide, narrow = len(inputs["q"]), inputs["q"].shape[1], inputs["k"].shape[2]
    block_q, last = config.block_q, config.blocks_k - 1
    padded_q = config.blocks_q * block_q
    found: dict[str, Output] = {}

    def add(
        name: str,
        dtype: DTypeLike,
        shape: tuple[int, ...],
        block: tuple[int, ...],
        index: Callable[..., tuple[Index, ...]],
    ) -> None:
        found[name] = Output(jax.ShapeDtypeStruct(shape, dtype), pl.BlockSpec(block, index))

    def completed(j: Index, i: Index) -> Index:  # the last key block completes the gradients of the queries
        return jnp.where(j == last, i, 0)

    def of_keys(name: str, width: int, dtype: DTypeLike) -> None:
        found[name] = Output(key_shape(config, batch, width, dtype), key_spec(config, width, lambda j, i: j))

    found["dq"] = Output(query_shape(config, batch, wide, config.dtype), query_spec(config, wide, completed))
    for name in ("dk", "dv"):
        of_keys(name, narrow, config.dtype)
    if "wq" in inputs:
        n = inputs["wq"].shape[2]
        add("dwq", jnp.float32, (batch, n, padded_q), (1, n, block_q), lambda b, j, i: (b, 0, completed(j, i)))
    if "wk" in inputs:
        of_keys("dwk", inputs["wk"].shape[2], jnp.float32)
    for name, layout in (("pre", config.pre), ("post", config.post)):
        if layout is not None and layout.has_static:
            number = config.heads * (cdiv(config.heads, SUBLANES) if config.mix_keys else config.heads // config.groups)
            block = (1, number, SUBLANES, LANES)
            add(f"dstatic_{name}", jnp.float32, (batch, *block[1:]), block, lambda b, j, i: (b, 0, 0, 0))
    return found


def tile_scratch(config: KernelConfig) -> dict[str, pl.MemoryRef]:
    """Return the VMEM buffers that both backward kernels have, by name."""
    plane = (config.heads, config.block_k, config.block_q)
    scratch = {
        "x": pltpu.VMEM(plane, jnp.float32),
        "y": pltpu.VMEM(plane, jnp.float32),
        "m": pltpu.VMEM((config.heads, 8, config.block_q), jnp.float32),
        "d": pltpu.VMEM((config.heads, 8, config.block_q), jnp.float32),
    }
    return scratch | broadcast_scratch(config) | mixed_scratch(config)


def gradient_scratch(
    config: KernelConfig, inputs: dict[str, Array], outputs: dict[str, Output]
) -> dict[str, pl.MemoryRef]:
    """Return the VMEM buffers of the gradient kernel by name: planes of a tile, and accumulators of gradients."""
    plane, wide = (config.block_k, config.block_q), config.heads * config.head_dim
    scratch = tile_scratch(config)
    scratch |= {name: pltpu.VMEM((config.heads, *plane), jnp.float32) for name in ("p", "dp")}
    scratch |= {name: pltpu.VMEM((config.heads, *plane), config.operand_dtype) for name in ("w", "da")}
    if not (config.is_single_tile and config.heads == config.key_heads):
        scratch["dq_acc"] = pltpu.VMEM((config.blocks_q, wide, config.block_q), jnp.float32)
        of_keys = pltpu.VMEM((config.key_heads * config.head_dim, config.block_k), jnp.float32)
        scratch |= {"dk_acc": of_keys, "dv_acc": of_keys}
    layouts = {"pre_hidden": config.pre, "post_hidden": config.post}
    hidden = {name: hidden_planes(config, layout) for name, layout in layouts.items()}
    hidden["g_hidden"] = max(hidden.values())
    scratch |= {name: pltpu.VMEM((n, *plane), jnp.float32) for name, n in hidden.items() if n}
    if "dwq" in outputs:
        n = packed_columns(config, "q")
        scratch["gq"] = pltpu.VMEM((n, 8, config.block_q), jnp.float32)
        scratch["gq_acc"] = pltpu.VMEM((config.blocks_q, n, config.block_q), jnp.float32)
    if "dwk" in outputs and config.mix_keys:
        columns = inputs["wk"].shape[2]
        scratch |= {"wk_cur": key_rows_scratch(columns), "dwk_rows": pltpu.VMEM((columns, LANES), jnp.float32)}
    elif "dwk" in outputs:
        scratch["gk"] = pltpu.VMEM((config.block_k, packed_columns(config, "k")), jnp.float32)
    for name in ("pre", "post") if config.mix_keys else ():
        if f"mix_{name}" in inputs:
            scratch[f"dmix_{name}"] = mixing_gradients.scratch(config, config.block_k // config.mix_keys + 1)
    for name in ("pre", "post"):
        if f"dstatic_{name}" in outputs:
            scratch[f"gstatic_{name}"] = pltpu.VMEM(outputs[f"dstatic_{name}"].shape.shape[1:], jnp.float32)
    return scratch
