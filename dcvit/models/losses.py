"""Training objectives: losses of each example, and label smoothing. A config's `loss` is one of `NAMES`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.parallel.mesh import BATCH, constrain, context_parts

NAMES = ("softmax_xent", "sigmoid_xent")
POSITIONS = 256  # of a row whose logits `target_scores` holds at a time; all B·T·V logits may not fit in memory


def softmax_xent(logits: Float[Array, "B C"], labels: Float[Array, "B C"]) -> Float[Array, " B"]:
    """Return the cross-entropy -Σ_c labels·log softmax(logits) of each example, in nats."""
    losses: Array = optax.softmax_cross_entropy(logits, labels)
    return losses


def sigmoid_xent(logits: Float[Array, "B C"], labels: Float[Array, "B C"]) -> Float[Array, " B"]:
    """Return the sum over classes of the binary cross-entropies of each example, in nats (Beyer et al., 2020)."""
    return jnp.sum(optax.sigmoid_binary_cross_entropy(logits, labels), axis=-1)


def smooth(labels: Float[Array, "B C"], amount: float) -> Float[Array, "B C"]:
    """Apply label smoothing (Szegedy et al., 2016): (1 - amount)·labels + amount/C."""
    return labels * (1 - amount) + amount / labels.shape[-1]


def token_xent(
    unembed: Callable[[Float[Array, "B P N M"]], Float[Array, "B P N V"]],
    hidden: Float[Array, "B T M"],
    targets: Int[Array, "B T"],
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
) -> Float[Array, "B T"]:
    """Return the cross-entropy of each token plus z_loss · log²Z (PaLM, Section 5), in nats.

    Z is the normalizer of a token's softmax, Σ exp(logits).

    Args:
      unembed: function from hidden states to logits.
      hidden: hidden states that predict the targets.
      targets: the tokens, below V.
      chunk: number of positions whose logits are in memory at the same time, on each device of the mesh axis "context"
        if there is one; the backward pass recomputes them. The B·T·V logits of all positions may not fit into memory.
        None: all positions.
      z_loss: weight of the z-loss.
    """

    def nats(hidden: Array, targets: Array) -> Array:
        # The axis of the heads splits positions too, so that devices exchange no logits, for any vocabulary size.
        logits = unembed(constrain(hidden, BATCH, "context", "tensor", None))
        log_z = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return log_z - picked + z_loss * jnp.square(log_z)

    batch, length, width = hidden.shape
    parts = context_parts(length)  # a chunk has positions of every device of the axis "context"
    length //= parts
    hidden, targets = hidden.reshape(batch, parts, length, width), targets.reshape(batch, parts, length)
    if chunk is None or chunk >= length:
        return nats(hidden, targets).reshape(batch, -1)
    pieces = -(-length // chunk)
    rest = pieces * chunk - length
    hidden = jnp.pad(hidden, [(0, 0), (0, 0), (0, rest), (0, 0)]).reshape(batch, parts, pieces, chunk, width)
    targets = jnp.pad(targets, [(0, 0), (0, 0), (0, rest)]).reshape(batch, parts, pieces, chunk)
    moved = (jnp.moveaxis(x, 2, 0) for x in (hidden, targets))
    _, found = jax.lax.scan(lambda _, piece: (None, jax.checkpoint(nats)(*piece)), None, tuple(moved))
    return jnp.moveaxis(found, 0, 2).reshape(batch, parts, -1)[:, :, :length].reshape(batch, -1)


def target_scores(
    unembed: Callable[[Float[Array, "B M"]], Float[Array, "B V"]],
    hidden: Float[Array, "B T M"],
    targets: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return log p of each target, and True where the target is the token of the highest logit.

    Args:
      unembed: function from the hidden states of a position to logits.
      hidden: hidden states that predict the targets.
      targets: the tokens, below V.
    """

    def score(position: tuple[Array, Array]) -> tuple[Array, Array]:
        logits, target = unembed(position[0]), position[1]
        picked = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return picked - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == target

    pairs = jnp.swapaxes(hidden, 0, 1), jnp.swapaxes(targets, 0, 1)
    log_p, best = jax.lax.map(score, pairs, batch_size=POSITIONS)
    return jnp.swapaxes(log_p, 0, 1), jnp.swapaxes(best, 0, 1)
