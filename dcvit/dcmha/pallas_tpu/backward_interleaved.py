"""The gradient TPU kernel for blocks of eight examples whose scores are one tile each.

An example has three stages (`dcvit.dcmha.pallas_tpu.backward_stages`). Beside the vector operations of a stage run
other matrix products and the vector operations of its neighbors:

| stage | beside it |
|---|---|
| score | gradient of the composed weights; dq and the gradients of all weights of the previous example |
| post | dk of the previous example |
| logit | dv; scores of the next example |
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.numerics import LOG2_E, cdiv, round_up
from dcvit.dcmha.pallas_tpu import backward_stages as on_block
from dcvit.dcmha.pallas_tpu import interleaved, mixing, mixing_gradients
from dcvit.dcmha.pallas_tpu.backward_stages import StageRefs
from dcvit.dcmha.pallas_tpu.config import (
    LANES,
    SUBLANES,
    ComposeLayout,
    Index,
    Interpret,
    KernelConfig,
    Which,
    block_specs,
)
from dcvit.dcmha.pallas_tpu.stages import Task, operand_scratch, ring, run_all, run_stage
from dcvit.dcmha.pallas_tpu.tile import broadcast_rows, dot, total
from dcvit.dcmha.pallas_tpu.weights import packed_columns, rows_of
from dcvit.dcmha.shapes import Array, Ref, not_none

TOKENS = ("q", "k", "v", "do", "wq", "wk")  # inputs with an axis of tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientRefs(StageRefs):
    """References of the kernel. Blocks have eight examples, buffers one; those of absent branches are None."""

    do: Ref  # gradient of the output
    lse: Ref  # log-sum-exp of each row
    dq: Ref
    dk: Ref
    dv: Ref
    dwq: Ref | None = None
    dwk: Ref | None = None
    dstatic_pre: Ref | None = None
    dstatic_post: Ref | None = None
    do_tile: Ref
    wq_next: Ref | None = None  # `wq_rows` of the next example
    wk_next: Ref | None = None  # `wk_cur` of the next and of the previous example
    wk_prev: Ref | None = None
    dwq_rows: Ref | None = None  # gradients of the weights of the previous example, (columns, tokens)
    dwk_rows: Ref | None = None


def kernel(config: KernelConfig, names: tuple[str, ...], *arguments: Ref) -> None:
    """Compute all gradients of the examples of a block."""
    refs = GradientRefs(**dict(zip(names, arguments, strict=True)))
    last = config.interleave - 1
    initialize(config, refs)
    run_all(prepare_next(config, refs, 0))
    jax.lax.fori_loop(0, config.interleave, lambda e, _: differentiate(config, refs, e), None)
    advance_weights(refs)
    run_all([*query_gradients(config, refs, last), *weight_gradients(config, refs, last)])
    run_all(key_gradients(config, refs, last))


def differentiate(config: KernelConfig, refs: GradientRefs, e: Index) -> None:
    """Process the stages of example `e`, the end of the previous example and the beginning of the next one.

    The first example has no previous one; what is computed for it is overwritten later.
    """
    previous, following = jnp.maximum(e - 1, 0), jnp.minimum(e + 1, config.interleave - 1)
    mask = refs.mask
    if mask is not None and mask.shape[0] > 1:
        mask = mask.at[pl.ds(e, 1)]
    advance_weights(refs)
    broadcast_rows(refs.lse.at[pl.ds(e, 1)], refs.m, config.heads, config.block_q)
    run_stage(
        config,
        functools.partial(on_block.score_products, config, refs),
        functools.partial(on_block.score_vectors, config, refs, mask),
        [
            *output_products(config, refs, e),
            *query_gradients(config, refs, previous),
            *weight_gradients(config, refs, previous),
            *build(config, refs, "post", refs.wk_cur),
            *build(config, refs, "post", refs.wk_cur, back=True),
        ],
    )
    run_stage(
        config,
        functools.partial(on_block.post_products, config, refs),
        functools.partial(on_block.post_vectors, config, refs),
        [*key_gradients(config, refs, previous), *build(config, refs, "pre", refs.wk_cur, back=True)],
        functools.partial(on_block.post_sums, config, refs),
    )
    on_block.finish_delta(config, refs)
    run_stage(
        config,
        functools.partial(on_block.logit_products, config, refs),
        functools.partial(on_block.logit_vectors, config, refs),
        [*value_gradients(config, refs, e), *prepare_next(config, refs, following)],
        functools.partial(on_block.logit_sums, config, refs),
    )


def initialize(config: KernelConfig, refs: GradientRefs) -> None:
    """Write the parts of the buffers that are the same for all examples."""
    for name in TOKENS:
        if getattr(refs, name) is not None:
            interleaved.clear_rest(getattr(refs, f"{name}_tile"), getattr(refs, name).shape[0])
    if refs.diagonal is not None:
        mixing.write_diagonal(config, refs.diagonal)


def advance_weights(refs: GradientRefs) -> None:
    """Make the weights of the next example those of the current one, and these those of the previous one."""
    if refs.wk_cur is not None:
        not_none(refs.wk_prev)[...] = refs.wk_cur[...]
        refs.wk_cur[...] = not_none(refs.wk_next)[...]
    if refs.wq_rows is not None:
        refs.wq_rows[...] = not_none(refs.wq_next)[...]


def prepare_next(config: KernelConfig, refs: GradientRefs, e: Index) -> list[Task]:
    """Return the work of reading example `e`, and of computing its scores and its matrix of the pre-compose."""
    q, k = not_none(refs.q_tile), not_none(refs.k_tile)

    def tokens() -> None:
        interleaved.read(config, refs.q, e, q)
        interleaved.read(config, refs.k, e, k)

    def scores(h: int) -> None:
        refs.x_next[h] = score_product(config, k, q, h)

    def weights() -> None:
        for source, tile in ((refs.wq, refs.wq_tile), (refs.wk, refs.wk_tile)):
            if source is not None:
                interleaved.read(config, source, e, not_none(tile))
        rows_of(config, refs.wq_tile, refs.wq_next, refs.wk_tile, refs.wk_next)

    first = [tokens, weights, *build(config, refs, "pre", refs.wk_next)]
    return [*first, *(functools.partial(scores, h) for h in range(config.heads))]


def build(
    config: KernelConfig, refs: GradientRefs, which: Which, rows: Ref | None, *, back: bool = False
) -> list[Task]:
    """Return the work of building one mixing matrix of all blocks from key-wise weights, if there is one."""
    out = getattr(refs, f"mix_{which}_back" if back else f"mix_{which}")
    static = refs.static_pre if which == "pre" else refs.static_post
    return [] if out is None else [lambda: mixing.build(config, which, rows, static, out, transposed=back)]


def score_product(config: KernelConfig, keys: Ref, queries: Ref, h: int) -> Array:
    """Return the products of the tokens of keys and queries of a head, (Bk, Bq)."""
    return dot(
        interleaved.columns(keys, config.key_lanes(h)), interleaved.columns(queries, config.query_lanes(h)), (1, 1)
    )


def output_products(config: KernelConfig, refs: GradientRefs, e: Index) -> list[Task]:
    """Return the work of computing the gradients of the composed weights."""
    v, do = not_none(refs.v_tile), not_none(refs.do_tile)

    def tokens() -> None:
        interleaved.read(config, refs.v, e, v)
        interleaved.read(config, refs.do, e, do)

    def product(h: int) -> None:
        refs.y[h] = score_product(config, v, do, h)

    return [tokens, *(functools.partial(product, h) for h in range(config.heads))]


def query_gradients(config: KernelConfig, refs: GradientRefs, e: Index) -> list[Task]:
    """Return the work of computing dqᵀ = kᵀ·dAᵀ."""
    k = not_none(refs.k_tile)
    read = functools.partial(interleaved.read, config, refs.k, e, k)
    return [read, *token_gradients(config, refs.dq, k, refs.da, 0, score_factor(config), e)]


def key_gradients(config: KernelConfig, refs: GradientRefs, e: Index) -> list[Task]:
    """Return the work of computing dkᵀ = qᵀ·dA."""
    q = not_none(refs.q_tile)
    read = functools.partial(interleaved.read, config, refs.q, e, q)
    return [read, *token_gradients(config, refs.dk, q, refs.da, 1, score_factor(config), e)]


def value_gradients(config: KernelConfig, refs: GradientRefs, e: Index) -> list[Task]:
    """Return the work of computing dvᵀ = dOᵀ·W."""
    return token_gradients(config, refs.dv, not_none(refs.do_tile), refs.w, 1, 1.0, e)


def score_factor(config: KernelConfig) -> float:
    """Return the factor from gradients of scores in units of log 2 to those of products of queries and keys."""
    return 1 / LOG2_E if config.pre is not None else config.scale


def token_gradients(
    config: KernelConfig, out: Ref, tokens: Ref, some_planes: Ref, axis: int, factor: float, e: Index
) -> list[Task]:
    """Return the work of writing gradients of tokens, tokensᵀ times planes, in parts of complete registers.

    Args:
      config: the sizes.
      out: gradients of the queries, or of the keys or values, which are sums over the queries' heads.
      tokens: the tokens on the other side of the product.
      some_planes: gradients of the scores, or composed weights, (H, Bq/128, Bk, 128).
      axis: the axis of a plane that the product contracts: 0 for gradients of queries, else 1.
      factor: multiplies the gradients.
      e: number of the example in the block.
    """
    width, shared = config.head_dim, config.heads // config.key_heads
    heads, each = (config.heads, 1) if axis == 0 else (config.key_heads, shared)
    lanes_of = config.key_lanes if axis == 0 else config.query_lanes
    together = math.lcm(width, LANES) // width

    def part(first: int) -> None:
        last = min(first + together, heads)
        start = lanes_of(first * each).start
        rows = interleaved.columns(tokens, slice(start, lanes_of(last * each - 1).stop)).T
        found = []
        for n in range(first, last):
            terms = []
            for h in range(n * each, (n + 1) * each):
                lanes = lanes_of(h)
                terms.append(product(rows[lanes.start - start : lanes.stop - start], h))
            found.append(total(terms))
        value = jnp.concatenate(found, axis=0)
        lanes = slice(first * width, last * width)
        interleaved.write(config, out, e, lanes, (value if factor == 1 else value * factor).T)

    def product(rows: Array, h: int) -> Array:
        count = some_planes.shape[1]
        if axis == 0:
            return jnp.concatenate([dot(rows, some_planes[h, n], (1, 0)) for n in range(count)], axis=1)
        return total([dot(rows[:, n * LANES : (n + 1) * LANES], some_planes[h, n], (1, 1)) for n in range(count)])

    return [functools.partial(part, first) for first in range(0, heads, together)]


def weight_gradients(config: KernelConfig, refs: GradientRefs, e: Index) -> list[Task]:
    """Return the work of writing the gradients of the weights of example `e`."""

    def query_wise() -> None:
        rows = not_none(refs.dwq_rows)
        for c in range(not_none(refs.gq).shape[0]):
            rows[c : c + 1] = jnp.sum(not_none(refs.gq)[c], axis=0, keepdims=True)
        interleaved.write(config, not_none(refs.dwq), e, slice(0, rows.shape[0]), rows[...].T)

    def matrix(layout: ComposeLayout, packed: Ref, static: Ref | None, tile: int) -> None:
        mixing_gradients.matrix_gradients(
            config, layout, packed, refs.wk_prev, refs.dwk_rows, static, tile, add_static=tile > 0
        )

    def key_wise() -> None:
        rows = not_none(refs.dwk_rows)
        interleaved.write(config, not_none(refs.dwk), e, slice(0, rows.shape[0]), rows[...].T)

    work: list[Task] = []
    if refs.dwq is not None:
        work.append(query_wise)
    composes = (config.pre, refs.dmix_pre, refs.dstatic_pre), (config.post, refs.dmix_post, refs.dstatic_post)
    for layout, packed, static in composes:
        if layout is not None and packed is not None:
            some = None if static is None else static.at[e]
            tiles = range(cdiv(config.block_k, LANES))
            work += [functools.partial(matrix, layout, packed, some, tile) for tile in tiles]
    return [*work, key_wise] if refs.dwk is not None else work


def gradients(config: KernelConfig, inputs: dict[str, Array], interpret: Interpret) -> dict[str, Array]:
    """Return all gradients by name, as `dcvit.dcmha.pallas_tpu.backward.backward`."""
    inputs = {name: interleaved.view(x) if name in TOKENS else x for name, x in inputs.items()}
    rest = block_specs(config, {name: x for name, x in inputs.items() if name not in TOKENS}, lambda: 0, lambda: 0)
    specs = {name: interleaved.block_spec(x) if name in TOKENS else rest[name] for name, x in inputs.items()}
    columns: dict[str, int] = {name: inputs[name].shape[2] * LANES for name in ("wq", "wk") if name in inputs}
    blocks, scratch = inputs["q"].shape[1], scratch_shapes(config, columns)
    shapes, out_specs = {}, {}
    for name in TOKENS:
        if name in inputs and name != "do":
            shapes[f"d{name}"] = jax.ShapeDtypeStruct(inputs[name].shape, jnp.float32)
            out_specs[f"d{name}"] = specs[name]
    for name in ("static_pre", "static_post"):
        if name in inputs:
            block = (config.interleave, config.heads * cdiv(config.heads, SUBLANES), SUBLANES, LANES)
            shapes[f"d{name}"] = jax.ShapeDtypeStruct((blocks * block[0], *block[1:]), jnp.float32)
            out_specs[f"d{name}"] = pl.BlockSpec(block, lambda b: (b, 0, 0, 0))
    results = pl.pallas_call(
        functools.partial(kernel, config, (*inputs, *shapes, *scratch)),
        grid=(blocks,),
        in_specs=list(specs.values()),
        out_specs=list(out_specs.values()),
        out_shape=list(shapes.values()),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=config.vmem_bytes),
        interpret=interpret,
        name="dcmha_gradients",
    )(*inputs.values())
    return {
        name: mixing_gradients.static_gradients(config, x) if "static" in name else interleaved.unview(x)
        for name, x in zip(shapes, results, strict=True)
    }


def vmem_bytes(config: KernelConfig) -> int:
    """Return the bytes of VMEM of two blocks of every array and of the buffers."""
    numbers = {f"w{side}": round_up(packed_columns(config, side), LANES) for side in ("q", "k")}
    columns: dict[str, int] = {name: number for name, number in numbers.items() if number}
    wide, narrow = config.heads * config.head_dim, config.key_heads * config.head_dim
    words = config.queries * (3 * wide + 2 * numbers["wq"]) + config.keys * (4 * narrow + 2 * numbers["wk"])
    rows = round_up(config.heads, SUBLANES) + round_up(config.block_k, interleaved.TILE_ROWS) // 2
    words += rows * config.block_q  # log-sum-exp and a mask of bfloat16
    mixed = [layout for layout in (config.pre, config.post) if layout is not None and layout.has_static]
    words += len(mixed) * config.heads * cdiv(config.heads, SUBLANES) * SUBLANES * LANES
    total = 2 * config.interleave * words * 4
    for x in scratch_shapes(config, columns).values():
        itemsize = np.dtype(x.dtype).itemsize
        rows = round_up(x.shape[-2], SUBLANES * 4 // itemsize)  # complete registers
        total += math.prod((*x.shape[:-2], rows, x.shape[-1])) * itemsize
    return total


def scratch_shapes(config: KernelConfig, columns: dict[str, int]) -> dict[str, pl.MemoryRef]:
    """Return the VMEM buffers by name. `columns` are those of the weights in HBM, by name."""
    heads, keys, queries, operand = config.heads, config.block_k, config.block_q, config.operand_dtype
    wide, narrow = heads * config.head_dim, config.key_heads * config.head_dim
    found = {name: pltpu.VMEM((heads, keys, queries), jnp.float32) for name in ("x_next", "x", "y", "p", "dp", "dl")}
    found |= {name: operand_scratch(config) for name in ("w", "da")}
    found |= {name: pltpu.VMEM((heads, SUBLANES, queries), jnp.float32) for name in ("m", "d")}
    found |= {"mixed": ring(config), "mixed_back": ring(config)}
    found |= {name: interleaved.tile(queries, wide, operand) for name in ("q_tile", "do_tile")}
    found |= {name: interleaved.tile(keys, narrow, operand) for name in ("k_tile", "v_tile")}
    if "wq" in columns:
        size = columns["wq"]
        found["wq_tile"] = interleaved.tile(queries, size, jnp.float32)
        found["wq_rows"] = found["wq_next"] = pltpu.VMEM((1, queries // LANES, size, LANES), jnp.float32)
        found["dwq_rows"] = pltpu.VMEM((size, queries), jnp.float32)
        found["gq"] = pltpu.VMEM((packed_columns(config, "q"), SUBLANES, queries), jnp.float32)
    if "wk" in columns:
        size, tokens = columns["wk"], round_up(keys, LANES)
        found["wk_tile"] = interleaved.tile(tokens, size, jnp.float32)
        rows = pltpu.VMEM((size + SUBLANES, tokens), jnp.float32)
        found |= dict.fromkeys(("wk_cur", "wk_next", "wk_prev"), rows)
        found["dwk_rows"] = pltpu.VMEM((size, tokens), jnp.float32)
    return found | compose_scratch(config)


def compose_scratch(config: KernelConfig) -> dict[str, pl.MemoryRef]:
    """Return the buffers of hidden planes, and of the matrices of key-wise branches with their gradients."""
    found: dict[str, pl.MemoryRef] = {}
    planes = [0]
    for name, layout in (("pre", config.pre), ("post", config.post)):
        if layout is None:
            continue
        planes.append(layout.query_only().hidden_planes(config.groups))
        if planes[-1]:
            found[f"{name}_hidden"] = pltpu.VMEM((planes[-1], config.block_k, config.block_q), jnp.float32)
        if layout.mixes:
            found[f"mix_{name}"] = found[f"mix_{name}_back"] = mixing.scratch(config)
            found[f"dmix_{name}"] = mixing_gradients.scratch(config, config.block_k // config.mix_keys)
            found["diagonal"] = mixing.diagonal_scratch()
    if max(planes):
        found["g_hidden"] = pltpu.VMEM((max(planes), config.block_k, config.block_q), jnp.float32)
    return found
