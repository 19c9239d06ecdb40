"""Bodies of the backward TPU kernels: delta, and all gradients. `dcvit.dcmha.backends.tpu.backward` calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jax.experimental import pallas as pl

from dcvit.dcmha.backends.tpu import mixing, tile
from dcvit.dcmha.backends.tpu.backward_stages import (
    ComposeTensors,
    attention_weights,
    compose_tensors,
    logit_products,
    logit_vectors,
    post_products,
    post_vectors,
    score_vectors,
    weight_products,
)
from dcvit.dcmha.backends.tpu.call import Refs
from dcvit.dcmha.backends.tpu.compose import key_wise_matrix, strip_compose
from dcvit.dcmha.backends.tpu.config import ComposeName, Index, KernelConfig
from dcvit.dcmha.backends.tpu.forward_stages import score_products
from dcvit.dcmha.backends.tpu.mixing_gradients import MatrixTensors, matrix_gradients
from dcvit.dcmha.backends.tpu.strips import over_strips
from dcvit.dcmha.backends.tpu.tile import (
    Strip,
    Vectors,
    Visible,
    broadcast_rows,
    dot,
    planes,
    planes_of_all_queries,
    query_slices,
    scores,
    split,
    stack,
)
from dcvit.dcmha.backends.tpu.weights import transpose_key_weights
from dcvit.dcmha.numerics import LOG2_E
from dcvit.dcmha.shapes import Array, Ref

Stage: TypeAlias = Callable[[KernelConfig, Refs, Strip, Ref], None]  # products of a strip
CHUNK = 40  # keys that `weight_gradients` loads once for all sums of a head


def delta_kernel(config: KernelConfig, refs: Refs) -> None:
    """Add one key block to delta_h = Σ_s P_h·dP_h of a query block; grid index (b, i, j)."""
    mixing.write_diagonal(config, refs["diagonal"])
    i, step = pl.program_id(1), pl.program_id(2)
    j = config.first_key_block(i) + step

    @pl.when(step == 0)
    def _() -> None:
        broadcast_rows(refs["lse"], refs["m"], config.heads, config.block_q)
        refs["d"][...] = jnp.zeros(refs["d"].shape, jnp.float32)

    is_needed = tile.is_needed(refs, pl.program_id(0) * config.blocks_q + i, j)

    @pl.when((j <= config.last_key_block(i)) & is_needed)
    def _() -> None:
        scores(config, refs["k"], refs["q"], refs["x"])
        scores(config, refs["v"], refs["d_out"], refs["y"])

        is_visible = tile.visible_with_segments(config, refs, i, j)
        vectors, products = (
            functools.partial(add_delta, config, refs, is_visible),
            functools.partial(delta_products, config, refs),
        )
        over_strips(config, refs["mixed"], vectors, products)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        for h in range(config.heads):
            refs["delta"][0, h : h + 1, :] = jnp.sum(refs["d"][h], axis=0, keepdims=True)


def delta_products(config: KernelConfig, refs: Refs, strip: Strip, out: Ref) -> None:
    """Compute the key-wise parts of the pre-compose and of the transposed post-compose of a strip."""
    for n, (name, operand) in enumerate((("mix_pre", "x"), ("mix_post_back", "y"))):
        if name in refs:
            stacked = stack(config, planes_of_all_queries(config, refs[operand], strip))
            out[n] = dot(key_wise_matrix(config, refs, name, strip), stacked, (1, 0))


def add_delta(config: KernelConfig, refs: Refs, visible: Visible, strip: Strip, buffers: Sequence[Ref]) -> None:
    """Add the products P·dP of a strip, summed over its keys in each sublane, to `d`."""
    for queries in query_slices(config):
        p = attention_weights(config, refs, visible, strip, buffers[0], queries)
        post = strip_compose(config, refs, "post", buffers[1], queries)
        dp: Iterable[Array] = planes(config, refs["y"], strip, queries)
        if post is not None:
            dp, _ = post.transposed(planes(config, refs["y"], strip, queries))
        for h, (x, y) in enumerate(zip(p, dp, strict=True)):
            refs["d"][h, :, queries] += jnp.sum(x * y, axis=0)


def weight_gradients(config: KernelConfig, refs: Refs, tensors: ComposeTensors) -> None:
    """Write a tile's share of the gradients of one compose's query-wise weights to the rows of `gq`.

    Heads are processed one by one, so that a head's sums over keys stay in registers.
    """
    for h in range(config.heads):
        sums: dict[int, Array] = {}
        for start in range(0, config.block_k, CHUNK):
            keys = slice(start, min(start + CHUNK, config.block_k))
            for column, product in weight_products(config, tensors, h, keys, slice(None)):
                part = jnp.sum(split(product), axis=0)
                sums[column] = sums[column] + part if column in sums else part
        for column, part in sums.items():
            refs["gq"][column] = part


def tile_gradients(config: KernelConfig, refs: Refs, i: Index, j: Index) -> None:
    """Compute composed weights W and gradients dA of scores of a tile; add its share to all weights' gradients."""

    def run(vectors: Vectors, products: Stage) -> None:
        over_strips(config, refs["mixed"], vectors, functools.partial(products, config, refs))

    def add_weight_gradients(compose_name: ComposeName) -> None:
        if (tensors := compose_tensors(config, refs, compose_name)) is not None:
            weight_gradients(config, refs, tensors)

    scores(config, refs["k"], refs["q"], refs["x"])
    scores(config, refs["v"], refs["d_out"], refs["y"])
    is_visible = tile.visible_with_segments(config, refs, i, j)
    run(functools.partial(score_vectors, config, refs, is_visible), score_products)
    run(functools.partial(post_vectors, config, refs), post_products)
    add_weight_gradients("post")
    refs = {**refs, "dl": refs["y"]}  # dW is not needed any more
    run(functools.partial(logit_vectors, config, refs), logit_products)
    add_weight_gradients("pre")


def token_gradients(config: KernelConfig, refs: Refs, i: Index) -> None:
    """Add dqᵀ = kᵀ·dAᵀ, dkᵀ = qᵀ·dA and dvᵀ = dOᵀ·W of a tile to the accumulators.

    Tokens are transposed, not planes, because they are far smaller.
    """
    q, k, d_out = refs["q"][0], refs["k"][0, : config.block_k].T, refs["d_out"][0]
    for h in range(config.heads):
        lanes = config.query_lanes(h)
        refs["dq_acc"][i, lanes] += dot(k[config.key_lanes(h)], refs["da"][h], (1, 0))
        refs["dk_acc"][config.key_lanes(h)] += dot(q[lanes], refs["da"][h], (1, 1))
        refs["dv_acc"][config.key_lanes(h)] += dot(d_out[lanes], refs["w"][h], (1, 1))


def gradient_kernel(config: KernelConfig, refs: Refs) -> None:
    """Compute a tile's share of all gradients of an example; grid index (b, j, i), for key block j and query block i.

    Gradients of a key block accumulate over i. Gradients of all query blocks stay in VMEM and accumulate over j.
    """
    mixing.write_diagonal(config, refs["diagonal"])
    j, i = pl.program_id(1), pl.program_id(2)
    first_i, last_i = i == 0, i == config.blocks_q - 1
    first_j, last_j = j == 0, j == config.blocks_k - 1
    factor = 1 / LOG2_E if config.pre is not None else config.scale  # from scores in units of log 2 to q·k

    @pl.when(first_i)
    def _() -> None:
        clear(refs["dk_acc"], refs["dv_acc"], refs.get("dmix_pre"), refs.get("dmix_post"))

    @pl.when(first_j)
    def _() -> None:
        clear(refs["dq_acc"].at[i], refs["gq_acc"].at[i] if "gq_acc" in refs else None)

    @pl.when(first_i & first_j)
    def _() -> None:
        clear(refs.get("gstatic_pre"), refs.get("gstatic_post"))

    is_needed = tile.is_needed(refs, pl.program_id(0) * config.blocks_k + j, i)

    @pl.when((config.first_key_block(i) <= j) & (j <= config.last_key_block(i)) & is_needed)
    def _() -> None:
        broadcast_rows(refs["lse"], refs["m"], config.heads, config.block_q)
        broadcast_rows(refs["delta"], refs["d"], config.heads, config.block_q)
        tile_gradients(config, refs, i, j)
        token_gradients(config, refs, i)
        for c in range(refs["gq"].shape[0] if "gq" in refs else 0):
            refs["gq_acc"][i, c : c + 1, :] += jnp.sum(refs["gq"][c], axis=0, keepdims=True)

    @pl.when(last_i)
    def _() -> None:
        refs["dk"][0] = (refs["dk_acc"][...] * factor).astype(refs["dk"].dtype).T
        refs["dv"][0] = refs["dv_acc"][...].astype(refs["dv"].dtype).T
        write_matrix_gradients(config, refs)

    @pl.when(last_j)
    def _() -> None:
        refs["dq"][0] = (refs["dq_acc"][i] * factor).astype(refs["dq"].dtype)
        if "gq" in refs:
            refs["dwq"][0, : refs["gq"].shape[0]] = refs["gq_acc"][i]

    @pl.when(last_i & last_j)
    def _() -> None:
        for name in ("pre", "post"):
            if f"gstatic_{name}" in refs:
                refs[f"dstatic_{name}"][0] = refs[f"gstatic_{name}"][...]


def clear(*refs: Ref | None) -> None:
    """Fill references with zeros; None is ignored."""
    for ref in refs:
        if ref is not None:
            ref[...] = jnp.zeros(ref.shape, ref.dtype)


def write_matrix_gradients(config: KernelConfig, refs: Refs) -> None:
    """Write gradients of a key block's key-wise weights, and add those of static weights, from those of matrices."""
    if "wk" in refs and "wk_cur" in refs:
        transpose_key_weights(refs["wk"], refs["wk_cur"])
    for name, layout in (("pre", config.pre), ("post", config.post)):
        if layout is not None and f"dmix_{name}" in refs:
            packed = refs[f"dmix_{name}"]
            blocks, static = packed.at[: packed.shape[0] - 1], refs.get(f"gstatic_{name}")
            tensors = MatrixTensors(layout, blocks, refs.get("wk_cur"), refs.get("dwk_rows"), static)
            matrix_gradients(config, tensors, 0, add_static=True)
    if "dwk_rows" in refs:
        refs["dwk"][0] = refs["dwk_rows"][...].T[: config.block_k]
