"""The forward TPU kernel of DCMHA. See `dcvit.dcmha.pallas_tpu.api`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.pallas_tpu.case import Case, specifications
from dcvit.dcmha.pallas_tpu.tiling import (  # fmt: skip
    UNSEEN,
    Refs,
    Strip,
    dot,
    join,
    logits,
    over_strips,
    scores,
    split,
    spread_scratch,
    visible,
    weights_of,
)
from dcvit.dcmha.shapes import Array


def start(refs: Refs) -> None:
    """Empty statistics for a block of queries."""
    refs.m[...] = jnp.full(refs.m.shape, UNSEEN, jnp.float32)
    refs.l[...] = jnp.zeros(refs.l.shape, jnp.float32)


def new_scores(case: Case, refs: Refs, i: Any, j: Any, slot: Any, *, counted: bool) -> None:
    """The composed and masked scores of a tile, which are `counted` in the running maximum and sum."""
    scores(case, refs.k, refs.q, refs.x.at[slot])
    together = case.strip * case.unroll  # keys

    def compose(strip: Strip, spread: Any) -> None:
        pre = weights_of(case, refs, "pre", spread)
        a = [split(refs.x[slot, h, strip.rows, :]) for h in range(case.heads)]
        out, _ = logits(case, a, pre, visible(case, i, j, strip, refs.mask))
        for h in range(case.heads):
            refs.x[slot, h, strip.rows, :] = join(out[h])

    def count(step: Any) -> None:
        """The step before; there is none before the first."""
        rows = pl.ds(pl.multiple_of(jnp.maximum(step - 1, 0) * together, case.strip), together)
        statistics(case, refs, slot, rows, step > 0)

    over_strips(case, refs, ("pre",), compose, count if counted else None)
    if counted:
        statistics(case, refs, slot, slice(case.block_k - together, case.block_k), True)


def statistics(case: Case, refs: Refs, slot: Any, rows: Any, valid: Any) -> None:
    """Takes scores into the running maximum and sum, of each sublane for itself, where they are `valid`."""
    for h in range(case.heads):
        x = split(refs.x[slot, h, rows, :])
        before, sums = refs.m[h], refs.l[h]
        m = jnp.maximum(before, jnp.max(x, axis=0))
        refs.m[h] = jnp.where(valid, m, before)
        refs.l[h] = jnp.where(valid, sums * jnp.exp2(before - m) + jnp.sum(jnp.exp2(x - m[None]), axis=0), sums)


def finish_statistics(case: Case, refs: Refs) -> None:
    """Brings the eight sublanes together: `m` becomes the log-sum-exp, 0 for a query that sees nothing."""
    for h in range(case.heads):
        m = jnp.max(refs.m[h], axis=0, keepdims=True)
        sums = jnp.sum(refs.l[h] * jnp.exp2(refs.m[h] - m), axis=0, keepdims=True)
        lse = jnp.where(m > UNSEEN / 2, m + jnp.log2(sums), 0.0)
        refs.lse[0, h : h + 1, :] = lse
        refs.m[h] = jnp.broadcast_to(lse, (8, case.block_q))


def output(case: Case, refs: Refs, slot: Any) -> None:
    """Adds W·v of a tile to the output, or hands it out where there is one tile."""

    def weigh(strip: Strip, spread: Any) -> None:
        post = weights_of(case, refs, "post", spread)
        p = [jnp.exp2(split(refs.x[slot, h, strip.rows, :]) - refs.m[h][None]) for h in range(case.heads)]
        if post is not None:
            p, _ = post.compose(p)
        for h in range(case.heads):
            refs.w[h, strip.rows, :] = join(p[h]).astype(refs.w.dtype)

    over_strips(case, refs, ("post",), weigh)
    v = refs.v[0].T  # far smaller than the weights, which the matrix unit takes as they lie
    out = [dot(v[case.key_head(h)], refs.w[h], (1, 0)) for h in range(case.heads)]
    if refs.acc is None:
        refs.o[0] = jnp.concatenate([x.astype(refs.o.dtype) for x in out], axis=0).T
    else:
        for h in range(case.heads):
            refs.acc[case.query_head(h)] += out[h]


def kernel(case: Case, names: tuple[str, ...], *arguments: Any) -> None:
    """A step (b, i, phase, step) takes a block of keys: in phase 0 into the statistics, in phase 1 into the output."""
    refs = Refs(names, arguments)
    i, phase, step = pl.program_id(1), pl.program_id(2), pl.program_id(3)
    j = case.first_key_block(i) + step
    slots, steps = refs.x.shape[0], case.visits
    slot = step if slots > 1 else 0
    if steps == 1:
        start(refs)
        new_scores(case, refs, i, j, slot, counted=True)
        finish_statistics(case, refs)
        output(case, refs, slot)
        return
    seen = j <= case.last_key_block(i)

    @pl.when((phase == 0) & (step == 0))
    def _() -> None:
        start(refs)

    @pl.when((phase == 0) & seen)
    def _() -> None:
        new_scores(case, refs, i, j, slot, counted=True)

    @pl.when((phase == 1) & (step == 0))
    def _() -> None:
        finish_statistics(case, refs)
        refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)

    @pl.when((phase == 1) & seen)
    def _() -> None:
        if slots == 1:
            new_scores(case, refs, i, j, slot, counted=False)
        output(case, refs, slot)

    @pl.when((phase == 1) & (step == steps - 1))
    def _() -> None:
        refs.o[0] = refs.acc[...].astype(refs.o.dtype).T


def forward(case: Case, inputs: dict[str, Array], interpret: Any) -> tuple[Array, Array]:
    """The heads' outputs B T M and the rows' log-sum-exp B H T, in units of log 2."""
    batch = inputs["q"].shape[0]
    steps = case.visits
    slots = steps if keeps_scores(case, steps) else 1
    phases = 1 if steps == 1 else 2

    def key_block(i: Any, phase: Any, step: Any) -> Any:
        return jnp.minimum(case.first_key_block(i) + step, case.last_key_block(i))

    def of_k(i: Any, phase: Any, step: Any) -> Any:
        block = key_block(i, phase, step)
        if slots == 1:
            return block
        return jnp.where(phase == 0, block, case.last_key_block(i))  # the scores are kept, and phase 1 needs no keys

    def of_v(i: Any, phase: Any, step: Any) -> Any:
        block = key_block(i, phase, step)
        return block if phases == 1 else jnp.where(phase == 1, block, case.first_key_block(i))

    specs = specifications(case, inputs, lambda i, phase, step: i, key_block, k=of_k, v=of_v)
    block_q, block_k, wide = case.block_q, case.block_k, case.heads * case.width
    scratch = {
        "x": pltpu.VMEM((slots, case.heads, block_k, block_q), jnp.float32),
        "w": pltpu.VMEM((case.heads, block_k, block_q), inputs["q"].dtype),
        "m": pltpu.VMEM((case.heads, 8, block_q), jnp.float32),
        "l": pltpu.VMEM((case.heads, 8, block_q), jnp.float32),
    }
    scratch |= spread_scratch(case)
    if steps > 1:
        scratch["acc"] = pltpu.VMEM((wide, block_q), jnp.float32)
    padded = inputs["q"].shape[1]
    return pl.pallas_call(
        functools.partial(kernel, case, (*inputs, "o", "lse", *scratch)),
        grid=(batch, case.blocks_q, phases, steps),
        in_specs=list(specs.values()),
        out_specs=[
            pl.BlockSpec((1, block_q, wide), lambda b, i, p, s: (b, i, 0)),
            pl.BlockSpec((1, case.heads, block_q), lambda b, i, p, s: (b, 0, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, padded, wide), inputs["q"].dtype),
            jax.ShapeDtypeStruct((batch, case.heads, padded), jnp.float32),
        ],
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"), vmem_limit_bytes=case.vmem
        ),
        interpret=interpret,
        name="dcmha_forward",
    )(*inputs.values())


def keeps_scores(case: Case, steps: int) -> bool:
    """Whether all scores that a query block sees fit in half of VMEM, so that they are computed once."""
    return steps * case.heads * case.block_k * case.block_q * 4 <= case.vmem // 2
