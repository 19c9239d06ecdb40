"""Training objectives: a loss for each example, label smoothing, mixup. The config's `loss` is a function's name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from dcvit.dcmha.shapes import Array, Float

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
