"""DCMHA for NVIDIA Hopper GPUs: Pallas kernels (Mosaic GPU), forward and backward, without atomics.

The kernels use Mosaic GPU because Pallas' Triton backend is deprecated from JAX 0.11 on and will be removed (Pallas
changelog, 0.11.0).

Queries are split into rectangles of rows (`dcvit.dcmha.pallas_gpu.tiling.rectangles`): 512 queries of a causal layer
and the keys before them, 256 queries of a local layer and the at most 512 keys around them, all queries of a short
sequence. For each rectangle, the kernels process all heads tile by tile (`dcvit.dcmha.pallas_gpu.tile`) and write
W = C_post(softmax(C_pre(scale·q·k))), in the backward pass also dS, in the inputs' dtype. XLA computes the products
W·v, Wᵀ·dO, dS·k and dSᵀ·q. The memory is that of a rectangle's H×rows×keys arrays W and dS, at most `WORKSPACE_BYTES`
each; each is written once and read once or twice. Scores and uncomposed weights stay on the chip. The 2R hidden planes
of a compose are passed from one kernel to the next in global memory.

The backward pass needs the inputs and the log-sum-exp, B·H·T in float32. Each float32 operand is split into two
bfloat16 values, which takes three products instead of one and has an error of about 1e-5. On a backend without a GPU
the kernels are interpreted, slowly.

docs/performance.md has times on an H200. Compiled for sm_90a with ptxas 13 at rank 2 and D = 64, the kernels do not
spill. Instructions of a warp for each head and sweep: for 16 scores a thread, 131 and 289 (statistics), 296 and 359
(weights); for 8 scores a thread, 97, 256 and 546 (post_grad), 296 and 543 (pre_grad). The keys of a tile and the number
of warpgroups in `dcvit.dcmha.pallas_gpu.tiling` are the fastest of those tried (docs/performance_notes.md).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from dcvit.dcmha import blockwise
from dcvit.dcmha.derivatives import differentiable
from dcvit.dcmha.errors import reason_of
from dcvit.dcmha.inputs import Inputs, Options
from dcvit.dcmha.numerics import LOG2_E
from dcvit.dcmha.pallas_gpu.block import Operands
from dcvit.dcmha.pallas_gpu.config import is_gpu
from dcvit.dcmha.pallas_gpu.launch import run
from dcvit.dcmha.pallas_gpu.rectangle import RectangleInputs, WeightGradients, pad
from dcvit.dcmha.pallas_gpu.tiling import Static, check_supported, rectangles
from dcvit.dcmha.shapes import Array, Float, not_none


def supports(inputs: Inputs, options: Options) -> str | None:
    """Return the reason why a call is not supported, or None."""
    return reason_of(check_supported, inputs, options)


def attention(inputs: Inputs, options: Options) -> Float[Array, "B T H D"]:
    """Compute attention as `dcvit.dcmha.attention`, which checks the arguments.

    Scores and weights are float32; W·v has operands of q's dtype.

    Raises:
      UnsupportedError: the kernels do not support the device, the dtypes or the sizes.
    """
    check_supported(inputs, options)
    options = dataclasses.replace(options, causal=options.causal or options.window is not None)
    return _attention(Static(options, interpret=not is_gpu()), inputs)


def _forward(static: Static, x: Inputs) -> tuple[Array, Array]:
    """Return the output and the log-sum-exp of each row."""
    q, k, v, *_ = x
    outs, sums = [], []
    for rectangle in rectangles(q, k, static.options):
        if rectangle.size[1] <= 0:  # the window of these queries lies after the last key
            shape = (q.shape[0], rectangle.size[0], *q.shape[2:])
            outs.append(jnp.zeros(shape, jnp.float32))
            sums.append(jnp.zeros((shape[0], shape[2], shape[1]), jnp.float32))
            continue
        inputs = RectangleInputs(static, rectangle, x, backward=False)
        pairs = [inputs.pair(q, k)]
        found = run("statistics", inputs.config, Operands(pairs, *inputs.weights(), inputs.bias))
        lse = log_sum_exp(not_none(found.row_sums))
        w = run("weights", inputs.config, Operands(pairs, *inputs.weights(lse), inputs.bias, found.planes)).tile
        out = product("bkgts,bskd->btkgd", inputs.by_key_head(not_none(w)), inputs.keys(v))
        outs.append(inputs.without_padding(out))
        sums.append(lse[:, :, : rectangle.size[0]])
    out = jnp.concatenate(outs, axis=1).astype(q.dtype)
    return out, jnp.concatenate(sums, axis=2)


def _backward(static: Static, x: Inputs, results: tuple[Array, Array], do: Array) -> Inputs:
    (q, k, v, pre, post, *_), (_, lse) = x, results
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dpre, dpost = WeightGradients(pre, k.shape[1]), WeightGradients(post, k.shape[1])
    for rectangle in rectangles(q, k, static.options):
        if rectangle.size[1] <= 0:
            dq.append(jnp.zeros((q.shape[0], rectangle.size[0], *q.shape[2:]), jnp.float32))
            dpre.add_zeros(rectangle.size[0])
            dpost.add_zeros(rectangle.size[0])
            continue
        inputs = RectangleInputs(static, rectangle, x, backward=True)
        dq_part, dk, dv = _rectangle_gradients(inputs, lse, do, (dk, dv), dpre, dpost)
        dq.append(dq_part)
    all_dq = jnp.concatenate(dq, axis=1).astype(q.dtype)
    gradients = all_dq, dk.astype(k.dtype), dv.astype(v.dtype), dpre.result(), dpost.result()
    return Inputs(*gradients, segments=x.segments)  # which have no gradient


def _forward_mode(static: Static, x: Inputs) -> Array:
    return blockwise.forward_mode(x, static.options)


_attention = differentiable(_forward, _backward, _forward_mode)


def _rectangle_gradients(
    inputs: RectangleInputs, lse: Array, do: Array, totals: tuple[Array, Array],
    dpre: WeightGradients, dpost: WeightGradients,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute the gradients of one rectangle.

    Args:
      inputs: the rectangle's inputs of the kernels.
      lse: the log-sum-exp of all rows.
      do: gradient of the output.
      totals: dk and dv of the rectangles before.
      dpre: gradients of the pre-compose's weights, to which the rectangle's are added.
      dpost: the same for the post-compose.

    Returns:
      dq of the rectangle, and dk and dv of all rectangles up to this one.
    """
    (q, k, v, *_), (dk, dv) = inputs.layer, totals
    pairs = [inputs.pair(q, k), inputs.pair(do, v)]
    sums = pad(lse[:, :, slice(*inputs.rectangle.rows)], 2, inputs.config.queries)
    found = run("post_grad", inputs.config, Operands(pairs, *inputs.weights(sums), inputs.bias))
    w = inputs.by_key_head(not_none(found.tile))
    dv = inputs.add_keys(dv, product("bkgts,btkgd->bskd", w, inputs.queries(do)))
    row_sums = jnp.sum(not_none(found.row_sums), axis=2)
    dpost.add(inputs, row_sums[:, :, :-1], jnp.sum(not_none(found.col_sums), axis=2), 1.0, 1.0)
    weights = inputs.weights(sums, row_sums[:, :, -1])
    found = run("pre_grad", inputs.config, Operands(pairs, *weights, inputs.bias, found.planes))
    ds = inputs.by_key_head(not_none(found.tile))
    row_sums, col_sums = jnp.sum(not_none(found.row_sums), axis=2), jnp.sum(not_none(found.col_sums), axis=2)
    dpre.add(inputs, row_sums, col_sums, inputs.scale, 1 / LOG2_E)
    dk = inputs.add_keys(dk, product("bkgts,btkgd->bskd", ds, inputs.queries(q)) / LOG2_E)
    dq = inputs.without_padding(product("bkgts,bskd->btkgd", ds, inputs.keys(k))) / LOG2_E
    return dq, dk, dv


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
    """Compute an einsum with float32 sums; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)
