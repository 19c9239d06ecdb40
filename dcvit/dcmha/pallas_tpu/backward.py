"""The backward TPU kernels of DCMHA. See `dcvit.dcmha.pallas_tpu.api`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.pallas_tpu.case import Case, hidden_planes, specifications
from dcvit.dcmha.pallas_tpu.tiling import (  # fmt: skip
    LOG2_E,
    Refs,
    Strip,
    dot,
    join,
    logits,
    over_strips,
    repeat_rows,
    scores,
    split,
    spread_scratch,
    visible,
    weight_gradients,
    weights_of,
)
from dcvit.dcmha.shapes import Array


def probabilities(case: Case, refs: Refs, i: Any, j: Any, strip: Strip, spread: Any) -> list[Array]:
    """The attention weights P of a strip; keeps the hidden planes where the gradients will need them."""
    pre = weights_of(case, refs, "pre", spread)
    a = [split(refs.x[h, strip.rows, :]) for h in range(case.heads)]
    out, hidden = logits(case, a, pre, visible(case, i, j, strip, refs.mask))
    if pre is not None and refs.pre_hidden is not None:
        pre.keep(hidden, refs.pre_hidden, strip.rows)
    return [jnp.exp2(out[h] - refs.m[h][None]) for h in range(case.heads)]


def delta_kernel(case: Case, names: tuple[str, ...], *arguments: Any) -> None:
    """delta_h = Σ_s P_h·dP_h of a query block: step (b, i, j)."""
    refs = Refs(names, arguments)
    i, step = pl.program_id(1), pl.program_id(2)
    j = case.first_key_block(i) + step

    @pl.when(step == 0)
    def _() -> None:
        repeat_rows(refs.lse, refs.m, case.heads, case.block_q)
        refs.d[...] = jnp.zeros(refs.d.shape, jnp.float32)

    @pl.when(j <= case.last_key_block(i))
    def _() -> None:
        scores(case, refs.k, refs.q, refs.x)
        scores(case, refs.v, refs.do, refs.y)

        def add(strip: Strip, spread_pre: Any, spread_post: Any) -> None:
            p = probabilities(case, refs, i, j, strip, spread_pre)
            post = weights_of(case, refs, "post", spread_post)
            dp = [split(refs.y[h, strip.rows, :]) for h in range(case.heads)]
            if post is not None:
                dp, _ = post.transposed(dp)
            for h in range(case.heads):
                refs.d[h] += jnp.sum(p[h] * dp[h], axis=0)

        over_strips(case, refs, ("pre", "post"), add)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        for h in range(case.heads):
            refs.delta[0, h : h + 1, :] = jnp.sum(refs.d[h], axis=0, keepdims=True)


def post_strip(case: Case, refs: Refs, strip: Strip, spread: Any) -> None:
    """W and dP of a strip from P and dW, and the hidden planes."""
    post = weights_of(case, refs, "post", spread)

    def planes(ref: Any) -> list[Array]:  # read again where they are used again, which spares registers
        return [split(ref[h, strip.rows, :]) for h in range(case.heads)]

    w, dp = planes(refs.p), planes(refs.y)
    if post is not None:
        w, hidden = post.compose(w)
        post.keep(hidden, refs.post_hidden, strip.rows)
        dp, hidden = post.transposed(dp)
        post.keep(hidden, refs.g_hidden, strip.rows)
    for h in range(case.heads):
        refs.w[h, strip.rows, :] = join(w[h]).astype(refs.w.dtype)
        refs.dp[h, strip.rows, :] = join(dp[h])


def pre_strip(case: Case, refs: Refs, strip: Strip, spread: Any) -> None:
    """dL (in `y`) and dA of a strip from P, dP and delta, and the hidden planes."""
    pre = weights_of(case, refs, "pre", spread)
    dl = [
        split(refs.p[h, strip.rows, :]) * (split(refs.dp[h, strip.rows, :]) - refs.d[h][None])
        for h in range(case.heads)
    ]
    da = dl
    if pre is not None:
        da, hidden = pre.transposed(dl)
        pre.keep(hidden, refs.g_hidden, strip.rows)
    for h in range(case.heads):
        refs.y[h, strip.rows, :] = join(dl[h])
        refs.da[h, strip.rows, :] = join(da[h]).astype(refs.da.dtype)


def tile_gradients(case: Case, refs: Refs, i: Any, j: Any) -> None:
    """Leaves W in `w`, dA in `da`, and adds to the gradients of the weights: `gq` (rows), `gk` (columns), statics.

    delta is in `refs.d` already where it is given, and comes from this tile where the tile holds whole rows.
    """
    scores(case, refs.k, refs.q, refs.x)
    scores(case, refs.v, refs.do, refs.y)

    def attend(strip: Strip, spread: Any) -> None:
        p = probabilities(case, refs, i, j, strip, spread)
        for h in range(case.heads):
            refs.p[h, strip.rows, :] = join(p[h])

    over_strips(case, refs, ("pre",), attend)
    over_strips(case, refs, ("post",), functools.partial(post_strip, case, refs))
    if case.post is not None:
        weight_gradients(case, case.post, refs.p, refs.y, refs.post_hidden, refs, refs.gstatic_post)
    if refs.delta is None:
        for h in range(case.heads):
            d = jnp.sum(split(refs.p[h] * refs.dp[h]), axis=0)
            refs.d[h] = jnp.broadcast_to(jnp.sum(d, axis=0, keepdims=True), refs.d.shape[1:])
    over_strips(case, refs, ("pre",), functools.partial(pre_strip, case, refs))
    if case.pre is not None:
        weight_gradients(case, case.pre, refs.x, refs.y, refs.pre_hidden, refs, refs.gstatic_pre)


def products(case: Case, refs: Refs, i: Any, factor: float) -> None:
    """dv^T = dO^T·W, dk^T = q^T·dA and dq^T = k^T·dA^T of a tile: handed out at once where the tile stands alone.

    Tokens are transposed, which are far smaller than tiles.
    """
    q, k, do = refs.q[0].T, refs.k[0].T, refs.do[0].T
    dq, dk, dv = [], [], []
    for h in range(case.heads):
        of_q = case.query_head(h)
        dq.append(dot(k[case.key_head(h)], refs.da[h], (1, 0)))
        dk.append(dot(q[of_q], refs.da[h], (1, 1)))
        dv.append(dot(do[of_q], refs.w[h], (1, 1)))
    if refs.dq_acc is None:
        for out, heads, times in ((refs.dq, dq, factor), (refs.dk, dk, factor), (refs.dv, dv, 1.0)):
            out[0] = jnp.concatenate([(x * times).astype(out.dtype) for x in heads], axis=0).T
        return
    for h in range(case.heads):
        refs.dq_acc[i, case.query_head(h)] += dq[h]
        refs.dk_acc[case.key_head(h)] += dk[h]
        refs.dv_acc[case.key_head(h)] += dv[h]


def gradient_kernel(case: Case, names: tuple[str, ...], *arguments: Any) -> None:
    """All gradients: step (b, j, i). Those of a key block gather over i; those of the queries lie in VMEM for all i."""
    refs = Refs(names, arguments)
    j, i = pl.program_id(1), pl.program_id(2)
    first_i, last_i = i == 0, i == pl.num_programs(2) - 1
    first_j, last_j = j == 0, j == pl.num_programs(1) - 1
    factor = 1 / LOG2_E if case.pre is not None else case.scale

    def clear(*cleared: Any) -> None:
        for ref in cleared:
            if ref is not None:
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

    @pl.when(first_i)
    def _() -> None:
        clear(refs.dk_acc, refs.dv_acc, refs.gk)

    @pl.when(first_j)
    def _() -> None:
        clear(*(ref if ref is None else ref.at[i] for ref in (refs.dq_acc, refs.gq_acc)))

    @pl.when(first_i & first_j)
    def _() -> None:
        clear(refs.gstatic_pre, refs.gstatic_post)

    @pl.when((case.first_key_block(i) <= j) & (j <= case.last_key_block(i)))
    def _() -> None:
        repeat_rows(refs.lse, refs.m, case.heads, case.block_q)
        if refs.delta is not None:
            repeat_rows(refs.delta, refs.d, case.heads, case.block_q)
        tile_gradients(case, refs, i, j)
        products(case, refs, i, factor)
        for c in range(0 if refs.gq is None else refs.gq.shape[0]):
            refs.gq_acc[i, c : c + 1, :] += jnp.sum(refs.gq[c], axis=0, keepdims=True)

    @pl.when(last_i)
    def _() -> None:
        if refs.dk_acc is not None:
            refs.dk[0] = (refs.dk_acc[...] * factor).astype(refs.dk.dtype).T
            refs.dv[0] = refs.dv_acc[...].astype(refs.dv.dtype).T
        if refs.gk is not None:
            refs.dwk[0] = refs.gk[...]

    @pl.when(last_j)
    def _() -> None:
        if refs.dq_acc is not None:
            refs.dq[0] = (refs.dq_acc[i] * factor).astype(refs.dq.dtype).T
        if refs.gq is not None:
            refs.dwq[0] = refs.gq_acc[i]

    @pl.when(last_i & last_j)
    def _() -> None:
        for out, static in ((refs.dstatic_pre, refs.gstatic_pre), (refs.dstatic_post, refs.gstatic_post)):
            if static is not None:
                out[0] = static[...]


def tile_scratch(case: Case) -> dict[str, Any]:
    plane = (case.heads, case.block_k, case.block_q)
    scratch = {
        "x": pltpu.VMEM(plane, jnp.float32),
        "y": pltpu.VMEM(plane, jnp.float32),
        "m": pltpu.VMEM((case.heads, 8, case.block_q), jnp.float32),
        "d": pltpu.VMEM((case.heads, 8, case.block_q), jnp.float32),
    }
    scratch |= spread_scratch(case)
    return scratch


def delta(case: Case, inputs: dict[str, Array], interpret: Any) -> Array:
    """Σ_s P·dP, B H T float32."""
    batch, padded = inputs["q"].shape[:2]
    specs = specifications(
        case, inputs, lambda i, s: i, lambda i, s: jnp.minimum(case.first_key_block(i) + s, case.last_key_block(i))
    )
    scratch = tile_scratch(case)
    names = (*inputs, "delta", *scratch)
    return pl.pallas_call(
        lambda *refs: delta_kernel(case, names, *refs),
        grid=(batch, case.blocks_q, case.visits),
        in_specs=list(specs.values()),
        out_specs=pl.BlockSpec((1, case.heads, case.block_q), lambda b, i, s: (b, 0, i)),
        out_shape=jax.ShapeDtypeStruct((batch, case.heads, padded), jnp.float32),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=case.vmem
        ),
        interpret=interpret,
        name="dcmha_delta",
    )(*inputs.values())


def backward(case: Case, inputs: dict[str, Array], interpret: Any) -> dict[str, Array]:
    """Gradients by name: dq, dk, dv in their inputs' dtype, dwq, dwk, dstatic_… in float32, of the packed weights."""
    if case.blocks_k > 1:
        inputs = {**inputs, "delta": delta(case, inputs, interpret)}
    results = []
    for first in range(0, case.queries, case.part):
        part = case._replace(first_query=first, queries=min(case.part, case.queries - first))
        own = slice(first, first + part.blocks_q * part.block_q)
        some = inputs | {name: inputs[name][:, own] for name in ("q", "do")}
        some |= {name: inputs[name][..., own] for name in ("lse", "delta", "mask") if name in inputs}
        some |= {name: inputs[name][:, first // 128 : own.stop // 128] for name in ("wq",) if name in inputs}
        results.append(gradients(part, some, interpret))
    if len(results) == 1:
        return results[0]
    joined = {"dq": 1, "dwq": 2}
    return {
        name: jnp.concatenate([x[name] for x in results], axis=joined[name]) if name in joined
        else functools.reduce(jnp.add, [x[name].astype(jnp.float32) for x in results])
        for name in results[0]
    }  # fmt: skip


def gradient_outputs(case: Case, inputs: dict[str, Array]) -> dict[str, tuple[Any, Any]]:
    """Shape with dtype, and block specification, of each gradient."""
    batch, padded_q, wide = inputs["q"].shape
    padded_k, narrow = inputs["k"].shape[1:]
    block_q, block_k, last = case.block_q, case.block_k, case.blocks_k - 1
    keys = (batch, padded_k, narrow), (1, block_k, narrow), lambda b, j, i: (b, j, 0)
    found: dict[str, tuple[Any, Any]] = {}

    def add(name: str, dtype: Any, shape: tuple[int, ...], block: tuple[int, ...], index: Any) -> None:
        found[name] = jax.ShapeDtypeStruct(shape, dtype), pl.BlockSpec(block, index)

    def completed(j: Any, i: Any) -> Any:
        """The last key block completes the gradients of the queries."""
        return jnp.where(j == last, i, 0)

    q, k, v = (inputs[name].dtype for name in "qkv")
    add("dq", q, (batch, padded_q, wide), (1, block_q, wide), lambda b, j, i: (b, completed(j, i), 0))
    add("dk", k, *keys)
    add("dv", v, *keys)
    if "wq" in inputs:
        n = inputs["wq"].shape[2]
        add("dwq", jnp.float32, (batch, n, padded_q), (1, n, block_q), lambda b, j, i: (b, 0, completed(j, i)))
    if "wk" in inputs:
        n = inputs["wk"].shape[2] * (2 if case.packed else 1)
        add("dwk", jnp.float32, (batch, padded_k, n), (1, block_k, n), keys[2])
    for where in ("pre", "post"):
        if f"static_{where}" in inputs:
            block = (1, case.heads * (case.heads // case.groups), 8, 128)
            add(f"dstatic_{where}", jnp.float32, (batch, *block[1:]), block, lambda b, j, i: (b, 0, 0, 0))
    return found


def gradient_scratch(case: Case, inputs: dict[str, Array], outputs: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """What lies in VMEM: planes of a tile, and gradients as they gather."""
    planes, tokens = (case.block_k, case.block_q), case.heads * case.width
    scratch = tile_scratch(case)
    scratch |= {name: pltpu.VMEM((case.heads, *planes), jnp.float32) for name in ("p", "dp")}
    scratch |= {name: pltpu.VMEM((case.heads, *planes), inputs["q"].dtype) for name in ("w", "da")}
    if not (case.single and case.heads == case.key_heads):
        scratch["dq_acc"] = pltpu.VMEM((case.blocks_q, tokens, case.block_q), jnp.float32)
        of_keys = pltpu.VMEM((case.key_heads * case.width, case.block_k), jnp.float32)
        scratch |= {"dk_acc": of_keys, "dv_acc": of_keys}
    hidden = {"pre_hidden": hidden_planes(case, case.pre), "post_hidden": hidden_planes(case, case.post)}
    hidden["g_hidden"] = max(hidden.values())
    scratch |= {name: pltpu.VMEM((n, *planes), jnp.float32) for name, n in hidden.items() if n}
    if "dwq" in outputs:
        n = outputs["dwq"][0].shape[1]
        scratch["gq"] = pltpu.VMEM((n, 8, case.block_q), jnp.float32)
        scratch["gq_acc"] = pltpu.VMEM((case.blocks_q, n, case.block_q), jnp.float32)
    if "dwk" in outputs:
        scratch["gk"] = pltpu.VMEM((case.block_k, outputs["dwk"][0].shape[2]), jnp.float32)
    for where in ("pre", "post"):
        if f"dstatic_{where}" in outputs:
            scratch[f"gstatic_{where}"] = pltpu.VMEM(outputs[f"dstatic_{where}"][0].shape[1:], jnp.float32)
    return scratch


def gradients(case: Case, inputs: dict[str, Array], interpret: Any) -> dict[str, Array]:
    """What these queries add to the gradients."""
    specs = specifications(case, inputs, case.query_block, lambda j, i: j)
    outputs = gradient_outputs(case, inputs)
    scratch = gradient_scratch(case, inputs, outputs)
    names = (*inputs, *outputs, *scratch)
    results = pl.pallas_call(
        lambda *refs: gradient_kernel(case, names, *refs),
        grid=(inputs["q"].shape[0], case.blocks_k, case.blocks_q),
        in_specs=list(specs.values()),
        out_specs=[spec for _, spec in outputs.values()],
        out_shape=[shape for shape, _ in outputs.values()],
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=case.vmem
        ),
        interpret=interpret,
        name="dcmha_gradients",
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))
