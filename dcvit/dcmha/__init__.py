"""Dynamically Composable Multi-Head Attention (DCMHA, ICML 2024) as pure functions on JAX arrays.

`attention` is the public entry point; `ComposeWeights` are the weights of its pre-compose and its post-compose.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha import dispatch, reference
from dcvit.dcmha.compose import ComposeWeights, check_floating, check_weights, compose, dynamic_gate, dynamic_projection
from dcvit.dcmha.reference import Dropout
from dcvit.dcmha.shapes import Array, Bool, Float

__all__ = [
    "IMPLEMENTATIONS",
    "ComposeWeights",
    "Dropout",
    "attention",
    "attention_weights",
    "compose",
    "dynamic_gate",
    "dynamic_projection",
]

IMPLEMENTATIONS = tuple(dispatch.IMPLEMENTATIONS)


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
    dropout: Dropout | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H D"]:
    """Multi-head attention whose scores and weights are composed across heads (Eqn 4 of the paper).

    scores = compose(scale·q·k, pre); weights = compose(softmax(scores), post); output = weights·v.
    With `pre` and `post` None it is plain multi-head attention.

    Args:
      q: queries of H heads with D dimensions each.
      k: keys of K heads; K divides H, and each key head is shared by H/K neighboring query heads.
      v: values, as `k`.
      pre: weights of the compose of attention scores, before the mask and the softmax.
      post: weights of the compose of attention weights, after the softmax.
      causal: query i attends only to keys 0 … i.
      window: query i attends only to keys i-window+1 … i; implies `causal`.
      mask: True where a query attends to a key; the same for all heads, because a compose mixes the heads. It is
        combined with `causal` and `window`. The output of a query whose keys are all masked is zero.
      groups: number of equal groups of heads; each group is composed separately (Section 3.2).
      scale: factor of q·k, known at trace time; 1/sqrt(D) by default.
      dropout: dropout of the composed weights; only "reference" has it.
      implementation: a name from `IMPLEMENTATIONS`; None folds the composition into q and the output if that is exact
        (`dcvit.dcmha.folded`), or else selects the fastest one (`dcvit.dcmha.dispatch`). All have gradients and a
        forward mode (`jax.jvp`, `jax.linearize`).

    Returns:
      The outputs of the heads in q's dtype. Softmax and its statistics are float32 for all narrower inputs. Scores must
      be below 1e30 in magnitude, and v finite, also where it is masked. A NaN in q or k gives NaN to the queries that
      attend with it, and to no others.

    Raises:
      ValueError: the shapes are inconsistent, an array does not have floating-point numbers, `groups` does not divide
        the heads, the window is below 1, the scale is not finite, or the implementation does not exist or does not
        support the case.
    """
    _check_integers(groups=groups, window=1 if window is None else window)
    scale = _check_arguments(q, k, v, pre, post, window=window, mask=mask, groups=groups, scale=scale)
    _check_dropout(dropout)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; expected one of {', '.join(IMPLEMENTATIONS)}")
    pre, post = (None if w is None or all(x is None for x in w) else w for w in (pre, post))
    if q.size == 0:
        return jnp.zeros_like(q)
    return dispatch.attention(
        q, k, v, pre, post, implementation, dropout,
        causal=causal, window=window, mask=mask, groups=groups, scale=scale,
    )  # fmt: skip


def _check_dropout(dropout: object) -> None:
    """Raise ValueError if the dropout is another type, or its rate is not a fraction."""
    if not isinstance(dropout, Dropout | None):
        raise ValueError(f"dropout is a {type(dropout).__name__}, expected dcvit.dcmha.Dropout(key, rate)")
    if dropout is not None and not 0 <= dropout.rate <= 1:
        raise ValueError(f"dropout rate {dropout.rate}: expected a number from 0 to 1")


def attention_weights(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    pre: ComposeWeights | None = None,
    post: ComposeWeights | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Bool[Array, "#B 1 #T #S"] | None = None,
    groups: int = 1,
    scale: float | None = None,
) -> Float[Array, "B H T S"]:
    """Compute the composed weights by which `attention` multiplies the values, for inspection.

    The arguments are those of `attention`. The array of size H×T×S is float32, or float64 for float64 inputs.

    Raises:
      ValueError: as `attention`.
    """
    _check_integers(groups=groups, window=1 if window is None else window)
    scale = _check_arguments(q, k, k, pre, post, window=window, mask=mask, groups=groups, scale=scale)
    mask = reference.visible(q.shape[1], k.shape[1], causal=causal, window=window, mask=mask)
    return reference.attention_matrices(q, k, pre, post, mask=mask, groups=groups, scale=scale).composed_weights


def _check_integers(**numbers: object) -> None:
    """Raise ValueError if an argument is not an integer that is known at trace time."""
    for name, number in numbers.items():
        if not isinstance(number, int | np.integer):
            raise ValueError(f"{name}={number!r}: expected an integer that is known at trace time")


def _check_arguments(
    q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None, *, window: int | None,
    mask: Array | None, groups: int, scale: object,
) -> float:  # fmt: skip
    """Raise ValueError if the arguments of `attention` are inconsistent; return the scale."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"expected q (B T H D) and k, v (B S K D), found {q.shape}, {k.shape}, {v.shape}")
    check_floating({"q": q, "k": k, "v": v})
    batch, queries, heads, head_dim = q.shape
    keys, key_heads = k.shape[1:3]
    if not (heads and keys and head_dim and key_heads):
        raise ValueError(f"expected at least one head, key and dimension, found q {q.shape} and k {k.shape}")
    if heads % key_heads:
        raise ValueError(f"the number of query heads ({heads}) is not a multiple of the key heads ({key_heads})")
    if groups < 1 or heads % groups:
        raise ValueError(f"groups={groups} does not divide {heads} heads")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: expected at least 1, because a query attends to its own position")
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask has dtype {mask.dtype}, expected bool: True where a query attends to a key")
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
        number = 1 / math.sqrt(head_dim) if scale is None else float(scale)  # type: ignore[arg-type]
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise ValueError(f"scale must be a number that is known at trace time, found {scale!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"scale={scale}: expected a finite number")
    return number
