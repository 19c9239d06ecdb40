"""Composition folded into queries and outputs, around any implementation of plain attention.

Without key-wise branches, a compose multiplies the scores of a group of heads by a matrix W that depends only on the
query (`dcvit.dcmha.compose.query_map`). If in addition the heads of a group share a key head, or do not mix because
there are only gates, both matrix products of attention commute with it:

  pre-compose    Σ_h W[h, n]·(q_h·k)       = (Σ_h W[h, n]·q_h)·k
  post-compose   Σ_s Σ_h W[h, n]·a_h[s]·v_s = Σ_h W[h, n]·(Σ_s a_h[s]·v_s)

So the queries of a group are combined before plain attention, and its outputs after it. The result is that of Eqn 4
apart from rounding, for every mask and window. Decoding needs no cache but that of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp

from dcvit.dcmha.compose import ComposeWeights, query_map
from dcvit.dcmha.inputs import Attend, Call
from dcvit.dcmha.numerics import statistics_dtype
from dcvit.dcmha.shapes import Array, Float

Combine: TypeAlias = Callable[[Array, Array], Array]  # the type of `combine_heads`


def supports(call: Call) -> str | None:
    """Return the reason why the composition of a call cannot be folded, or None."""
    return call.composition.why_not_foldable(call.inputs.k.shape[2])


def run(call: Call, *, attend: Attend, combine: Combine) -> Float[Array, "B T H D"]:
    """Return the outputs of heads of a `Call` by plain attention, `attend`; `combine` is as in `compose_heads`."""
    inputs, groups = call.inputs, call.options.groups
    q = compose_heads(inputs.q, inputs.pre, groups=groups, combine=combine)
    out = attend(call.without_composition(q))
    return compose_heads(out, inputs.post, groups=groups, combine=combine)


def compose_heads(
    x: Float[Array, "B T H D"], w: ComposeWeights | None, *, groups: int, combine: Combine
) -> Float[Array, "B T H D"]:
    """Return the vectors of heads, combined in each group as a compose without key-wise branches combines scores.

    Args:
      x: vectors of heads.
      w: weights of the compose; None returns `x`.
      groups: the number of groups of heads.
      combine: the function that combines vectors, such as `combine_heads`.

    Returns:
      The vectors in the dtype of `x`, computed in float32, or in float64 for float64 inputs.
    """
    if w is None:
        return x
    batch, length, heads, _ = x.shape
    mixes_heads = w.static is not None or w.q1 is not None
    groups = groups if mixes_heads else heads
    matrix = query_map(w, batch=batch, length=length, heads=heads, groups=groups, dtype=statistics_dtype(x.dtype))
    return combine(x, matrix)


def combine_heads(x: Float[Array, "B T H D"], w: Float[Array, "#B #T G J J"]) -> Float[Array, "B T H D"]:
    """Return Σ_j W[j, n]·x_j for each token and each head n of a group, in the dtype of `x`."""
    batch, length, _, head_dim = x.shape
    groups, per_group = w.shape[2:4]
    grouped = x.astype(w.dtype).reshape(batch, length, groups, per_group, 1, head_dim)
    # A sum of products of vectors, which XLA fuses on GPUs and TPUs.
    terms = [w[:, :, :, j, :, None] * grouped[:, :, :, j] for j in range(per_group)]
    return sum(terms[1:], start=terms[0]).reshape(x.shape).astype(x.dtype)


def multiply_heads(x: Float[Array, "B T H D"], w: Float[Array, "#B #T G J J"]) -> Float[Array, "B T H D"]:
    """Return the result of `combine_heads`, computed as a matrix product for each token and group.

    On a CPU, this is up to ten times as fast as XLA's code for the sum in `combine_heads` and its gradients.
    """
    grouped = x.astype(w.dtype).reshape(*x.shape[:2], *w.shape[2:4], x.shape[3])
    w = jnp.broadcast_to(w, (*x.shape[:2], *w.shape[2:]))
    return jnp.einsum("BTGJN,BTGJD->BTGND", w, grouped).reshape(x.shape).astype(x.dtype)
