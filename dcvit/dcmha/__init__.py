"""Dynamically Composable Multi-Head Attention (DCMHA, ICML 2024): pure functions on JAX arrays.

`attention` is the one public door; `ComposeWeights` are the weights of its pre- and post-compose.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from dcvit.dcmha import dispatch
from dcvit.dcmha.compose import ComposeWeights, check_weights, compose, dynamic_gate, dynamic_projection
from dcvit.dcmha.dispatch import IMPLEMENTATIONS
from dcvit.dcmha.shapes import Array, Bool, Float

__all__ = ["IMPLEMENTATIONS", "ComposeWeights", "attention", "compose", "dynamic_gate", "dynamic_projection"]


def attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    pre: ComposeWeights | None = None,
    post: ComposeWeights | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Bool[Array, "#B 1 #T #S"] | None = None,
    groups: int = 1,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H D"]:
    """Multi-head attention whose scores and weights are composed across heads (Eqn 4 of the paper).

    scores = compose(scale·q·k, pre); weights = compose(softmax(scores), post); output = weights·v.
    With `pre` and `post` None it is plain multi-head attention.

    Args:
      q: queries of H heads of width D.
      k: keys of K heads; K divides H, and each key head serves H/K neighbouring query heads.
      v: values, as `k`.
      pre: weights of the compose on attention scores, before the mask and the softmax.
      post: weights of the compose on attention weights, after the softmax.
      causal: query i sees only keys 0 … i.
      window: query i sees only keys i-window+1 … i; implies `causal`.
      mask: True where a query may see a key; the same for every head, since a composed head sees what
        its peers see. Combined with `causal` and `window`. A query that sees nothing yields zeros.
      groups: heads compose inside each of this many equal groups (Section 3.2).
      scale: multiplies q·k, a number known when the program is traced; 1/sqrt(D) by default.
      implementation: None picks the fastest one for platform, shape and dtype (`dcvit.dcmha.dispatch`); a name from
        `IMPLEMENTATIONS` forces that one. All have gradients; forward-mode derivatives (`jax.jvp`) only "reference"
        and "decode".

    Returns:
      The heads' outputs in q's dtype. Softmax and its statistics are float32 whatever the inputs.

    Raises:
      ValueError: shapes that do not fit each other, `groups` that does not divide the heads, a window
        below 1, an implementation that does not exist or does not take the case. The message states the sizes.
    """
    scale = _check_arguments(q, k, v, pre, post, window=window, mask=mask, groups=groups, scale=scale)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; known: {', '.join(IMPLEMENTATIONS)}")
    pre, post = (None if w is None or all(x is None for x in w) else w for w in (pre, post))
    if q.size == 0:
        return jnp.zeros_like(q)
    case = {"causal": causal, "window": window, "mask": mask, "groups": groups}
    if implementation is None:
        implementation = dispatch.choose(q, k, v, pre, post, **case)
    elif reason := dispatch.refusal(implementation, q, k, v, pre, post, **case):
        raise ValueError(f"{implementation} does not take this: {reason}")
    else:
        dispatch.log(implementation, q, k, pre, post, window, ", as asked for")
    out: Array = dispatch.load(implementation).attention(q, k, v, pre, post, **case, scale=scale)
    return out


def _check_arguments(
    q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None, *, window: int | None,
    mask: Array | None, groups: int, scale: Any,
) -> float:  # fmt: skip
    """Raises ValueError for arguments of `attention` that do not fit each other; returns the scale."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"expected q (B T H D) and k, v (B S K D), found {q.shape}, {k.shape}, {v.shape}")
    batch, queries, heads, width = q.shape
    keys, key_heads = k.shape[1:3]
    if not (heads and keys and width and key_heads):
        raise ValueError(f"expected heads and keys, found q {q.shape} and k {k.shape}")
    if heads % key_heads:
        raise ValueError(f"{key_heads} key heads do not divide {heads} query heads")
    if groups < 1 or heads % groups:
        raise ValueError(f"groups={groups} does not divide {heads} heads")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: a query sees at least itself, so window >= 1")
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask has dtype {mask.dtype}, expected bool: True where a query may see a key")
    if mask is not None and not (
        mask.ndim == 4
        and mask.shape[0] in (1, batch)
        and mask.shape[1] == 1
        and mask.shape[2] in (1, queries)
        and mask.shape[3] in (1, keys)
    ):
        raise ValueError(f"mask has shape {mask.shape}, expected it to broadcast to ({batch}, 1, {queries}, {keys})")
    for weights in (pre, post):
        if weights is not None:
            check_weights(weights, batch=batch, heads=heads, queries=queries, keys=keys, groups=groups)
    try:
        return 1 / math.sqrt(width) if scale is None else float(scale)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise ValueError("scale should be a number that is known when the program is traced") from None
