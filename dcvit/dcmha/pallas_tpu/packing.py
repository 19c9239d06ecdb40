"""Packing of tokens and compose weights into the inputs of the TPU kernels, and unpacking of their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.numerics import LOG2_E
from dcvit.dcmha.pallas_tpu.config import LANES, BranchOffsets, ComposeLayout, KernelConfig
from dcvit.dcmha.shapes import Array

Side = Literal["q", "k"]
Part = Literal["down", "up", "gate"]


def side_weights(w: ComposeWeights | None, side: Side) -> Iterator[tuple[Part, str, Array]]:
    """Yield the part, the field name and the array of each existing weight of one side, in packed order."""
    if w is None:
        return
    fields = (w.q1, w.q2, w.qg) if side == "q" else (w.k1, w.k2, w.kg)
    parts: tuple[Part, ...] = ("down", "up", "gate")
    for part, suffix, x in zip(parts, "12g", fields, strict=True):
        if x is not None:
            yield part, side + suffix, x


def compose_layouts(
    pre: ComposeWeights | None, post: ComposeWeights | None, scale: float
) -> tuple[ComposeLayout | None, ComposeLayout | None]:
    """Return the layouts of both composes in the packed arrays; each compose starts at an even column."""
    starts: list[dict[str, int]] = [{}, {}]
    first, columns = [0, 0], [0, 0]
    sides: tuple[Side, ...] = ("q", "k")
    for side in sides:
        column = 0
        for c, w in enumerate((pre, post)):
            column += column % 2
            begin = column
            for _, name, x in side_weights(w, side):
                starts[c][name] = column
                column += math.prod(x.shape[2:])
            if side == "k":
                first[c], columns[c] = begin, column + column % 2 - begin

    def layout(c: int, w: ComposeWeights | None) -> ComposeLayout | None:
        if w is None:
            return None
        query, key = (BranchOffsets(*(starts[c].get(f"{side}{n}") for n in "12g")) for side in sides)
        ranks = [0 if x is None else x.shape[2] for x in (w.q1, w.k1)]
        skip = 1.0 if c else scale * LOG2_E
        return ComposeLayout(query, key, ranks[0], ranks[1], w.static is not None, skip, first[c], columns[c])

    return layout(0, pre), layout(1, post)


def flatten_heads(x: Array, length: int) -> Array:
    """Reshape (B N H D) to (B `length` H·D) and append zeros after the last token."""
    x = x.reshape(*x.shape[:2], -1)
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0)))


def pack(
    config: KernelConfig, q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None,
    mask: Array | None,
) -> dict[str, Array]:  # fmt: skip
    """Return the kernels' inputs by name: tokens padded to complete blocks, and one float32 array of weights per side.

    The weights of the pre-compose include the factor scale·log2(e), because a compose C is linear, C(c·a) = c·C(a), and
    the kernels compute softmax in base 2. The skip connection is added to one of the gates.
    """
    padded_q, padded_k = config.blocks_q * config.block_q, config.blocks_k * config.block_k
    inputs = {"q": flatten_heads(q, padded_q), "k": flatten_heads(k, padded_k), "v": flatten_heads(v, padded_k)}
    wq = _pack_side(config, pre, post, "q", padded_q)
    if wq is not None:
        inputs["wq"] = wq.reshape(wq.shape[0], -1, LANES, wq.shape[2]).swapaxes(2, 3)
    wk = _pack_side(config, pre, post, "k", padded_k)
    if wk is not None:
        inputs["wk"] = wk
        if config.packed_keys:
            pairs = wk.astype(jnp.bfloat16).reshape(*wk.shape[:2], -1, 2)
            inputs["wk"] = jax.lax.bitcast_convert_type(pairs, jnp.int32)
    for name, w in (("pre", pre), ("post", post)):
        if w is not None and w.static is not None:
            x = w.static.astype(jnp.float32).reshape(config.heads, -1)
            inputs[f"static_{name}"] = x * (config.scale * LOG2_E) if name == "pre" else x
    if mask is not None:
        inputs["mask"] = jnp.pad(mask, ((0, 0), (0, padded_k - mask.shape[1]), (0, padded_q - mask.shape[2])))
    return inputs


def _pack_side(
    config: KernelConfig, pre: ComposeWeights | None, post: ComposeWeights | None, side: Side, length: int
) -> Array | None:
    """Return the weights of one side of both composes as (B `length` columns), or None if there are none."""
    columns: list[Array] = []
    for c, w in enumerate((pre, post)):
        for part, _, x in side_weights(w, side):
            x = x.astype(jnp.float32)
            # The query-wise gate holds the skip connection; without it, the key-wise gate does.
            if part == "gate" and (side == "q" or (w is not None and w.qg is None)):
                x = 1 + x
            if c == 0 and part != "down":
                x = x * (config.scale * LOG2_E)
            columns.append(x.reshape(*x.shape[:2], -1))
        if sum(x.shape[2] for x in columns) % 2:
            columns.append(jnp.zeros((*columns[-1].shape[:2], 1), jnp.float32))
    if not columns:
        return None
    packed = jnp.concatenate(columns, axis=-1)
    return jnp.pad(packed, ((0, 0), (0, length - packed.shape[1]), (0, 0)))


def unpack(
    config: KernelConfig, grads: dict[str, Array], pre: ComposeWeights | None, post: ComposeWeights | None
) -> tuple[ComposeWeights | None, ComposeWeights | None]:
    """Return the gradients of both composes' weights from the gradients of the packed weights.

    The kernels use scores without the factor `scale` and pre-compose weights with the factor scale·log2(e); the
    gradients of the pre-compose are corrected for both.
    """
    fields: list[dict[str, Array]] = [{}, {}]
    sides: tuple[Side, ...] = ("q", "k")
    for side in sides:
        column = 0
        for c, w in enumerate((pre, post)):
            for part, name, x in side_weights(w, side):
                size = math.prod(x.shape[2:])
                span = slice(column, column + size)
                grad = grads["dwq"][:, span].swapaxes(1, 2) if side == "q" else grads["dwk"][..., span]
                grad = grad[:, : x.shape[1]].reshape(x.shape)
                if c == 0:
                    grad = grad * (1 / LOG2_E if part == "down" else config.scale)
                fields[c][name] = grad.astype(x.dtype)
                column += size
            column += column % 2
    for c, (name, w) in enumerate((("pre", pre), ("post", post))):
        if w is not None and w.static is not None:
            grad = jnp.sum(grads[f"dstatic_{name}"], axis=(0, 2, 3)).reshape(w.static.shape)
            fields[c]["static"] = (grad * config.scale if c == 0 else grad).astype(w.static.dtype)
    dpre, dpost = (None if w is None else ComposeWeights(**fields[c]) for c, w in enumerate((pre, post)))
    return dpre, dpost
