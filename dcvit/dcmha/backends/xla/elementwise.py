"""Attention for GPUs without fused kernels: Eqn 4 as in `reference`, composed by sums over heads that XLA fuses.

XLA compiles the einsums of `dcvit.dcmha.compose.compose` to batched matrix products, which copy all scores into another
layout. It compiles elementwise products and sums to loops that read the scores where they are: on a GPU, the program
reads and writes half as many bytes: 11 instead of 24 GB for a layer of ViT-S/16, 256 images, with its gradients, as
compiled for an H200. A CPU would compute each hidden plane again for each head.
"""

from __future__ import annotations

import jax.numpy as jnp

from dcvit.dcmha.backends.xla import reference
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.inputs import Call
from dcvit.dcmha.shapes import Array, Float

supports = reference.supports  # every call


def run(call: Call) -> Float[Array, "B T H D"]:
    """Compute the attention that a `Call` describes, and return the outputs of the heads.

    Scores and weights are float32, or float64 for float64 inputs.
    """
    return reference.run(call, compose=compose)


def compose(a: Float[Array, "B H T S"], w: ComposeWeights, *, groups: int = 1) -> Float[Array, "B H T S"]:
    """Return the result of `dcvit.dcmha.compose.compose` by elementwise products and sums; shapes are not checked."""
    batch, heads, queries, keys = a.shape
    grouped = a.reshape(batch, groups, heads // groups, queries, keys)

    def planes(x: Float[Array, "B N H"], side: str) -> Array:  # (B, G, H/G, T or 1, 1 or S) in a's dtype
        x = jnp.moveaxis(x.astype(a.dtype).reshape(batch, -1, groups, heads // groups), 1, -1)
        return x[..., None] if side == "q" else x[..., None, :]

    out = grouped
    if w.static is not None:
        static = w.static.astype(a.dtype)[None, :, :, :, None, None]
        out = out + jnp.sum(grouped[:, :, :, None] * static, axis=2)
    for side, down, up in (("q", w.q1, w.q2), ("k", w.k1, w.k2)):
        if down is None or up is None:
            continue
        for r in range(down.shape[2]):
            hidden = jnp.sum(grouped * planes(down[:, :, r], side), axis=2, keepdims=True)
            out = out + hidden * planes(up[:, :, r], side)
    for side, gate in (("q", w.qg), ("k", w.kg)):
        if gate is not None:
            out = out + grouped * planes(gate, side)
    return out.reshape(a.shape)
