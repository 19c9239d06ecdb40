"""Bodies of the backward TPU kernels: delta, and all gradients. `dcvit.dcmha.pallas_tpu.backward` calls them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl

from dcvit.dcmha.numerics import LOG2_E
from dcvit.dcmha.pallas_tpu import mixing
from dcvit.dcmha.pallas_tpu.call import Refs
from dcvit.dcmha.pallas_tpu.config import LANES, ComposeLayout, Index, KernelConfig
from dcvit.dcmha.pallas_tpu.mixing_gradients import diagonals, matrix_gradients
from dcvit.dcmha.pallas_tpu.strips import Strip, key_wise_product, over_strips, stack, visible
from dcvit.dcmha.pallas_tpu.tile import (
    HiddenPlanes,
    StoredPlanes,
    StripCompose,
    broadcast_rows,
    dot,
    join,
    logits,
    queries_together,
    scores,
    split,
    strip_compose,
    total,
)
from dcvit.dcmha.pallas_tpu.weights import transpose_key_weights
from dcvit.dcmha.shapes import Array, Ref, not_none

CHUNK = 40  # keys that `weight_gradients` loads once for all sums of a head


def planes(config: KernelConfig, ref: Ref, strip: Strip, queries: slice) -> StoredPlanes:
    """Return the planes of all heads in a strip."""
    return StoredPlanes(lambda h: split(ref[h, strip.rows, queries]), config.heads)


def planes_of_all_queries(config: KernelConfig, ref: Ref, strip: Strip) -> StoredPlanes:
    """Return the planes of all heads in a strip for all queries of the tile."""
    return planes(config, ref, strip, slice(0, config.block_q))


def attention_weights(
    config: KernelConfig, refs: Refs, i: Index, j: Index, strip: Strip, buffer: Ref | None, queries: slice
) -> Iterator[Array]:
    """Return the attention weights P of a strip, one head after the other.

    The hidden planes of the pre-compose are stored if they have a buffer.
    """
    pre = strip_compose(config, refs, "pre", buffer, queries)
    a = planes(config, refs["x"], strip, queries)
    out, hidden = logits(config, a, pre, visible(config, i, j, strip, refs.get("mask"), queries))
    save_hidden(pre, hidden, refs.get("pre_hidden"), strip, queries)
    return (jnp.exp2(x - refs["m"][h, :, queries][None]) for h, x in enumerate(out))


def save_hidden(
    compose: StripCompose | None, hidden: HiddenPlanes, out: Ref | None, strip: Strip, queries: slice
) -> None:
    """Write hidden planes of a strip, if they have a buffer."""
    if compose is not None and out is not None:
        compose.save_hidden(hidden, out.at[:, :, queries], strip.rows)


def delta_kernel(config: KernelConfig, refs: Refs) -> None:
    """Compute delta_h = Σ_s P_h·dP_h of a query block; grid index (b, i, j)."""
    if "diagonal" in refs:
        mixing.write_diagonal(config, refs["diagonal"])
    i, step = pl.program_id(1), pl.program_id(2)
    j = config.first_key_block(i) + step

    @pl.when(step == 0)
    def _() -> None:
        broadcast_rows(refs["lse"], refs["m"], config.heads, config.block_q)
        refs["d"][...] = jnp.zeros(refs["d"].shape, jnp.float32)

    @pl.when(j <= config.last_key_block(i))
    def _() -> None:
        scores(config, refs["k"], refs["q"], refs["x"])
        scores(config, refs["v"], refs["do"], refs["y"])

        def product(strip: Strip, out: Ref) -> None:
            key_wise_product(
                config,
                refs,
                refs.get("mix_pre"),
                stack(config, planes_of_all_queries(config, refs["x"], strip)),
                strip,
                out.at[0],
            )
            key_wise_product(
                config,
                refs,
                refs.get("mix_post_back"),
                stack(config, planes_of_all_queries(config, refs["y"], strip)),
                strip,
                out.at[1],
            )

        def add(strip: Strip, buffers: Sequence[Ref | None]) -> None:
            for queries in queries_together(config):
                p = attention_weights(config, refs, i, j, strip, buffers[0], queries)
                post = strip_compose(config, refs, "post", buffers[1], queries)
                dp: Iterable[Array] = planes(config, refs["y"], strip, queries)
                if post is not None:
                    dp, _ = post.transposed(planes(config, refs["y"], strip, queries))
                for h, (x, y) in enumerate(zip(p, dp, strict=True)):
                    refs["d"][h, :, queries] += jnp.sum(x * y, axis=0)

        over_strips(config, refs, ("pre", "post"), add, product)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        for h in range(config.heads):
            refs["delta"][0, h : h + 1, :] = jnp.sum(refs["d"][h], axis=0, keepdims=True)


def post_products(config: KernelConfig, refs: Refs, strip: Strip, out: Ref) -> None:
    """Compute the key-wise parts of the post-compose and of its transpose, and the gradient of its matrix."""
    if "mix_post" in refs:
        p, g = (stack(config, planes_of_all_queries(config, ref, strip)) for ref in (refs["p"], refs["y"]))
        key_wise_product(config, refs, refs.get("mix_post"), p, strip, out.at[0])
        key_wise_product(config, refs, refs.get("mix_post_back"), g, strip, out.at[1])
        add_matrix_gradient(config, refs["dmix_post"], p, g, strip)


def pre_products(config: KernelConfig, refs: Refs, strip: Strip, out: Ref) -> None:
    """Compute the gradients of the logits, the key-wise part of those of the scores, and that of the matrix."""
    for h, x in enumerate(logit_gradients(config, refs, strip, slice(0, config.block_q))):
        refs["y"][h, strip.rows, :] = join(x)
    if "mix_pre" in refs:
        a, g = (stack(config, planes_of_all_queries(config, ref, strip)) for ref in (refs["x"], refs["y"]))
        key_wise_product(config, refs, refs.get("mix_pre_back"), g, strip, out.at[0])
        add_matrix_gradient(config, refs["dmix_pre"], a, g, strip)


def add_matrix_gradient(config: KernelConfig, out: Ref, a: Array, g: Array, strip: Strip) -> None:
    """Add the gradient of the matrices of a strip, for stacked inputs `a` and output gradients `g` of a compose."""
    diagonals(config, dot(g, a, (1, 1)), out.at[strip.number], add=True)


def logit_gradients(config: KernelConfig, refs: Refs, strip: Strip, queries: slice) -> StoredPlanes:
    """Return the gradients P·(dP - delta) of the logits of a strip."""
    p, dp = planes(config, refs["p"], strip, queries), planes(config, refs["dp"], strip, queries)
    return StoredPlanes(lambda h: p[h] * (dp[h] - refs["d"][h, :, queries][None]), config.heads)


def post_strip(config: KernelConfig, refs: Refs, strip: Strip, buffers: Sequence[Ref | None]) -> None:
    """Compute W and dP of a strip from P and dW, and store the hidden planes of both."""
    for queries in queries_together(config):
        p, dw = planes(config, refs["p"], strip, queries), planes(config, refs["y"], strip, queries)
        w: Iterable[Array] = p
        dp: Iterable[Array] = dw
        post = strip_compose(config, refs, "post", buffers[0], queries)
        if post is not None:
            w, hidden = post.compose(p)
            save_hidden(post, hidden, refs.get("post_hidden"), strip, queries)
        for h, x in enumerate(w):
            refs["w"][h, strip.rows, queries] = join(x).astype(refs["w"].dtype)
        back = strip_compose(config, refs, "post", buffers[-1], queries)
        if back is not None:
            dp, hidden = back.transposed(dw)
            save_hidden(back, hidden, refs.get("g_hidden"), strip, queries)
        for h, x in enumerate(dp):
            refs["dp"][h, strip.rows, queries] = join(x)


def pre_strip(config: KernelConfig, refs: Refs, strip: Strip, buffers: Sequence[Ref | None]) -> None:
    """Compute the gradients of the logits (to `y`) and of the scores of a strip from P, dP and delta."""
    for queries in queries_together(config):
        pre = strip_compose(config, refs, "pre", buffers[0], queries)
        if config.family == "matrix":
            dl: Sequence[Array] = planes(config, refs["y"], strip, queries)
        else:
            dl = list(logit_gradients(config, refs, strip, queries))
            for h, x in enumerate(dl):
                refs["y"][h, strip.rows, queries] = join(x)
        da: Iterable[Array] = dl
        if pre is not None:
            da, hidden = pre.transposed(dl)
            save_hidden(pre, hidden, refs.get("g_hidden"), strip, queries)
        for h, x in enumerate(da):
            refs["da"][h, strip.rows, queries] = join(x).astype(refs["da"].dtype)


def weight_products(
    config: KernelConfig, layout: ComposeLayout, h: int, rows: slice,
    a: Ref, g: Ref, a_hidden: Ref | None, g_hidden: Ref | None,
) -> Iterator[tuple[int, Array, bool]]:  # fmt: skip
    """Yield the products whose sums are the gradients of head `h`'s weights, for the keys `rows`.

    Each item is a packed row or column, the product, and True for a query-wise weight, whose gradient is a sum over
    keys. The products are a_h times the planes of `g` for a down projection, g_h times the planes of `a` for an up
    projection, and a_h·g_h for a gate.
    """
    x, y = a[h, rows], g[h, rows]
    plane = h // (config.heads // config.groups)
    sides = (layout.query, layout.query_rank, True), (layout.key, layout.key_rank, False)
    for offsets, rank, is_row in sides:
        if offsets.down is None or offsets.up is None:
            continue
        for r in range(rank):
            yield offsets.down + r * config.heads + h, x * not_none(g_hidden)[plane, rows], is_row
            yield offsets.up + r * config.heads + h, y * not_none(a_hidden)[plane, rows], is_row
            plane += config.groups
    if layout.query.gate is not None or layout.key.gate is not None:
        product = x * y
        for offsets, _, is_row in sides:
            if offsets.gate is not None:
                yield offsets.gate + h, product, is_row


def weight_gradients(
    config: KernelConfig, layout: ComposeLayout, refs: Refs,
    a: Ref, g: Ref, a_hidden: Ref | None, static: Ref | None,
) -> None:  # fmt: skip
    """Compute a tile's share of the gradients of one compose with input `a` and output gradient `g`.

    Sums over keys are written to the rows `gq`, sums over queries are added to the columns `gk`. Heads are
    processed one after the other, so that a head's sums over all keys stay in registers.
    """
    per_group = config.heads // config.groups
    for h in range(config.heads):
        sums: dict[int, Array] = {}
        for start in range(0, config.block_k, CHUNK):
            rows = slice(start, min(start + CHUNK, config.block_k))
            products = weight_products(config, layout, h, rows, a, g, a_hidden, refs.get("g_hidden"))
            for column, product, is_row in products:
                if is_row:
                    part = jnp.sum(split(product), axis=0)
                    sums[column] = sums[column] + part if column in sums else part
                elif config.is_single_tile:
                    refs["gk"][rows, column : column + 1] = jnp.sum(product, axis=1, keepdims=True)
                else:
                    refs["gk"][rows, column : column + 1] += jnp.sum(product, axis=1, keepdims=True)
        for column, part in sums.items():
            refs["gq"][column] = part
        for n in range(h - h % per_group, h - h % per_group + per_group) if layout.has_static else ():
            part = jnp.sum(split(a[n] * g[h]), axis=0)
            registers = [part[:, c : c + LANES] for c in range(0, config.block_q, LANES)]
            not_none(static)[n * per_group + h % per_group] += total(registers)


def tile_gradients(config: KernelConfig, refs: Refs, i: Index, j: Index) -> None:
    """Compute W and dA of a tile, and add its share to the gradients of all compose weights.

    If delta is an input, `d` already contains it; otherwise the tile contains complete rows and delta is computed
    from them.
    """
    scores(config, refs["k"], refs["q"], refs["x"])
    scores(config, refs["v"], refs["do"], refs["y"])

    def product(strip: Strip, out: Ref) -> None:
        key_wise_product(
            config,
            refs,
            refs.get("mix_pre"),
            stack(config, planes_of_all_queries(config, refs["x"], strip)),
            strip,
            out.at[0],
        )

    def attend(strip: Strip, buffers: Sequence[Ref | None]) -> None:
        for queries in queries_together(config):
            p = attention_weights(config, refs, i, j, strip, buffers[0], queries)
            for h, x in enumerate(p):
                refs["p"][h, strip.rows, queries] = join(x)

    def layout(compose: ComposeLayout) -> ComposeLayout:  # of the weights whose gradients are sums of products
        return compose.query_only() if config.family == "matrix" else compose

    over_strips(config, refs, ("pre",), attend, product)
    on_strip, products = (functools.partial(f, config, refs) for f in (post_strip, post_products))
    over_strips(config, refs, ("post",), on_strip, products)
    if config.post is not None:
        weight_gradients(
            config, layout(config.post), refs, refs["p"], refs["y"], refs.get("post_hidden"), refs.get("gstatic_post")
        )
    if "delta" not in refs:
        for h in range(config.heads):
            d = jnp.sum(split(refs["p"][h] * refs["dp"][h]), axis=0)
            refs["d"][h] = jnp.broadcast_to(jnp.sum(d, axis=0, keepdims=True), refs["d"].shape[1:])
    on_strip, products = (functools.partial(f, config, refs) for f in (pre_strip, pre_products))
    over_strips(config, refs, ("pre",), on_strip, products)
    if config.pre is not None:
        weight_gradients(
            config, layout(config.pre), refs, refs["x"], refs["y"], refs.get("pre_hidden"), refs.get("gstatic_pre")
        )


def token_gradients(config: KernelConfig, refs: Refs, i: Index, factor: float) -> None:
    """Compute dqᵀ = kᵀ·dAᵀ, dkᵀ = qᵀ·dA and dvᵀ = dOᵀ·W of a tile, and accumulate them or write them directly.

    `factor` converts gradients of scores in units of log 2. Tokens are transposed because they are far smaller than
    tiles.
    """
    q, k, do = refs["q"][0], refs["k"][0, : config.block_k].T, refs["do"][0]
    dq, dk, dv = [], [], []
    for h in range(config.heads):
        lanes = config.query_lanes(h)
        dq.append(dot(k[config.key_lanes(h)], refs["da"][h], (1, 0)))
        dk.append(dot(q[lanes], refs["da"][h], (1, 1)))
        dv.append(dot(do[lanes], refs["w"][h], (1, 1)))
    if "dq_acc" not in refs:
        refs["dq"][0] = jnp.concatenate([(x * factor).astype(refs["dq"].dtype) for x in dq], axis=0)
        for out, heads, times in ((refs["dk"], dk, factor), (refs["dv"], dv, 1.0)):
            rows = jnp.concatenate([(x * times).astype(out.dtype) for x in heads], axis=0).T
            out[0, : len(rows)] = rows
        return
    for h in range(config.heads):
        refs["dq_acc"][i, config.query_lanes(h)] += dq[h]
        refs["dk_acc"][config.key_lanes(h)] += dk[h]
        refs["dv_acc"][config.key_lanes(h)] += dv[h]


def gradient_kernel(config: KernelConfig, refs: Refs) -> None:
    """Compute a tile's share of all gradients of an example; grid index (b, j, i).

    Gradients of a key block accumulate over i. Gradients of the queries stay in VMEM for all i and accumulate over j.
    """
    if "diagonal" in refs:
        mixing.write_diagonal(config, refs["diagonal"])
    j, i = (0, 0) if config.is_single_tile else (pl.program_id(1), pl.program_id(2))
    first_i, last_i = i == 0, i == config.blocks_q - 1
    first_j, last_j = j == 0, j == config.blocks_k - 1
    factor = 1 / LOG2_E if config.pre is not None else config.scale

    @pl.when(first_i)
    def _() -> None:
        clear(refs.get("dk_acc"), refs.get("dv_acc"), refs.get("gk"), refs.get("dmix_pre"), refs.get("dmix_post"))

    @pl.when(first_j)
    def _() -> None:
        clear(*(None if ref is None else ref.at[i] for ref in (refs.get("dq_acc"), refs.get("gq_acc"))))

    @pl.when(first_i & first_j)
    def _() -> None:
        clear(refs.get("gstatic_pre"), refs.get("gstatic_post"))

    @pl.when((config.first_key_block(i) <= j) & (j <= config.last_key_block(i)))
    def _() -> None:
        broadcast_rows(refs["lse"], refs["m"], config.heads, config.block_q)
        if "delta" in refs:
            broadcast_rows(refs["delta"], refs["d"], config.heads, config.block_q)
        tile_gradients(config, refs, i, j)
        token_gradients(config, refs, i, factor)
        for c in range(refs["gq"].shape[0] if "gq" in refs else 0):
            refs["gq_acc"][i, c : c + 1, :] += jnp.sum(refs["gq"][c], axis=0, keepdims=True)

    @pl.when(last_i)
    def _() -> None:
        write_key_gradients(refs, factor)
        write_matrix_gradients(config, refs)

    @pl.when(last_j)
    def _() -> None:
        if "dq_acc" in refs:
            refs["dq"][0] = (refs["dq_acc"][i] * factor).astype(refs["dq"].dtype)
        if "gq" in refs:
            refs["dwq"][0, : refs["gq"].shape[0]] = refs["gq_acc"][i]

    @pl.when(last_i & last_j)
    def _() -> None:
        for name in ("pre", "post"):
            if f"gstatic_{name}" in refs:
                refs[f"dstatic_{name}"][0] = refs[f"gstatic_{name}"][...]


def clear(*refs: Ref | None) -> None:
    """Fill the references that exist with zeros."""
    for ref in refs:
        if ref is not None:
            ref[...] = jnp.zeros(ref.shape, ref.dtype)


def write_key_gradients(refs: Refs, factor: float) -> None:
    """Write the accumulated gradients of a key block to the outputs."""
    if "dk_acc" in refs:
        refs["dk"][0, : refs["dk_acc"].shape[1]] = (refs["dk_acc"][...] * factor).astype(refs["dk"].dtype).T
        refs["dv"][0, : refs["dk_acc"].shape[1]] = refs["dv_acc"][...].astype(refs["dv"].dtype).T
    if "gk" in refs:
        refs["dwk"][0, : refs["gk"].shape[0], : refs["gk"].shape[1]] = refs["gk"][...]


def write_matrix_gradients(config: KernelConfig, refs: Refs) -> None:
    """Write the gradients of key-wise weights of a key block, and add those of static weights, from `dmix_…`."""
    if "wk" in refs and "wk_cur" in refs:
        transpose_key_weights(refs["wk"], refs["wk_cur"])
    for name, layout in (("pre", config.pre), ("post", config.post)):
        if layout is not None and f"dmix_{name}" in refs:
            packed = refs[f"dmix_{name}"]
            blocks, static = packed.at[: packed.shape[0] - 1], refs.get(f"gstatic_{name}")
            matrix_gradients(
                config, layout, blocks, refs.get("wk_cur"), refs.get("dwk_rows"), static, 0, add_static=True
            )
    if "dwk_rows" in refs:
        refs["dwk"][0] = refs["dwk_rows"][...].T[: config.block_k]
