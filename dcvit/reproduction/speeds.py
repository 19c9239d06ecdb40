"""Measured speed of small language models in training and in decoding, in interleaved rounds of one process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from dcvit.inference.generation import Options, Params, cast_params, generate
from dcvit.models import lm
from dcvit.reproduction import step_times
from dcvit.training.setup import load_setup


def training_rates(runs: Mapping[str, tuple[str, Sequence[str]]], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the tokens per second of every timed training step of each arm, without compilation and evaluations.

    Args:
      runs: the config of each arm, as for `dcvit.config.load.load`.
      tokens: those of a step.
      rounds: timed steps of an arm.
    """
    steps = {arm: step_times.stepper(load_setup(*run)) for arm, run in runs.items()}
    seconds = step_times.interleaved(steps, rounds)
    return {arm: [tokens / each for each in times] for arm, times in seconds.items()}


def decoding_rates(
    nets: Mapping[str, lm.LM], batch: int, prompt: int, tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Return the tokens per second of a batch in each round for untrained models of each arm.

    A round generates with each arm in turn, from random prompts. The time is that from the first new token to the last,
    so that neither compilation nor the processing of the prompts counts.

    Args:
      nets: the model of each arm.
      batch: rows.
      prompt: tokens of a prompt.
      tokens: new tokens of a row.
      rounds: timed rounds; one more comes before them.
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
    """Return a function that generates tokens and returns their number per second, over all rows."""
    params: Params = cast_params(net, jax.jit(net.init)(jax.random.key(0), np.zeros((1, 2), np.int32))["params"])
    prompts = np.random.default_rng(0).integers(net.vocab_size, size=(batch, prompt)).tolist()

    def decode() -> float:
        steps = generate(net, params, prompts, Options(tokens))
        next(steps)
        started = time.perf_counter()
        count = sum(batch for _ in itertools.islice(steps, tokens - 1))
        return count / (time.perf_counter() - started)

    return decode
