"""The forward TPU kernel for blocks of eight examples whose scores are one tile each.

An example has two stages, in which matrix products of its neighbors run beside its vector operations:

| stage | vector operations | matrix products beside them |
|---|---|---|
| 1 | pre-compose, and the statistics of the softmax | output of the previous example |
| 2 | attention weights, and post-compose | scores of the next example |
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.numerics import LOG2_E, MASKED_SCORE, round_up
from dcvit.dcmha.pallas_tpu import interleaved, mixing
from dcvit.dcmha.pallas_tpu.config import LANES, SUBLANES, Index, Interpret, KernelConfig, block_specs
from dcvit.dcmha.pallas_tpu.stages import (
    Task,
    add_mixed,
    key_wise_product,
    keys_of,
    operand_scratch,
    planes,
    queries_of,
    query_compose,
    ring,
    ring_planes,
    run_all,
    run_stage,
    save,
    save_operand,
    slot,
    visible_keys,
)
from dcvit.dcmha.pallas_tpu.tile import TileRefs, dot, join, split
from dcvit.dcmha.pallas_tpu.weights import rows_of
from dcvit.dcmha.shapes import Array, Ref, not_none

TOKENS = ("q", "k", "v", "wq", "wk")  # inputs with an axis of tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleRefs(TileRefs):
    """References of the kernel. Blocks have eight examples, buffers one; those of absent branches are None."""

    o: Ref  # output: composed weights times values
    lse: Ref  # output: log-sum-exp of each row, in units of log 2
    x: Ref  # scores, (H, Bk, Bq)
    y: Ref  # composed and masked scores
    w: Ref  # composed attention weights, see `operand_scratch`
    m: Ref  # running maximum of each sublane, (H, 8, Bq); later the log-sum-exp
    sums: Ref  # running sum of each sublane
    p: Ref  # attention weights of the blocks in work, see `ring`
    mixed: Ref  # key-wise parts of the blocks in work
    wq_late: Ref | None = None  # `wq_rows` for the post-compose


def kernel(config: KernelConfig, names: tuple[str, ...], *arguments: Ref) -> None:
    """Process the examples of a block one after the other."""
    refs = ExampleRefs(**dict(zip(names, arguments, strict=True)))
    for name in TOKENS:
        if getattr(refs, name) is not None:
            interleaved.clear_rest(getattr(refs, f"{name}_tile"), getattr(refs, name).shape[0])
    if refs.diagonal is not None:
        mixing.write_diagonal(config, refs.diagonal)
    run_all(score_tasks(config, refs, 0))
    jax.lax.fori_loop(0, config.interleave, lambda e, _: attend(config, refs, e), None)
    run_all(output_tasks(config, refs, config.interleave - 1))


def attend(config: KernelConfig, refs: ExampleRefs, e: Index) -> None:
    """Compute the attention weights of example `e`, the output of the previous one and the scores of the next one."""
    previous, following = jnp.maximum(e - 1, 0), jnp.minimum(e + 1, config.interleave - 1)
    work: list[Task] = [functools.partial(prepare_post, config, refs), *output_tasks(config, refs, previous)]
    run_stage(
        config,
        lambda b: pre_products(config, refs, b),
        lambda b: pre_vectors(config, refs, e, b),
        work,
        lambda b, count: update_statistics(config, refs, b, count),
    )
    finish_statistics(config, refs, e)
    work = score_tasks(config, refs, following)
    run_stage(config, lambda b: post_products(config, refs, b), lambda b: post_vectors(config, refs, b), work)


def pre_products(config: KernelConfig, refs: ExampleRefs, b: int) -> None:
    """Compute the key-wise part of the pre-compose of a block."""
    for queries in queries_of(config):
        key_wise_product(config, refs, refs.mix_pre, planes(config, refs.x, b, queries), refs.mixed, b, queries)


def pre_vectors(config: KernelConfig, refs: ExampleRefs, e: Index, b: int) -> None:
    """Compute the composed and masked scores of a block."""
    mask = refs.mask
    if mask is not None and mask.shape[0] > 1:
        mask = mask.at[pl.ds(e, 1)]
    for queries in queries_of(config):
        x = planes(config, refs.x, b, queries)
        pre = query_compose(config, refs, "pre", refs.wq_rows, queries)
        y: Iterable[Array] = [plane * (config.scale * LOG2_E) for plane in x] if pre is None else pre.compose(x)[0]
        y = add_mixed(config, refs.mix_pre, y, refs.mixed, b, queries)
        seen = visible_keys(config, mask, b, queries)
        save(config, y if seen is None else [jnp.where(seen, x, MASKED_SCORE) for x in y], refs.y, b, queries)


def update_statistics(config: KernelConfig, refs: ExampleRefs, first: int, count: int) -> None:
    """Add some blocks of scores to the running maximum and sum of each sublane."""
    for h in range(config.heads):
        y = split(refs.y[h, keys_of(config, first, count), :])
        m = jnp.max(y, axis=0)
        if first > 0:
            m = jnp.maximum(m, refs.m[h])
        sums = jnp.sum(jnp.exp2(y - m[None]), axis=0)
        refs.sums[h] = sums if first == 0 else refs.sums[h] * jnp.exp2(refs.m[h] - m) + sums
        refs.m[h] = m


def finish_statistics(config: KernelConfig, refs: ExampleRefs, e: Index) -> None:
    """Reduce the eight sublanes and store the log-sum-exp in `refs.m` and `refs.lse`; 0 for a fully masked query."""
    for h in range(config.heads):
        m = jnp.max(refs.m[h], axis=0, keepdims=True)
        sums = jnp.sum(refs.sums[h] * jnp.exp2(refs.m[h] - m), axis=0, keepdims=True)
        lse = jnp.where(m > MASKED_SCORE / 2, m + jnp.log2(sums), 0.0)
        refs.lse[e, h : h + 1, :] = lse
        refs.m[h] = jnp.broadcast_to(lse, (SUBLANES, config.block_q))


def post_products(config: KernelConfig, refs: ExampleRefs, b: int) -> None:
    """Compute the attention weights of a block, and the key-wise part of the post-compose."""
    for queries in queries_of(config):
        y = planes(config, refs.y, b, queries)
        p = [jnp.exp2(x - refs.m[h, :, queries][None]) for h, x in enumerate(y)]
        for h, plane in enumerate(p):
            refs.p[slot(b), keys_of(config, h), queries] = join(plane)
        key_wise_product(config, refs, refs.mix_post, p, refs.mixed, b, queries)


def post_vectors(config: KernelConfig, refs: ExampleRefs, b: int) -> None:
    """Compute the composed attention weights of a block."""
    for queries in queries_of(config):
        p = ring_planes(config, refs.p, b, queries)
        post = query_compose(config, refs, "post", refs.wq_late, queries)
        w: Iterable[Array] = p if post is None else post.compose(p)[0]
        w = add_mixed(config, refs.mix_post, w, refs.mixed, b, queries)
        save_operand(config, w, refs.w, b, queries)


def score_tasks(config: KernelConfig, refs: ExampleRefs, e: Index) -> list[Task]:
    """Return the work that precedes the first stage of an example: its scores, and the weights of the pre-compose."""

    def tokens() -> None:
        interleaved.read(config, refs.q, e, not_none(refs.q_tile))
        interleaved.read(config, refs.k, e, not_none(refs.k_tile))

    def weights() -> None:
        for source, tile in ((refs.wq, refs.wq_tile), (refs.wk, refs.wk_tile)):
            if source is not None:
                interleaved.read(config, source, e, not_none(tile))
        rows_of(config, refs.wq_tile, refs.wq_rows, refs.wk_tile, refs.wk_cur)
        if refs.mix_pre is not None:
            mixing.build(config, "pre", refs.wk_cur, refs.static_pre, refs.mix_pre)

    def scores(h: int) -> None:
        keys, queries = not_none(refs.k_tile), not_none(refs.q_tile)
        refs.x[h] = dot(
            interleaved.columns(keys, config.key_lanes(h)), interleaved.columns(queries, config.query_lanes(h)), (1, 1)
        )

    return [tokens, *(functools.partial(scores, h) for h in range(config.heads)), weights]


def prepare_post(config: KernelConfig, refs: ExampleRefs) -> None:
    """Prepare the weights of the post-compose, before those of the next example replace their source."""
    if refs.wq_late is not None:
        refs.wq_late[...] = not_none(refs.wq_rows)[...]
    if refs.mix_post is not None:
        mixing.build(config, "post", refs.wk_cur, refs.static_post, refs.mix_post)


def output_tasks(config: KernelConfig, refs: ExampleRefs, e: Index) -> list[Task]:
    """Return the work of computing the output of an example, in parts of complete registers of its columns."""
    v, together = not_none(refs.v_tile), math.lcm(config.head_dim, LANES) // config.head_dim

    def part(first: int) -> None:
        heads = range(first, min(first + together, config.heads))
        start = config.key_lanes(heads[0]).start
        rows = interleaved.columns(v, slice(start, config.key_lanes(heads[-1]).stop)).T
        out = []
        for h in heads:
            lanes = config.key_lanes(h)
            values = rows[lanes.start - start : lanes.stop - start]
            parts = [dot(values, refs.w[h, n], (1, 0)) for n in range(refs.w.shape[1])]
            out.append(jnp.concatenate(parts, axis=1))
        lanes = slice(config.query_lanes(heads[0]).start, config.query_lanes(heads[-1]).stop)
        interleaved.write(config, refs.o, e, lanes, jnp.concatenate(out, axis=0).T)

    parts = [functools.partial(part, first) for first in range(0, config.heads, together)]
    return [lambda: interleaved.read(config, refs.v, e, v), *parts]


def forward(config: KernelConfig, inputs: dict[str, Array], interpret: Interpret) -> tuple[Array, Array]:
    """Return the output of all heads, (T B H·D), and each row's log-sum-exp, (B H T) in units of log 2."""
    inputs = {name: interleaved.view(x) if name in TOKENS else x for name, x in inputs.items()}
    rest = block_specs(config, {name: x for name, x in inputs.items() if name not in TOKENS}, lambda: 0, lambda: 0)
    specs = {name: interleaved.block_spec(x) if name in TOKENS else rest[name] for name, x in inputs.items()}
    lse = (config.interleave, config.heads, config.block_q)
    blocks, scratch = inputs["q"].shape[1], scratch_shapes(config, inputs)
    out, sums = pl.pallas_call(
        functools.partial(kernel, config, (*inputs, "o", "lse", *scratch)),
        grid=(blocks,),
        in_specs=list(specs.values()),
        out_specs=[specs["q"], pl.BlockSpec(lse, lambda b: (b, 0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(inputs["q"].shape, jnp.float32),
            jax.ShapeDtypeStruct((blocks * config.interleave, *lse[1:]), jnp.float32),
        ],
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=config.vmem_bytes),
        interpret=interpret,
        name="dcmha_forward",
    )(*inputs.values())
    return interleaved.unview(out), sums


def scratch_shapes(config: KernelConfig, inputs: dict[str, Array]) -> dict[str, pl.MemoryRef]:
    """Return the VMEM buffers by name."""
    heads, keys, queries, operand = config.heads, config.block_k, config.block_q, config.operand_dtype
    wide, narrow = heads * config.head_dim, config.key_heads * config.head_dim
    found = {name: pltpu.VMEM((heads, keys, queries), jnp.float32) for name in ("x", "y")}
    found |= {name: pltpu.VMEM((heads, SUBLANES, queries), jnp.float32) for name in ("m", "sums")}
    found |= {"w": operand_scratch(config), "p": ring(config), "mixed": ring(config)}
    found["q_tile"] = interleaved.tile(queries, wide, operand)
    found |= {name: interleaved.tile(keys, narrow, operand) for name in ("k_tile", "v_tile")}
    if "wq" in inputs:
        columns = inputs["wq"].shape[2] * LANES
        found["wq_tile"] = interleaved.tile(queries, columns, jnp.float32)
        found["wq_rows"] = found["wq_late"] = pltpu.VMEM((1, queries // LANES, columns, LANES), jnp.float32)
    if "wk" in inputs:
        columns, tokens = inputs["wk"].shape[2] * LANES, round_up(keys, LANES)
        found["wk_tile"] = interleaved.tile(tokens, columns, jnp.float32)
        found["wk_cur"] = pltpu.VMEM((columns + SUBLANES, tokens), jnp.float32)
    for name, layout in (("pre", config.pre), ("post", config.post)):
        if layout is not None and layout.mixes:
            found[f"mix_{name}"], found["diagonal"] = mixing.scratch(config), mixing.diagonal_scratch()
    return found
