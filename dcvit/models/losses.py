"""Training objectives: a loss for each example, label smoothing, mixup. The config's `loss` is a function's name."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.parallel.mesh import BATCH, constrain

NAMES = ("softmax_xent", "sigmoid_xent")


def softmax_xent(logits: Float[Array, "B C"], labels: Float[Array, "B C"]) -> Float[Array, " B"]:
    """-Σ_c labels·log softmax(logits), in nats."""
    return optax.softmax_cross_entropy(logits, labels)


def sigmoid_xent(logits: Float[Array, "B C"], labels: Float[Array, "B C"]) -> Float[Array, " B"]:
    """The sum over classes of the binary cross-entropies, in nats (Beyer et al., 2020)."""
    return jnp.sum(optax.sigmoid_binary_cross_entropy(logits, labels), axis=-1)


def smooth(labels: Float[Array, "B C"], amount: float) -> Float[Array, "B C"]:
    """Label smoothing (Szegedy et al., 2016): (1 - amount)·labels + amount/C."""
    return labels * (1 - amount) + amount / labels.shape[-1]


def mixup(
    key: jax.Array, images: Float[Array, "B *image"], labels: Float[Array, "B C"], alpha: float
) -> tuple[Float[Array, "B *image"], Float[Array, "B C"]]:
    """Mixes each example with its neighbour in the batch (Zhang et al., 2018).

    One λ for the whole batch, drawn from Beta(alpha, alpha) and taken as max(λ, 1-λ), so that an example
    always keeps at least half of itself.
    """
    drawn = jax.random.beta(key, alpha, alpha)
    share = jnp.maximum(drawn, 1 - drawn)
    return tuple(x * share + jnp.roll(x, 1, axis=0) * (1 - share) for x in (images, labels))  # type: ignore[return-value]


def token_xent(
    unembed: Callable[[Float[Array, "B N M"]], Float[Array, "B N V"]],
    hidden: Float[Array, "B T M"],
    targets: Int[Array, "B T"],
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
) -> Float[Array, "B T"]:
    """Cross-entropy of each token, in nats, and z_loss · log²Z beside it (PaLM, Section 5): Z normalises its logits.

    Args:
      unembed: hidden states to logits.
      hidden: what predicts the targets.
      targets: below V.
      chunk: so many positions have logits at a time, in the forward and, computed again, in the backward pass: the
        B·T·V logits of a long batch never exist at once. None: all of them.
      z_loss: weight of the z-loss.
    """

    def nats(hidden: Array, targets: Array) -> Array:
        # The mesh axis that splits heads splits positions here: no exchange of logits, for any size of vocabulary.
        logits = unembed(constrain(hidden, BATCH, "tensor", None))
        log_z = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return log_z - picked + z_loss * jnp.square(log_z)

    batch, length, width = hidden.shape
    if chunk is None or chunk >= length:
        return nats(hidden, targets)
    pieces = -(-length // chunk)
    rest = pieces * chunk - length
    hidden = jnp.pad(hidden, [(0, 0), (0, rest), (0, 0)]).reshape(batch, pieces, chunk, width)
    targets = jnp.pad(targets, [(0, 0), (0, rest)]).reshape(batch, pieces, chunk)
    swapped = (jnp.swapaxes(x, 0, 1) for x in (hidden, targets))
    _, found = jax.lax.scan(lambda _, piece: (None, jax.checkpoint(nats)(*piece)), None, tuple(swapped))
    return jnp.swapaxes(found, 0, 1).reshape(batch, pieces * chunk)[:, :length]
