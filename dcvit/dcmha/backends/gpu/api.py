"""DCMHA for NVIDIA Hopper GPUs: Pallas kernels (Mosaic GPU), forward and backward, without atomics.

The kernels use Mosaic GPU because Pallas' Triton backend is deprecated from JAX 0.11 on and will be removed (Pallas
changelog, 0.11.0).

A layer is split into rectangles of queries and keys (`dcvit.dcmha.backends.gpu.tiling.spans`): 512 queries of a causal
layer and the keys before them, 256 queries of a local layer and the keys of their windows, all queries of a short
sequence. A loop runs over rectangles of equal shape. A causal layer has four shapes, each with the number of keys of
the largest rectangle in its loop; a local layer has one, so that the number of compiled kernels does not grow with the
length. For each rectangle, the kernels process all heads tile by tile (`dcvit.dcmha.backends.gpu.tile`). They write the
composed weights W = C_post(softmax(C_pre(scale·q·k))), and in the backward pass the gradient dS of the scores, in
bfloat16; tiles in which no query attends to a key are not computed. XLA computes the products W·v, Wᵀ·dO, dS·k and
dSᵀ·q. W and dS are written once and read once or twice. Scores and uncomposed weights stay on the chip. The 2R hidden
planes of a compose are passed from one kernel to the next in global memory. The outputs of the kernels take at most
`WORKSPACE_BYTES` at a time: larger layers are computed in parts of their examples, and with fewer queries in a
rectangle (`dcvit.dcmha.backends.gpu.tiling.partition`).

Queries, keys and values are bfloat16, and a layer has at least one composition: plain attention on GPUs is cuDNN's or
XLA's. The backward pass needs the inputs and the log-sum-exp, B·H·T in float32.

docs/performance.md has times on an H200. The keys of a tile and the number of warpgroups in
`dcvit.dcmha.backends.gpu.tiling` were the fastest of those tried with an earlier ring, which had a warpgroup that only
copied.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from dcvit.dcmha.backends.gpu.config import Which
from dcvit.dcmha.backends.gpu.launch import launch
from dcvit.dcmha.backends.gpu.rectangle import Layer, Rectangle, compose_gradients
from dcvit.dcmha.backends.gpu.tiling import Partition, check_supported, in_parts, partition
from dcvit.dcmha.gradients import with_backward
from dcvit.dcmha.inputs import Call, Inputs, Options, reason_of
from dcvit.dcmha.numerics import LOG2_E
from dcvit.dcmha.shapes import Array, Float, not_none

WHICH: tuple[Which, ...] = ("pre", "post")


def supports(call: Call) -> str | None:
    """Return the reason why a call is not supported, or None."""
    return reason_of(check_supported, call)


def run(call: Call) -> Float[Array, "B T H D"]:
    """Compute the attention that a `Call` describes, and return the outputs of the heads.

    Scores and weights are float32; W·v has bfloat16 operands.

    Raises:
      UnsupportedError: the kernels do not support the device, the call, the dtypes or the sizes.
    """
    check_supported(call)
    options = dataclasses.replace(call.options, causal=call.options.causal or call.options.window is not None)
    return _attention(options, call.inputs)


def _forward(options: Options, x: Inputs) -> tuple[Array, Array]:
    """Return the outputs of the heads (B T H D), and the base-2 log-sum-exp of the scores of each query (B H T)."""
    size = partition(x, options, backward=False)
    return in_parts(functools.partial(_part, options, size), size, (x,))


def _backward(options: Options, x: Inputs, results: tuple[Array, Array], d_out: Array) -> Inputs:
    size = partition(x, options, backward=True)
    return in_parts(functools.partial(_part_gradients, options, size), size, (x, d_out, results[1]))


def _part(options: Options, size: Partition, x: Inputs) -> tuple[Array, Array]:
    """Return the results of `_forward` for one part of the examples: `x` has its arrays, `size` its sizes."""
    layer = Layer(options, size.rows, x)

    def attend(r: Rectangle, carry: tuple[()]) -> tuple[tuple[()], tuple[Array, Array]]:
        found = launch("statistics", r.config, r.operands())
        lse = log_sum_exp(not_none(found.row_sums))
        w = not_none(launch("weights", r.config, r.operands(lse, planes=found.planes)).tile)
        out = product("bkgts,bskd->btkgd", r.by_key_head(w, 1), r.keys.arrays[1])
        return carry, (out.reshape(r.queries.arrays[0].shape).astype(x.q.dtype), lse)

    _, (out, lse) = layer.scan(attend, ())
    return layer.join(out, 1), layer.join(lse, 2)


def _part_gradients(options: Options, size: Partition, x: Inputs, d_out: Array, lse: Array) -> Inputs:
    """Return the gradients of the arrays `x` of one part of the examples, whose sizes are `size`."""
    layer = Layer(options, size.rows, x, d_out, lse)
    batch, heads, _, keys = layer.keys.weights.shape
    dk = jnp.zeros_like(layer.keys.arrays[0], jnp.float32)
    cols = [jnp.zeros((batch, heads, layer.config.ranks(which).channels("k"), keys), jnp.float32) for which in WHICH]
    totals = [dk, jnp.zeros_like(dk), *cols]
    (dk, dv, *cols), (dq, *rows) = layer.scan(_rectangle_gradients, totals)
    dpre, dpost = (
        compose_gradients(w, layer.join(a, 3), b[..., : x.k.shape[1]])
        for w, a, b in zip((x.pre, x.post), rows, cols, strict=True)
    )
    dk, dv = (total[:, : x.k.shape[1]].astype(x.k.dtype) for total in (dk, dv))
    return Inputs(layer.join(dq, 1), dk, dv, dpre, dpost)


_attention = with_backward(_forward, _backward)


def _rectangle_gradients(r: Rectangle, totals: list[Array]) -> tuple[list[Array], tuple[Array, Array, Array]]:
    """Return the gradients of one rectangle, a block of queries and its keys.

    Args:
      r: the rectangle.
      totals: sums over the previous rectangles: dk, dv, and the gradients of the key-wise weights of both composes.

    Returns:
      The updated totals; and dq of this rectangle, with the gradients of its query-wise weights (pre, post).
    """
    dk, dv, dpre_k, dpost_k = totals
    q, d_out = (r.by_key_head(x, 2) for x in r.queries.arrays)
    found = launch("post_grad", r.config, r.operands())
    w = r.by_key_head(not_none(found.tile), 1)
    dv = r.add_keys(dv, product("bkgts,btkgd->bskd", w, d_out), 1)
    row_sums = jnp.sum(not_none(found.row_sums), axis=2)
    dpost_q, cols = r.weight_gradients("post", row_sums[:, :, :-1], found.col_sums, 1.0, 1.0)
    dpost_k = r.add_keys(dpost_k, cols, 3)
    found = launch("pre_grad", r.config, r.operands(row_sums[:, :, -1], planes=found.planes))
    ds = r.by_key_head(not_none(found.tile), 1)
    row_sums = jnp.sum(not_none(found.row_sums), axis=2)
    dpre_q, cols = r.weight_gradients("pre", row_sums, found.col_sums, r.layer.options.scale, 1 / LOG2_E)
    dpre_k = r.add_keys(dpre_k, cols, 3)
    dk = r.add_keys(dk, product("bkgts,btkgd->bskd", ds, q) / LOG2_E, 1)
    dq = product("bkgts,bskd->btkgd", ds, r.keys.arrays[0]) / LOG2_E
    return [dk, dv, dpre_k, dpost_k], (dq.reshape(r.queries.arrays[0].shape).astype(q.dtype), dpre_q, dpost_q)


def log_sum_exp(parts: Array) -> Array:
    """Return the base-2 log-sum-exp of each row (B H T), 0 for fully masked rows.

    Args:
      parts: (B H tiles 2 T), maximum and sum of each row of each tile.
    """
    largest, total = parts[:, :, :, 0], parts[:, :, :, 1]
    row_max = jnp.max(largest, axis=2)
    total = jnp.sum(total * jnp.exp2(largest - row_max[:, :, None]), axis=2)
    return jnp.where(total > 0, row_max + jnp.log2(jnp.where(total > 0, total, 1)), 0)


def product(equation: str, a: Array, b: Array) -> Array:
    """Return the einsum `equation` of the bfloat16 arrays `a` and `b` in float32."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
