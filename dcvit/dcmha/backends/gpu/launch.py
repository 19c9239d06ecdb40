"""Launch of the GPU kernels over all tiles of a rectangle of queries and keys."""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dcvit.dcmha.backends.gpu import kernels
from dcvit.dcmha.backends.gpu.block import Block, Operands, Results, Scratch
from dcvit.dcmha.backends.gpu.config import MIN_ROW_MAX, QUERIES, KernelConfig, swizzled
from dcvit.dcmha.backends.gpu.ring import Reads, Ring
from dcvit.dcmha.backends.gpu.staging import Staging
from dcvit.dcmha.backends.gpu.tile import Tile
from dcvit.dcmha.shapes import Array, Ref, not_none

Kind: TypeAlias = Literal["statistics", "weights", "post_grad", "pre_grad"]

KERNELS = {
    "statistics": kernels.statistics,
    "weights": kernels.weights,
    "post_grad": kernels.post_grad,
    "pre_grad": kernels.pre_grad,
}


def sweeps(config: KernelConfig, kind: Kind) -> list[Reads]:
    """Return the inputs that each sweep of a kernel reads; a sweep is a loop over all heads of a group."""
    pre, post = bool(config.pre.planes), bool(config.post.planes)
    scores, both = Reads((0,), ("pre",)), Reads((0, 1))
    return {
        "statistics": [scores] * pre + [scores],
        "weights": [Reads((0,))] * post + [Reads((0,))],
        "post_grad": [scores] * pre + [both] * post + [both],
        "pre_grad": [both] * pre + [both],
    }[kind]


def output_shapes(config: KernelConfig, kind: Kind) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a kernel's outputs by their name in `Results`."""
    c, square = config, (config.queries, config.keys)
    found: dict[str, jax.ShapeDtypeStruct] = {}

    def add(name: str, *shape: int, dtype: jax.typing.DTypeLike = jnp.float32) -> None:
        found[name] = jax.ShapeDtypeStruct(shape, dtype)

    planes = {"statistics": c.pre.planes, "post_grad": c.pre.planes + c.post.planes}.get(kind, 0)
    if planes:
        add("planes", c.batch, c.groups, planes, *square)
    if kind == "statistics":
        add("row_sums", c.batch, c.heads, c.key_tiles, 2, c.queries)
        return found
    add("tile", c.batch, c.heads, *square, dtype=jnp.bfloat16)
    if kind != "weights":
        ranks = c.post if kind == "post_grad" else c.pre
        channels = ranks.channels("q") + (kind == "post_grad")  # the last one is delta
        add("row_sums", c.batch, c.heads, c.key_tiles, channels, c.queries)
        if ranks.key_wise:
            add("col_sums", c.batch, c.groups, c.queries // QUERIES, QUERIES, c.keys * ranks.channels("k"))
    return found


def scratch_shapes(config: KernelConfig, kind: Kind, pairs: int, rows: int, cols: int) -> dict[str, object]:
    """Return the buffers and barriers of a block by name in `Scratch`; `rows` and `cols` are numbers of channels."""
    c, out, transforms = config, output_shapes(config, kind), swizzled(config.head_dim)
    left = plgpu.SMEM((c.stages, QUERIES, c.head_dim), jnp.bfloat16, transforms=transforms)
    right = plgpu.SMEM((c.stages, c.block_keys, c.head_dim), jnp.bfloat16, transforms=transforms)
    copies = 2 + 2 * pairs
    found: dict[str, object] = {
        "scores": [(left, right)] * pairs,
        "rows": plgpu.SMEM((c.stages, rows, QUERIES), jnp.float32),
        "cols": plgpu.SMEM((c.stages, cols, c.block_keys), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=c.stages),
        "empty": plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.stages),
        "row_sums": None,
        "tile": None,
        "products": None,
    }
    if "row_sums" in out:
        found["row_sums"] = plgpu.SMEM((c.warpgroups, out["row_sums"].shape[3], QUERIES), jnp.float32)
    if "tile" in out:
        found["tile"] = plgpu.SMEM((c.warpgroups, *c.tile), jnp.bfloat16, transforms=swizzled(c.tile_keys))
    if "col_sums" in out:
        shape = (c.warpgroups, QUERIES, out["col_sums"].shape[-1] // c.key_tiles)
        found["products"] = plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(c.tile_keys))
    return found


def write_empty(block: Block, staging: Staging, kind: Kind) -> None:
    """Write the outputs of a block whose queries attend to none of its keys."""
    c, out = block.config, block.out
    if out.row_sums is not None:
        count = not_none(block.scratch.row_sums).shape[1]
        empty = [jnp.full((QUERIES,), 0.0, jnp.float32)] * count
        if kind == "statistics":
            empty[0] = jnp.full((QUERIES,), MIN_ROW_MAX, jnp.float32)
        staging.stage_rows([block.as_vector(x, 0) for x in empty])
    if out.tile is not None:
        staging.stage_tile(*block.zeros(1))
    if out.col_sums is not None:
        shape = (QUERIES, out.col_sums.shape[-1] // c.key_tiles)
        staging.save_col_sums(block.as_tile(jnp.zeros(shape, jnp.float32)))

    def body(head: Array, carry: tuple[()]) -> tuple[()]:
        staging.commit(head, tile=out.tile is not None, row_sums=out.row_sums is not None)
        return carry

    lax.fori_loop(jnp.int32(0), jnp.int32(c.group_heads), body, ())


def run_block(config: KernelConfig, kind: Kind, operands: Operands, out: Results, scratch: Scratch) -> None:
    """Run one thread block of the kernel `kind`."""
    c = config
    block = Block(c, operands, out, scratch)
    reads = sweeps(c, kind)
    staging = Staging(block, len(reads[-1].pairs))
    attended = block.is_attended()

    def work() -> None:
        ring = Ring(block, reads)
        ring.start()
        KERNELS[kind](block, ring, Tile(block), staging)

    pl.when(attended)(work)
    pl.when(jnp.logical_not(attended))(lambda: write_empty(block, staging, kind))
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that rectangles of equal shape are lowered once
def launch(kind: Kind, config: KernelConfig, operands: Operands) -> Results:
    """Return the outputs of one kernel, run over all tiles of a rectangle of queries and keys.

    Args:
      kind: a name in `KERNELS`.
      config: sizes; the operands are padded to them.
      operands: the inputs of the kernel as arrays.
    """
    c, (pairs, rows, cols, mask, visited, planes) = config, operands
    shapes = output_shapes(c, kind)
    names = tuple(shapes)

    def body(*refs: Ref, scratch: dict[str, object]) -> None:
        inputs, outputs = refs[: -len(names)], Results(**dict(zip(names, refs[-len(names) :], strict=True)))
        sides, others = inputs[: 2 * len(pairs)], inputs[2 * len(pairs) :]
        read = Operands(list(zip(sides[::2], sides[1::2], strict=True)), *others)
        run_block(c, kind, read, outputs, Scratch(**scratch))  # type: ignore[arg-type]

    def entry(*refs: Ref) -> None:
        scratch = scratch_shapes(c, kind, len(pairs), rows.shape[2], cols.shape[2])
        pl.run_scoped(lambda s: body(*refs, scratch=s), scratch, collective_axes="w")

    kernel = plgpu.kernel(
        entry,
        out_type=list(shapes.values()),
        grid=(c.keys // c.block_keys, c.queries // QUERIES, c.groups, c.batch),
        grid_names=("j", "i", "g", "b"),
        num_threads=c.warpgroups,
        thread_name="w",
        kernel_name=f"dcmha_{kind}",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,  # the default until JAX 0.10; these kernels set layouts
        ),
    )
    sides = [side for pair in pairs for side in pair]
    outs = kernel(*sides, rows, cols, mask, visited, *([] if planes is None else [planes]))
    return Results(**dict(zip(names, outs, strict=True)))
