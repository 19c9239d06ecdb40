"""Sampling of the next token from a language model's logits: temperature, top-k and top-p."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from dcvit.errors import ConfigError

SHORTLIST = 1024  # number of tokens that are sorted first; all tokens are sorted only if these do not suffice


class Sampling(NamedTuple):
    """Parameters of the distribution from which a token is drawn.

    Fields:
      temperature: the distribution is softmax(logits / temperature); 0 selects the token of the highest logit.
      top_k: draw from this number of tokens with the highest logits; 0 is no limit.
      top_p: draw from the smallest set of tokens of highest probability whose total probability reaches this value
        (nucleus sampling, Holtzman et al., 2020). The probabilities are those after top_k.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def check(self) -> None:
        """Raise ConfigError if a value is out of its range."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} should be 0 or more, and finite")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} should be 0, for all tokens, or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} should be above 0 and at most 1")


def sample(logits: Float[Array, "B V"], keys: Key[Array, " B"], sampling: Sampling) -> Int[Array, " B"]:
    """Draw one token per example by the Gumbel-max trick.

    Tokens of equal logit rank by their number, the lower one first.

    Args:
      logits: unnormalized log-probabilities.
      keys: one random key per example.
      sampling: parameters of the distribution, checked.
    """
    logits = logits.astype(jnp.float32)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Both limits are float32 numbers, and so are their reciprocals.
    temperature = min(max(sampling.temperature, 1e-30), 1e30)
    logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    # The noise belongs to the token, not to its rank: a change of two ranks by rounding does not change the result.
    size = logits.shape[-1]
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32))(keys)
    if not sampling.top_k and sampling.top_p == 1:
        return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def draw(count: int) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """Return a token drawn among the `count` of highest logit, and the total probability of these; each is B."""
        ranked, order = jax.lax.top_k(logits, count)
        log_total = jax.nn.logsumexp(ranked, axis=-1, keepdims=True) if sampling.top_k else total
        cumulative = jnp.cumsum(jnp.exp(ranked - log_total), axis=-1)
        kept = jnp.pad(cumulative[:, :-1] < sampling.top_p, ((0, 0), (1, 0)), constant_values=True)
        noisy = jnp.where(kept, ranked + jnp.take_along_axis(noise, order, axis=-1), -jnp.inf)
        best = jnp.argmax(noisy, axis=-1, keepdims=True)
        return jnp.take_along_axis(order, best, axis=-1)[:, 0].astype(jnp.int32), cumulative[:, -1]

    if sampling.top_k or size <= SHORTLIST:
        return draw(min(sampling.top_k or size, size))[0]
    token, cumulative = draw(SHORTLIST)  # sorting all tokens is slow and rarely needed
    return jax.lax.cond((cumulative >= sampling.top_p).all(), lambda: token, lambda: draw(size)[0])
