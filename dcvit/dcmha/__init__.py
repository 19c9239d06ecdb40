"""Dynamically Composable Multi-Head Attention (DCMHA, ICML 2024) as pure functions on JAX arrays.

`attention` is the public entry point; `ComposeWeights` are the weights of its pre-compose and its post-compose.
"""

from __future__ import annotations

from dcvit.dcmha import plan
from dcvit.dcmha.backends.xla import reference
from dcvit.dcmha.backends.xla.reference import Dropout
from dcvit.dcmha.compose import ComposeWeights, compose, dynamic_weights
from dcvit.dcmha.inputs import Inputs, make_call
from dcvit.dcmha.segments import make_segments
from dcvit.dcmha.shapes import Array, Bool, Float, Int

__all__ = [
    "IMPLEMENTATIONS",
    "ComposeWeights",
    "Dropout",
    "attention",
    "attention_weights",
    "compose",
    "dynamic_weights",
]

IMPLEMENTATIONS = tuple(plan.BACKENDS)


def attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    pre: ComposeWeights | None = None,
    post: ComposeWeights | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    compose_window: int | None = None,
    mask: Bool[Array, "#B 1 #T #S"] | None = None,
    segments: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
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
      compose_window: compose query i with keys i-compose_window+1 … i only; older keys have plain scores and weights.
      mask: True where a query attends to a key; the same for all heads, because a compose mixes the heads. It is
        combined with `causal` and `window`. The output of a query whose keys are all masked is zero.
      segments: int32 ids of the tokens of packed rows (B T), or the pair of those of queries (B T) and keys (B S).
        A query attends only to keys with its own id, in addition to the other conditions. The id -2**31 is reserved. No
        array of size T×S is needed, and blocks of keys without a common id are skipped ("blockwise", "pallas_tpu"),
        best if ids ascend.
      groups: number of equal groups of heads; each group is composed separately (Section 3.2).
      scale: factor of q·k, known at trace time; 1/sqrt(D) by default.
      dropout: dropout of the composed weights; only "reference" has it.
      implementation: a name from `IMPLEMENTATIONS`; None folds the composition into q and the output if that is exact
        (`dcvit.dcmha.folded`), or else selects the fastest one (`dcvit.dcmha.plan`). All have gradients; "reference",
        "elementwise" and "decode", which are plain JAX operations, also have a forward mode (`jax.jvp`).

    Returns:
      The outputs of the heads in q's dtype. Softmax and its statistics are float32 for all narrower inputs. Scores must
      be below 1e30 in magnitude. The kernels "pallas_tpu" and "pallas_gpu" round
      scores and their log-sum-exp in units of log 2: the relative error of weights is up to 4e-7 times the largest
      score. A NaN in q, k or `pre` gives NaN to the outputs of the queries that attend with it, and to no others;
      gradients of all arguments may be NaN then. v and `post` must be finite, also where they are masked. With key-wise
      or static weights in `pre`, "pallas_tpu" may spread a NaN in k over its aligned block of 16 keys.

    Raises:
      ValueError: the shapes are inconsistent, an array does not have floating-point numbers, `groups` does not divide
        the heads, a window is below 1, the scale is not finite, or the implementation does not exist or does not
        support the case.
    """
    inputs = Inputs(q, k, v, pre, post, mask, make_segments(segments))
    call = make_call(inputs, causal=causal, window=window, groups=groups, scale=scale, compose_window=compose_window)
    return plan.attention(call, implementation, dropout)


def attention_weights(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    pre: ComposeWeights | None = None,
    post: ComposeWeights | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    compose_window: int | None = None,
    mask: Bool[Array, "#B 1 #T #S"] | None = None,
    segments: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    groups: int = 1,
    scale: float | None = None,
) -> Float[Array, "B H T S"]:
    """Return the composed weights (B H T S) by which `attention` multiplies the values, for inspection.

    The arguments are those of `attention`. The result is float32, or float64 for float64 inputs.

    Raises:
      ValueError: as `attention`.
    """
    inputs = Inputs(q, k, k, pre, post, mask, make_segments(segments))
    call = make_call(inputs, causal=causal, window=window, groups=groups, scale=scale, compose_window=compose_window)
    return reference.attention_matrices(call.inputs, call.options).composed_weights
