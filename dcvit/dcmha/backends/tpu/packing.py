"""Packing of tokens and compose weights into the inputs of the TPU kernels, and unpacking of their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dcvit.dcmha.backends.tpu import interleaved
from dcvit.dcmha.backends.tpu.call import Blocked
from dcvit.dcmha.backends.tpu.config import LANES, BranchOffsets, ComposeLayout, KernelConfig
from dcvit.dcmha.backends.tpu.weights import Side, corrected, scaled
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.inputs import Inputs
from dcvit.dcmha.numerics import LOG2_E
from dcvit.dcmha.segments import pad_ids
from dcvit.dcmha.shapes import Array

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
        return interleave(x.astype(config.token_dtype))
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
        return interleave(x.reshape(*x.shape[:2], -1).astype(config.token_dtype))
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
    held: Array = jax.lax.optimization_barrier(x)
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


def pack(config: KernelConfig, inputs: Inputs) -> dict[str, Blocked]:
    """Return the kernels' inputs by name: tokens, one array of weights for each side, static weights, mask and ids.

    The letters in `Blocked.axes` are B for examples, or blocks of interleaved ones, T for queries and S for keys. The
    mask of `inputs` is (#B S T), in the dtype in which the kernels read it.
    """
    q, k, v, pre, post, mask, segments = inputs
    padded_q, padded_k = config.blocks_q * config.block_q, config.blocks_k * config.block_k
    packed = {"q": query_array(config, q)}
    packed |= {name: key_array(config, x) for name, x in (("k", k), ("v", v))}
    if config.family == "interleaved":
        weights: dict[str, Blocked | None] = {"weights": _pack_both_sides(config, pre, post)}
    else:
        weights = {
            "wq": _pack_side(config, pre, post, "q", padded_q), "wk": _pack_side(config, pre, post, "k", padded_k)
        }  # fmt: skip
    packed |= {name: x for name, x in weights.items() if x is not None}
    for name, w in (("pre", pre), ("post", post)):
        if w is not None and w.static is not None:
            x = w.static.astype(jnp.float32).reshape(config.heads, -1)
            packed[f"static_{name}"] = Blocked(x * (config.scale * LOG2_E) if name == "pre" else x)
    if mask is not None:
        mask = jnp.pad(mask, ((0, 0), (0, padded_k - mask.shape[1]), (0, padded_q - mask.shape[2])))
        examples, axes = (config.examples, "BST") if len(mask) > 1 else (1, ".ST")
        packed["mask"] = Blocked(mask, (examples, config.block_k, config.block_q), axes)
    if segments is not None:  # see `dcvit.dcmha.backends.tpu.tile`
        ids_k = pad_ids(segments.keys, padded_k)[:, :, None]
        packed["ids_q"] = with_columns(config, pad_ids(segments.queries, padded_q)[:, None])
        packed["ids_k"] = with_rows(config, jnp.broadcast_to(ids_k, (*ids_k.shape[:2], LANES)))
    return packed


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
    x = _joined(columns)
    return interleave(jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % LANES))))


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
    config: KernelConfig, grads: dict[str, Array], pre: ComposeWeights | None, post: ComposeWeights | None
) -> tuple[ComposeWeights | None, ComposeWeights | None]:
    """Return the gradients of both composes' weights from the gradients of the packed weights.

    The kernels use scores without the factor `scale` and pre-compose weights with the factor scale·log2(e); the
    gradients of the pre-compose are corrected for both.
    """
    fields: list[dict[str, Array]] = [{}, {}]
    for by_token, sides in _packed_gradients(config, grads):
        for side in sides:
            by_token = corrected(config, by_token, side)
        order = [one for side in sides for one in packed_order(pre, post, side)]
        by_token, column = by_token.astype(common_dtype([x for *_, x in order])), 0
        for c, _, name, x in order:
            size = math.prod(x.shape[2:])
            grad = by_token[:, : x.shape[1], column : column + size]
            fields[c][name] = grad.reshape(x.shape).astype(x.dtype)
            column += size
    for c, (name, w) in enumerate((("pre", pre), ("post", post))):
        if w is not None and w.static is not None:
            grad = jnp.sum(grads[f"dstatic_{name}"], axis=(0, 2, 3)).reshape(w.static.shape)
            fields[c]["static"] = (grad * config.scale if c == 0 else grad).astype(w.static.dtype)
    dpre, dpost = (None if w is None else ComposeWeights(**fields[c]) for c, w in enumerate((pre, post)))
    return dpre, dpost


def _packed_gradients(config: KernelConfig, grads: dict[str, Array]) -> Iterator[tuple[Array, tuple[Side, ...]]]:
    """Yield the gradients of packed weights, (B, tokens, columns), and the sides to which their columns belong."""
    if "dweights" in grads:
        yield deinterleave(grads["dweights"]), ("q", "k")
    if "dwq" in grads:
        yield grads["dwq"].swapaxes(1, 2), ("q",)
    if "dwk" in grads:
        yield grads["dwk"], ("k",)
