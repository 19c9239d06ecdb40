"""Timing of generation in interleaved rounds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from dcvit.inference.generation import Options, Params, cast_params, generate
from dcvit.models import lm


def decoding_rates(
    nets: Mapping[str, lm.LM], batch: int, prompt: int, tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Return, by key of `nets`, the generated tokens per second in each round; the models are untrained.

    A round generates with each model in turn, from random prompts. The time is from the first new token to the last, so
    that neither compilation nor the processing of the prompts counts.

    Args:
      nets: the models by name.
      batch: number of rows that are generated together.
      prompt: number of tokens of a prompt.
      tokens: number of new tokens of a row.
      rounds: number of timed rounds; one more comes before them.
    """
    arms = {arm: decoder(net, batch, prompt, tokens) for arm, net in nets.items()}
    rates: dict[str, list[float]] = {arm: [] for arm in nets}
    for number in range(rounds + 1):
        for arm, decode in arms.items():
            rate = decode()
            if number:
                rates[arm].append(rate)
    return rates


def decoder(net: lm.LM, batch: int, prompt: int, tokens: int) -> Callable[[], float]:
    """Return a function that generates with an untrained model and returns the tokens per second, over all rows."""
    params: Params = cast_params(net, jax.jit(net.init)(jax.random.key(0), np.zeros((1, 2), np.int32))["params"])
    prompts = np.random.default_rng(0).integers(net.vocab_size, size=(batch, prompt)).tolist()

    def decode() -> float:
        steps = generate(net, params, prompts, Options(tokens))
        next(steps)
        started = time.perf_counter()
        count = sum(batch for _ in itertools.islice(steps, tokens - 1))
        return count / (time.perf_counter() - started)

    return decode
