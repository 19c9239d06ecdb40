"""Training objectives: losses of each example, and label smoothing. A config's `loss` is one of `NAMES`.

A label below 0 is unknown: it does not count in the losses of image models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.parallel.mesh import BATCH, constrain, context_parts
from input_pipeline.optional import Late

if TYPE_CHECKING:
    import optax
else:
    optax = Late("optax")

NAMES = ("softmax_xent", "sigmoid_xent")
POSITIONS = 256  # of a row whose logits `target_scores` holds at a time; all B·T·V logits may not fit in memory


def softmax_xent(
    logits: Float[Array, "B C"], labels: Float[Array, "B C"], class_weights: Float[Array, " C"] | None = None
) -> Float[Array, " B"]:
    """Return the cross-entropy -Σ_c w_c·labels·log softmax(logits) of each example, in nats.

    It is 0 for an example with an unknown label, below 0.
    """
    labels = jnp.where(jnp.any(labels < 0, axis=-1, keepdims=True), 0, labels)
    losses: Array = optax.softmax_cross_entropy(logits, _weighted(labels, class_weights))
    return losses


def sigmoid_xent(
    logits: Float[Array, "B C"],
    labels: Float[Array, "B C"],
    class_weights: Float[Array, " C"] | None = None,
    pos_weight: Float[Array, " C"] | None = None,
) -> Float[Array, " B"]:
    """Return the sum over classes of the binary cross-entropies of each example, in nats (Beyer et al., 2020).

    The cross-entropy of class c is -w_c·(p_c·y·log σ(x) + (1 - y)·log σ(-x)), with the weights w and p of the
    arguments, and 0 for an unknown label, below 0.
    """
    known = jnp.maximum(labels, 0)
    if pos_weight is None:
        nats = optax.sigmoid_binary_cross_entropy(logits, known)
    else:
        positive, negative = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
        nats = -(_weighted(known, pos_weight) * positive + (1 - known) * negative)
    return jnp.sum(jnp.where(labels < 0, 0, _weighted(nats, class_weights)), axis=-1)


def mean_scale(
    name: str, labels: Float[Array, "B C"], class_weights: Float[Array, " C"] | None = None
) -> Float[Array, ""]:
    """Return the factor that makes the mean of a loss over a batch a mean over the labels that are known.

    The loss `name` times this factor has the mean

      softmax_xent   Σ_i loss_i / Σ_i w_i, where w_i is the mean class weight of the labels of example i, 1 without
                     class weights, and 0 for an example with an unknown label or without labels, as in PyTorch
      sigmoid_xent   C · Σ_i loss_i / number of known labels.

    Without class weights and unknown labels, the factor is 1.
    """
    known = ~(labels < 0)  # also NaN, which makes the loss NaN
    if name == "sigmoid_xent":
        counted, size = jnp.sum(known, dtype=jnp.int32).astype(jnp.float32), labels.size
    else:
        labels, size = jnp.where(jnp.all(known, axis=-1, keepdims=True), labels, 0), len(labels)
        mass, total = (jnp.sum(x, axis=-1) for x in (labels, _weighted(labels, class_weights)))
        counted = jnp.sum(total / jnp.where(mass > 0, mass, 1))
    return jnp.where(counted > 0, size / jnp.where(counted > 0, counted, 1), 0)


def unlabeled_as_unknown(labels: Float[Array, "B C"]) -> Float[Array, "B C"]:
    """Return labels for softmax_xent with -1 everywhere in examples with an unknown label or without labels."""
    unknown = jnp.any(labels < 0, axis=-1, keepdims=True) | jnp.all(labels == 0, axis=-1, keepdims=True)
    return jnp.where(unknown, -1, labels)


def smooth(labels: Float[Array, "B C"], amount: float) -> Float[Array, "B C"]:
    """Apply label smoothing (Szegedy et al., 2016): (1 - amount)·labels + amount/C. Unknown labels stay unknown."""
    return jnp.where(labels < 0, labels, labels * (1 - amount) + amount / labels.shape[-1])


def _weighted(x: Float[Array, "B C"], weights: Float[Array, " C"] | None) -> Float[Array, "B C"]:
    return x if weights is None else x * weights[None]


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
