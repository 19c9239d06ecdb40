"""Temperature scaling of a softmax classifier (Guo et al., 2017, arXiv 1706.04599, Sec. 4.2), in bounded memory.

Logits are divided by a temperature T, which leaves the predictions as they are. The sums that a choice of T needs are
kept for a grid of temperatures, so that one pass over the data suffices.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

BINS = 15  # of confidence, of equal width, as in Guo et al. (2017)
GRID = 2.0 ** (np.arange(-64, 65) / 16)  # from 1/16 to 16, in steps of 4.4 %
UNSCALED = 64  # index of T = 1
FOLDS = 2


def bin_of(confidence: Float[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
    """Return the bin of each confidence, i for (i/BINS, (i+1)/BINS]; 0, which a sigmoid can have, is in the first."""
    # A softmax may round above 1.
    edges = np.linspace(0, 1, BINS + 1)
    found: np.ndarray = np.maximum(np.searchsorted(edges, np.minimum(confidence, 1), side="left") - 1, 0)
    return found


class Temperatures:
    """Sums over the examples of an evaluation, by fold and temperature; example i is of fold i mod 2.

    Attributes:
      labeled: number of examples with one label, whose loss counts, in each fold.
      nll: sums of their negative log-likelihoods, in nats, folds × temperatures.
      examples, correct, confidence: numbers of examples and of correct ones, and sums of confidences, folds ×
        temperatures × bins of confidence.
    """

    def __init__(self) -> None:
        """Start with no examples."""
        self.labeled, self.nll = np.zeros(FOLDS, np.int64), np.zeros((FOLDS, len(GRID)))
        shape = (FOLDS, len(GRID), BINS)
        self.examples, self.correct = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.confidence = np.zeros(shape)

    @staticmethod
    def select(logits: Float[jax.Array, "B C"], label: Int[jax.Array, " B"]) -> dict[str, jax.Array]:
        """Return, on the devices, the arrays of a batch for `add`.

        They are `below_best`, the label's logit minus the largest one, and `log_partition`, for each temperature, the
        logarithm of the sum over the classes of exp((logit - largest)/T): the confidence is its negative's exp.
        """
        below = logits.astype(jnp.float32)
        below -= jnp.max(below, axis=-1, keepdims=True)

        def at(temperature: jax.Array) -> jax.Array:
            return jax.nn.logsumexp(below / temperature, axis=-1)

        partition = jax.lax.map(at, jnp.asarray(GRID, jnp.float32))  # one at a time: C may be large
        return {
            "below_best": jnp.take_along_axis(below, label[:, None], axis=-1)[:, 0], "log_partition": partition.T
        }  # fmt: skip

    def add(self, found: Mapping[str, np.ndarray], first: int) -> None:
        """Count the examples of a batch, numbered from `first`; `found` has the evaluator's scores and `select`'s."""
        partition = found["log_partition"].astype(np.float64)  # B × temperatures
        below = found["below_best"].astype(np.float64)
        used = found["counted"] & np.isfinite(partition).all(axis=1) & np.isfinite(below)
        at = bin_of(np.exp(-partition)) + BINS * np.arange(len(GRID))
        for fold in range(FOLDS):
            mine = used & ((first + np.arange(len(used))) % FOLDS == fold)
            single = mine & ~found["several"]
            self.labeled[fold] += single.sum()
            self.nll[fold] += (partition[single] - below[single, None] / GRID).sum(axis=0)
            for total, rows, weights in (
                (self.examples, mine, None), (self.correct, mine & found["top1"], None),
                (self.confidence, mine, np.exp(-partition)),
            ):  # fmt: skip
                counts = np.bincount(
                    at[rows].ravel(), None if weights is None else weights[rows].ravel(), minlength=total[fold].size
                )
                total[fold] += counts.reshape(total[fold].shape)
