"""Packing of tokens and compose weights into the inputs of the TPU kernels, and unpacking of their gradients.

The packed weights of a side, query-wise or key-wise, are (tokens, columns); `compose_layouts` says which column is
which weight. The kernels use query-wise weights as rows along lanes (`rows_of`), and key-wise weights as matrices
(`dcvit.dcmha.backends.tpu.mixing`). Kernels of the family "interleaved" convert the weights in VMEM, where a
transposition costs little; they read both sides from one array, with the query-wise columns first. In the family
"matrix", XLA converts query-wise weights, and the kernel that makes the matrices converts key-wise weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from dcvit.dcmha.backends.tpu import interleaved
from dcvit.dcmha.backends.tpu.call import Blocked, Packed, vmem
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, BranchOffsets, ComposeLayout, KernelConfig
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.inputs import Inputs
from dcvit.dcmha.numerics import LOG2_E, round_up
from dcvit.dcmha.segments import pad_ids
from dcvit.dcmha.shapes import Array, Ref

Side = Literal["q", "k"]
Part = Literal["down", "up", "gate"]


def packed_order(
    pre: ComposeWeights | None, post: ComposeWeights | None, side: Side
) -> Iterator[tuple[int, Part, str, Array]]:
    """Yield (0 if in `pre`, else 1; "down", "up" or "gate"; field; array) of each weight of a side, in packed order."""
    parts: tuple[Part, ...] = ("down", "up", "gate")
    for part, suffix in zip(parts, "12g", strict=True):
        for c, w in enumerate((pre, post)):
            x = None if w is None else getattr(w, side + suffix)
            if x is not None:
                yield c, part, side + suffix, x


def compose_layouts(
    pre: ComposeWeights | None, post: ComposeWeights | None, scale: float
) -> tuple[ComposeLayout | None, ComposeLayout | None]:
    """Return the layouts of both composes in the packed arrays.

    The columns of a side are the down projections of both composes, their up projections and their gates: the order in
    which `dcvit.dcmha.compose` computes them, so that packing them moves little.
    """

    def offsets(side: Side) -> list[BranchOffsets]:
        starts: list[dict[str, int]] = [{}, {}]
        column = 0
        for c, part, _, x in packed_order(pre, post, side):
            starts[c][part] = column
            column += math.prod(x.shape[2:])
        return [BranchOffsets(*(some.get(part) for part in ("down", "up", "gate"))) for some in starts]

    queries, keys = offsets("q"), offsets("k")

    def layout(c: int, w: ComposeWeights | None) -> ComposeLayout | None:
        if w is None:
            return None
        ranks = [0 if x is None else x.shape[2] for x in (w.q1, w.k1)]
        skip = 1.0 if c else scale * LOG2_E
        return ComposeLayout(queries[c], keys[c], ranks[0], ranks[1], w.static is not None, skip)

    return layout(0, pre), layout(1, post)


def key_array(config: KernelConfig, x: Array) -> Blocked:
    """Convert keys or values (B S K D) to the kernels' layout: (B, S, K·D) padded to blocks, or as `interleave`."""
    x = x.reshape(*x.shape[:2], -1)
    if config.family == "interleaved":
        return interleave(x)
    return with_rows(
        config, jnp.pad(x.astype(config.operand_dtype), ((0, 0), (0, -x.shape[1] % config.block_k), (0, 0)))
    )


def with_rows(config: KernelConfig, x: Array) -> Blocked:
    """Return the declaration of an array with a row for each key, (B, S, columns), in blocks of keys."""
    return Blocked(x, (1, config.block_k, x.shape[2]), "BS.")


def with_columns(config: KernelConfig, x: Array | jax.ShapeDtypeStruct) -> Blocked:
    """Return the declaration of an array with a column for each query, (B, rows, T), in blocks of queries."""
    return Blocked(x, (config.examples, x.shape[1], config.block_q), "B.T")


def query_array(config: KernelConfig, x: Array) -> Blocked:
    """Convert queries, or an array of their shape (B T H D), to the kernels' layout.

    Kernels of one example per block have a column for each query, (B, H·D, T) padded to blocks, because queries lie
    along the lanes of their tiles; the others use `interleave`.
    """
    if config.family == "interleaved":
        return interleave(x.reshape(*x.shape[:2], -1))
    x = jnp.transpose(x.astype(config.operand_dtype), (0, 2, 3, 1)).reshape(x.shape[0], -1, x.shape[1])
    return with_columns(config, jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % config.block_q))))


def from_query_array(config: KernelConfig, x: Array, like: Array) -> Array:
    """Convert a kernel's output in the layout of `query_array` to shape and dtype of `like`, (B T H D)."""
    if config.family == "interleaved":
        return from_token_array(config, x, like)
    batch, length, *rest = like.shape
    return jnp.transpose(x[:, :, :length].reshape(batch, *rest, length), (0, 3, 1, 2)).astype(like.dtype)


def interleave(x: Array) -> Blocked:
    """Return (B, N, columns) as blocks of interleaved examples, see `dcvit.dcmha.backends.tpu.interleaved`.

    Swapping the axes of examples and tokens moves no bytes on a TPU. The barrier, here and in `deinterleave`, keeps XLA
    from moving the swap into a matrix product, which would need a copy.
    """
    held: Array = jax.lax.optimization_barrier(x.astype(jnp.float32))  # loads with a stride have 32-bit elements
    view = interleaved.view(held.swapaxes(0, 1))
    return Blocked(view, (len(view), 1, *view.shape[2:]), ".B...")


def deinterleave(x: Array) -> Array:
    """Convert a kernel's output of interleaved examples to (B, N, columns)."""
    held: Array = jax.lax.optimization_barrier(interleaved.unview(x).swapaxes(0, 1))
    return held


def from_token_array(config: KernelConfig, x: Array, like: Array) -> Array:
    """Convert a kernel's output for keys, or interleaved tokens, to shape and dtype of `like`, (B N H D)."""
    if config.family == "interleaved":
        x = deinterleave(x)
    return x[:, : like.shape[1]].reshape(like.shape).astype(like.dtype)


def pack(config: KernelConfig, inputs: Inputs, packed: Array | None = None) -> Packed[Blocked]:
    """Return the kernels' inputs: tokens, one array of weights for each side, static weights, mask and ids.

    The letters in `Blocked.axes` are B for examples, or blocks of interleaved ones, T for queries and S for keys. The
    mask of `inputs` is (#B S T); the kernels read it as bfloat16. `packed` has the weights of both sides, if they are
    computed by `dcvit.dcmha.backends.tpu.second_layer`.
    """
    q, k, v, pre, post, mask, segments, *_ = inputs
    padded_q, padded_k = config.blocks_q * config.block_q, config.blocks_k * config.block_k
    wq, wk, weights = None, None, None
    if packed is not None:
        weights = interleave(_whole_registers(packed))
    elif config.family == "interleaved":
        weights = _pack_both_sides(config, pre, post)
    else:
        wq, wk = _pack_side(config, pre, post, "q", padded_q), _pack_side(config, pre, post, "k", padded_k)
    packed_mask, ids_q, ids_k = None, None, None
    if mask is not None:
        mask = jnp.pad(
            mask.astype(jnp.bfloat16), ((0, 0), (0, padded_k - mask.shape[1]), (0, padded_q - mask.shape[2]))
        )
        examples, axes = (config.examples, "BST") if len(mask) > 1 else (1, ".ST")
        packed_mask = Blocked(mask, (examples, config.block_k, config.block_q), axes)
    if segments is not None:  # see `dcvit.dcmha.backends.tpu.tile`
        ids = pad_ids(segments.keys, padded_k)[:, :, None]
        ids_q = with_columns(config, pad_ids(segments.queries, padded_q)[:, None])
        ids_k = with_rows(config, jnp.broadcast_to(ids, (*ids.shape[:2], LANES)))
    static = _pack_static(config, pre, config.scale * LOG2_E), _pack_static(config, post, 1.0)
    return Packed(
        query_array(config, q), key_array(config, k), key_array(config, v), wq, wk, weights, static, packed_mask, ids_q,
        ids_k,
    )  # fmt: skip


def _pack_static(config: KernelConfig, w: ComposeWeights | None, factor: float) -> Blocked | None:
    """Return the static weights of a compose times a factor, (H, H/G), or None without them."""
    if w is None or w.static is None:
        return None
    x = w.static.astype(jnp.float32).reshape(config.heads, -1)
    return Blocked(x if factor == 1 else x * factor)


def _pack_side(
    config: KernelConfig, pre: ComposeWeights | None, post: ComposeWeights | None, side: Side, length: int
) -> Blocked | None:
    """Return the packed weights of one side ("q" or "k") of both composes for `length` tokens; None if there are none.

    Query-wise weights are `scaled`; a kernel converts key-wise weights, which are packed unchanged.
    """
    columns = [x.reshape(*x.shape[:2], -1) for *_, x in packed_order(pre, post, side)]
    if not columns:
        return None
    x = _joined(columns)
    rows = (0, length - x.shape[1])
    if side == "k":
        return with_rows(config, jnp.pad(x, ((0, 0), rows, (0, -x.shape[2] % LANES))))
    x = jnp.pad(scaled(config, x), ((0, 0), rows, (0, 0)))
    x = x.reshape(x.shape[0], -1, LANES, x.shape[2]).swapaxes(2, 3)
    return Blocked(x, (1, config.block_q // LANES, *x.shape[2:]), "BT..")


def _pack_both_sides(config: KernelConfig, pre: ComposeWeights | None, post: ComposeWeights | None) -> Blocked | None:
    """Return the weights of both sides of interleaved examples, packed in one array; None if there are none.

    An array's columns are padded to a multiple of 128, so that with 6 heads both sides take as much memory as one. The
    kernel converts the weights.
    """
    sides: tuple[Side, ...] = ("q", "k")
    columns = [x.reshape(*x.shape[:2], -1) for side in sides for *_, x in packed_order(pre, post, side)]
    if not columns:
        return None
    tokens = max(config.queries, config.keys)
    columns = [jnp.pad(x, ((0, 0), (0, tokens - x.shape[1]), (0, 0))) if x.shape[1] < tokens else x for x in columns]
    return interleave(_whole_registers(_joined(columns)))


def _whole_registers(x: Array) -> Array:
    """Return (B, N, columns) with columns of zeros, so that they are a multiple of 128."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % LANES)))


def _joined(columns: Sequence[Array]) -> Array:
    """Return weights concatenated along their columns, in float32.

    XLA does not copy columns that are slices of one array (`dcvit.dcmha.dynamic_weights`) and of this dtype.
    """
    dtype = common_dtype(columns)
    return jnp.concatenate([x.astype(dtype) for x in columns], axis=-1).astype(jnp.float32)


def common_dtype(some: Sequence[Array]) -> DTypeLike:
    """Return the dtype that all arrays have, or else float32."""
    dtypes = {x.dtype for x in some}
    return dtypes.pop() if len(dtypes) == 1 else jnp.float32


def unpack(
    config: KernelConfig, grads: Packed[Array], pre: ComposeWeights | None, post: ComposeWeights | None
) -> tuple[ComposeWeights | None, ComposeWeights | None]:
    """Return the gradients of both composes' weights from the gradients of the packed weights.

    The kernels use scores without the factor `scale` and pre-compose weights with the factor scale·log2(e); the
    gradients of the pre-compose are corrected for both.
    """
    fields: list[dict[str, Array]] = [{}, {}]
    for by_token, sides in _packed_gradients(grads):
        by_token = by_token * corrections(config, sides, by_token.shape[2])[None, None]
        order = [one for side in sides for one in packed_order(pre, post, side)]
        by_token, column = by_token.astype(common_dtype([x for *_, x in order])), 0
        for c, _, name, x in order:
            size = math.prod(x.shape[2:])
            grad = by_token[:, : x.shape[1], column : column + size]
            fields[c][name] = grad.reshape(x.shape).astype(x.dtype)
            column += size
    for c, (w, static) in enumerate(zip((pre, post), grads.static, strict=True)):
        if w is not None and w.static is not None and static is not None:
            grad = jnp.sum(static, axis=(0, 2, 3)).reshape(w.static.shape)
            fields[c]["static"] = (grad * config.scale if c == 0 else grad).astype(w.static.dtype)
    dpre, dpost = (None if w is None else ComposeWeights(**fields[c]) for c, w in enumerate((pre, post)))
    return dpre, dpost


def _packed_gradients(grads: Packed[Array]) -> Iterator[tuple[Array, tuple[Side, ...]]]:
    """Yield the gradients of packed weights, (B, tokens, columns), and the sides to which their columns belong."""
    if grads.weights is not None:
        yield deinterleave(grads.weights), ("q", "k")
    if grads.wq is not None:
        yield grads.wq.swapaxes(1, 2), ("q",)
    if grads.wk is not None:
        yield grads.wk, ("k",)


def packed_columns(config: KernelConfig, side: Side) -> int:
    """Return the number of packed columns of the weights of one side."""
    return max((stop for _, _, _, stop in _parts(config, side)), default=0)


def _parts(config: KernelConfig, side: Side) -> Iterator[tuple[ComposeLayout, str, int, int]]:
    """Yield (compose, "down", "up" or "gate", first column, end column) of each packed weight of one side."""
    for layout in (config.pre, config.post):
        if layout is None:
            continue
        offsets, rank = (layout.query, layout.query_rank) if side == "q" else (layout.key, layout.key_rank)
        for name, start in offsets._asdict().items():
            if start is not None:
                yield layout, name, start, start + (1 if name == "gate" else rank) * config.heads


def scaled(config: KernelConfig, x: Array, start: int = 0) -> Array:
    """Return query-wise weights with scale·log2(e) of the pre-compose in them, and the skip connection in gates.

    A compose C is linear, C(c·a) = c·C(a), so that its up projections and gates can include the scale; the kernels
    compute softmax in base 2.

    Args:
      config: the layout of the columns.
      x: weights, with the columns as the last axis.
      start: number of the first column of `x` among the query-wise columns.
    """
    column = _column(x) + start
    factor, term = (jnp.full(column.shape, value, jnp.float32) for value in (1.0, 0.0))
    for layout, name, first, stop in _parts(config, "q"):
        inside = (column >= first) & (column < stop)
        if name != "down":
            factor = jnp.where(inside, layout.skip_factor, factor)
        if name == "gate":
            term = jnp.where(inside, layout.skip_factor, term)
    return x * factor + term


def corrections(config: KernelConfig, sides: Sequence[Side], count: int) -> np.ndarray:
    """Return the factors that turn the gradients of `count` packed columns of `sides` into those of the weights.

    The kernels use scores without the factor `scale`, and pre-compose weights with the factor scale·log2(e).
    """
    found = np.ones(count, np.float32)
    for side in sides:
        for layout, name, start, stop in _parts(config, side):
            if layout is config.pre:
                found[start:stop] = 1 / LOG2_E if name == "down" else config.scale
    return found


def _column(x: Array) -> Array:
    """Return the numbers of the columns, (1, …, 1, columns)."""
    return jax.lax.broadcasted_iota(jnp.int32, (*[1] * (x.ndim - 1), x.shape[-1]), x.ndim - 1)


def rows_of(config: KernelConfig, weights: Ref, wq_rows: Ref | None, wk_rows: Ref | None) -> None:
    """Transpose the weights of an example, so that each weight is a row with the tokens along lanes.

    Args:
      config: the layout of the columns.
      weights: all weights of the example, (columns/128, tokens, 128).
      wq_rows: output for query-wise weights, as `scaled` returns them, (1, Bq/128, columns, 128).
      wk_rows: output for key-wise weights, for `mixing.build`, (columns + 8, keys); only `used_key_rows` are written.
    """
    for n in range(weights.shape[0]):
        start = n * LANES
        rows = scaled(config, weights[n], start).T
        if wq_rows is not None and start < wq_rows.shape[2]:
            stop = min(wq_rows.shape[2], start + LANES)
            for register in range(wq_rows.shape[1]):
                lanes = slice(register * LANES, (register + 1) * LANES)
                wq_rows[0, register, start:stop] = rows[: stop - start, lanes]
        if wk_rows is not None:
            first = max(used_key_rows(config).start - start, 0)
            if first < LANES:
                wk_rows[start + first : start + LANES] = rows[first:, : wk_rows.shape[1]]


def used_key_rows(config: KernelConfig) -> slice:
    """Return the slice of rows of `wk_rows` (see `rows_of`) from the register with the first key-wise weight on."""
    first = min((start for _, _, start, _ in _parts(config, "k")), default=0)
    return slice(first // SUBLANES * SUBLANES, None)


def rows_buffers(config: KernelConfig) -> tuple[pl.MemoryRef | None, pl.MemoryRef | None]:
    """Return buffers for the results of `rows_of`, None for a side without weights."""
    queries, keys = packed_columns(config, "q"), packed_columns(config, "k")
    shape = (1, config.block_q // LANES, round_up(queries, SUBLANES), LANES)
    size = round_up(keys, LANES) + SUBLANES, round_up(config.block_k, LANES)
    return vmem(shape) if queries else None, vmem(size) if keys else None


def transpose_key_weights(wk: Ref, out: Ref) -> None:
    """Transpose key-wise weights (1, Bk, columns) for `mixing.build` to `out`, a `key_rows_buffer`."""
    for start in range(0, wk.shape[2], LANES):
        out[start : start + LANES, : wk.shape[1]] = wk[0, :, start : start + LANES].T


def key_rows_buffer(columns: int) -> pl.MemoryRef:
    """Return a buffer for the key-wise weights of at most 128 keys, (columns + 8, 128)."""
    return vmem((columns + SUBLANES, LANES))
