"""The four Mosaic GPU kernels of DCMHA, each a few sweeps over the heads of one tile. See pallas_gpu_tiles.

    statistics   sweep 1: planes of pre;  sweep 2: maximum and sum of 2^L over the tile's keys
    weights      sweep 1: planes of post; sweep 2: W
    post_grad    sweep 1: planes of pre;  sweep 2: planes of post and of its transpose;
                 sweep 3: W, sums of P∘dP (δ's parts), gradients of post's weights
    pre_grad     sweep 1: planes of pre's transpose; sweep 2: dS, gradients of pre's weights

`statistics` leaves pre's planes to `weights`, and `post_grad` those of pre and of post's transpose to `pre_grad`, as
float32 in global memory. A sweep whose compose has no planes is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dcvit.dcmha.pallas_gpu.tiling import FLOOR, QUERIES, Planes, Tile, Tiling, swizzled
from dcvit.dcmha.shapes import Array


def _statistics(tile: Tile, out: dict[str, Any]) -> None:
    t = tile.t
    planes = tile.zeros(t.pre.planes)
    if planes:
        planes = tile.sweep(0, lambda _, slot, planes: tile.down(slot, "pre", planes, tile.product(slot)), planes)
        tile.save(out["planes"], planes)

    def body(head: Any, slot: Any, carry: Any) -> Any:
        logits = tile.logits(slot, planes, tile.product(slot))
        largest = jnp.maximum(jnp.max(logits, axis=1), FLOOR)
        total = jnp.sum(jnp.exp2(logits - tile.spread(largest, 0)), axis=1)
        tile.reuse()
        tile.stage_rows([largest, total])
        tile.leave([("row_sums", tile.row_target(out, head))])
        return carry

    tile.sweep(tile.sweeps - 1, body, ())


def _weights(tile: Tile, out: dict[str, Any], saved: Any = None) -> None:
    t = tile.t
    pre = tile.restore(saved, 0, t.pre.planes)
    post = tile.zeros(t.post.planes)
    if post:

        def hidden(_: Any, slot: Any, planes: Planes) -> Planes:
            return tile.down(slot, "post", planes, tile.probabilities(slot, pre, tile.product(slot)))

        post = tile.sweep(0, hidden, post)

    def body(head: Any, slot: Any, carry: Any) -> Any:
        w = tile.up(slot, "post", post, tile.probabilities(slot, pre, tile.product(slot)))
        tile.reuse()
        tile.stage_tile(w)
        tile.leave([("tile", tile.tile_target(out, head))])
        return carry

    tile.sweep(tile.sweeps - 1, body, ())


def _post_grad(tile: Tile, out: dict[str, Any]) -> None:
    t = tile.t
    count = t.post.planes
    pre = tile.zeros(t.pre.planes)
    if pre:
        pre = tile.sweep(0, lambda _, slot, planes: tile.down(slot, "pre", planes, tile.product(slot)), pre)
    both = tile.zeros(2 * count)
    if both:

        def hidden(_: Any, slot: Any, both: Planes) -> Planes:
            p = tile.probabilities(slot, pre, tile.product(slot))
            post = tile.down(slot, "post", both[:count], p)
            return post + tile.down(slot, "post", both[count:], tile.product(slot, 1), transposed=True)

        both = tile.sweep(tile.sweeps - 2, hidden, both)
    post, back = both[:count], both[count:]
    tile.save(out.get("planes"), pre + back)

    def body(head: Any, slot: Any) -> None:
        p, dw = tile.probabilities(slot, pre, tile.product(slot)), tile.product(slot, 1)
        tile.reuse()
        tile.stage_tile(tile.up(slot, "post", post, p))
        rows, cols = tile.sums("post", p, dw, post, back)
        delta = p * tile.up(slot, "post", back, dw, transposed=True)
        tile.stage_rows([jnp.sum(x, axis=1) for x in [*rows, delta]])
        tile.stage_cols(head, cols)
        tile.leave([("tile", tile.tile_target(out, head)), ("row_sums", tile.row_target(out, head))])

    tile.sweep_with_cols(body, out["col_sums"])


def _pre_grad(tile: Tile, out: dict[str, Any], saved: Any = None) -> None:
    t = tile.t
    pre = tile.restore(saved, 0, t.pre.planes)
    back_post = tile.restore(saved, t.pre.planes, t.post.planes)

    def logit_gradient(slot: Any, s: Array) -> Array:
        p = tile.probabilities(slot, pre, s)
        dp = tile.up(slot, "post", back_post, tile.product(slot, 1), transposed=True)
        return p * (dp - tile.row(slot, t.channel("q", "delta")))

    back = tile.zeros(t.pre.planes)
    if back:

        def hidden(_: Any, slot: Any, planes: Planes) -> Planes:
            return tile.down(slot, "pre", planes, logit_gradient(slot, tile.product(slot)), transposed=True)

        back = tile.sweep(0, hidden, back)

    def body(head: Any, slot: Any) -> None:
        s = tile.product(slot)
        dl = logit_gradient(slot, s)
        tile.reuse()
        tile.stage_tile(tile.up(slot, "pre", back, dl, transposed=True))
        rows, cols = tile.sums("pre", s, dl, pre, back)
        tile.stage_rows([jnp.sum(x, axis=1) for x in rows])
        tile.stage_cols(head, cols)
        tile.leave([("tile", tile.tile_target(out, head)), ("row_sums", tile.row_target(out, head))])

    tile.sweep_with_cols(body, out["col_sums"])


def _nothing(tile: Tile, out: dict[str, Any], kind: str) -> None:
    """What a block leaves whose queries see none of its keys."""
    t = tile.t
    targets = []
    if "row_sums" in out:
        count = tile.scratch["row_sums"].shape[1]
        empty = [jnp.full((QUERIES,), 0.0, jnp.float32)] * count
        if kind == "statistics":
            empty[0] = jnp.full((QUERIES,), FLOOR, jnp.float32)
        tile.stage_rows([tile.cast(x, plgpu.Layout.WGMMA.reduce(1)) for x in empty])
        targets.append(("row_sums", tile.row_target))
    if "tile" in out:
        tile.stage_tile(*tile.zeros(1))
        targets.append(("tile", tile.tile_target))
    if "col_sums" in out:
        wide = (QUERIES, out["col_sums"].shape[-1] // t.columns)
        tile.save_cols(out["col_sums"], tile.cast(jnp.zeros(wide, jnp.float32), plgpu.Layout.WGMMA))

    def body(head: Any, carry: Any) -> Any:
        tile.leave([(name, target(out, head)) for name, target in targets])
        return carry

    lax.fori_loop(jnp.int32(0), jnp.int32(t.heads), body, ())


KERNELS: dict[str, Any] = {
    "statistics": _statistics,
    "weights": _weights,
    "post_grad": _post_grad,
    "pre_grad": _pre_grad,
}


def _sweeps(t: Tiling, kind: str) -> int:
    pre, post = bool(t.pre.planes), bool(t.post.planes)
    return 1 + {"statistics": pre, "weights": post, "post_grad": pre + post, "pre_grad": pre}[kind]


def _outputs(t: Tiling, kind: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a kernel's outputs: B (G or H) [tiles] [channels] (T or S, or T S)."""
    heads, real = t.groups * t.heads, jnp.float32
    square = (t.queries, t.key_count)
    which = {"post_grad": t.post, "pre_grad": t.pre}.get(kind)
    found: dict[str, jax.ShapeDtypeStruct] = {}
    planes = {"statistics": t.pre.planes, "post_grad": t.pre.planes + t.post.planes}.get(kind, 0)
    if planes:
        found["planes"] = jax.ShapeDtypeStruct((t.batch, t.groups, planes, *square), real)
    if kind == "statistics":
        found["row_sums"] = jax.ShapeDtypeStruct((t.batch, heads, t.columns, 2, t.queries), real)
    else:
        found["tile"] = jax.ShapeDtypeStruct((t.batch, heads, *square), t.dtype)
    if which is not None:
        channels = 1 + 2 * which.q + (kind == "post_grad")
        found["row_sums"] = jax.ShapeDtypeStruct((t.batch, heads, t.columns, channels, t.queries), real)
        shape = (t.batch, t.groups, t.queries // QUERIES, QUERIES, t.key_count * (1 + 2 * which.k))
        found["col_sums"] = jax.ShapeDtypeStruct(shape, real)
    return found


def _scratch(t: Tiling, kind: str, out: dict[str, Any], pairs: int, rows: int, cols: int) -> dict[str, Any]:
    transforms = swizzled(t.width, jnp.bfloat16)
    left = plgpu.SMEM((t.stages, t.parts, QUERIES, t.width), jnp.bfloat16, transforms=transforms)
    right = plgpu.SMEM((t.stages, t.parts, t.warpgroups, t.keys, t.width), jnp.bfloat16, transforms=transforms)
    copies = 1 + pairs * t.parts * (1 + t.warpgroups) + t.warpgroups
    found = {
        "scores": [(left, right)] * pairs,
        "rows": plgpu.SMEM((t.stages, rows, QUERIES), jnp.float32),
        "cols": plgpu.SMEM((t.stages, t.warpgroups, cols, t.keys), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=t.stages),
        "empty": plgpu.Barrier(num_arrivals=t.warpgroups, num_barriers=t.stages),
    }
    if "row_sums" in out:
        found["row_sums"] = plgpu.SMEM((t.warpgroups, out["row_sums"].shape[3], QUERIES), jnp.float32)
    if "tile" in out:
        found["tile"] = plgpu.SMEM((t.warpgroups, *t.tile), t.dtype, transforms=swizzled(t.keys, t.dtype))
    if "col_sums" in out:
        transforms = swizzled(t.keys, jnp.bfloat16)
        shape = (t.warpgroups, t.parts, QUERIES, out["col_sums"].shape[-1] // t.columns)
        found["products"] = plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)
        found["onehot"] = plgpu.SMEM((t.warpgroups, QUERIES, QUERIES), jnp.bfloat16, transforms=transforms)
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that rectangles of one shape are lowered once
def run(
    kind: str,
    t: Tiling,
    pairs: Sequence[tuple[Sequence[Array], Sequence[Array]]],
    rows: Array,
    cols: Array,
    bias: Array,
    saved: Array | None = None,
) -> dict[str, Array]:
    """Runs one kernel over all tiles of a rectangle of queries and keys.

    Args:
      kind: which of `KERNELS`.
      t: sizes and tiling; `rows`, `cols` and the operands are padded to it.
      pairs: (q, k), and (dO, v) for gradients, each side as its bfloat16 parts: (B T H D) and (B S K D).
      rows: (B H channels T) float32, query-wise weights, see `Tiling.channel`.
      cols: (B H channels S) float32, key-wise weights.
      bias: (1 or B, T, S) float32, 0 or INVISIBLE.
      saved: (B G planes T S) float32, planes that an earlier kernel left.

    Returns:
      `tile` (B H T S), W or dS; `row_sums` (B H tiles channels T), to be added over tiles of keys; `col_sums`
      (B G tiles 64 [tiles channels keys]), to be added over tiles of queries, where head j of a group stands in row j
      of the 64; `planes`, to be passed on as `saved`. Those that the kernel has.
    """
    shapes = _outputs(t, kind)
    names = tuple(shapes)

    def body(*refs: Any) -> None:
        refs, scratch = refs[:-1], refs[-1]
        inputs, outputs = refs[: -len(names)], dict(zip(names, refs[-len(names) :], strict=True))
        sides = [inputs[n * t.parts : (n + 1) * t.parts] for n in range(2 * len(pairs))]
        rest = inputs[2 * len(pairs) * t.parts :]
        operands = (list(zip(sides[::2], sides[1::2], strict=True)), *rest[:3])
        tile = Tile(t, operands, scratch, _sweeps(t, kind))
        seen = tile.visible()

        def compute() -> None:
            if not t.interpret:
                plgpu.set_max_registers(t.registers, action="increase")
            tile.seen = tile.load(tile.bias, lax.rem(tile.b, jnp.int32(tile.bias.shape[0])))
            KERNELS[kind](tile, outputs, *rest[3:])

        def work() -> None:
            pl.when(tile.w < t.warpgroups)(compute)
            pl.when(tile.w == t.warpgroups)(tile.produce)

        if seen is None:
            work()
        else:
            pl.when(seen)(work)
            idle = jnp.logical_and(jnp.logical_not(seen), tile.w < t.warpgroups)
            pl.when(idle)(lambda: _nothing(tile, outputs, kind))
        plgpu.wait_smem_to_gmem(0)

    def entry(*refs: Any) -> None:
        scratch = _scratch(t, kind, shapes, len(pairs), rows.shape[2], cols.shape[2])
        pl.run_scoped(lambda s: body(*refs, s), scratch, collective_axes="w")

    kernel = plgpu.kernel(
        entry,
        out_type=list(shapes.values()),
        grid=(t.columns // t.warpgroups, t.queries // QUERIES, t.groups, t.batch),
        grid_names=("j", "i", "g", "b"),
        num_threads=t.warpgroups + 1,
        thread_name="w",
        kernel_name=f"dcmha_{kind}",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=_interpreter() if t.interpret else None,
    )
    sides = [part for pair in pairs for side in pair for part in side]
    outs = kernel(*sides, rows, cols, bias, *([] if saved is None else [saved]))
    return dict(zip(names, outs, strict=True))


@functools.cache
def _interpreter() -> Any:
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # no public name yet

    return InterpretGPUParams()
