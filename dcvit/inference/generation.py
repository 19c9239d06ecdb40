"""Token generation with a language model's KV cache.

The prompts of a batch are processed by one call (prefill). Each further token is computed by one compiled step whose
shapes are constant. Lengths and numbers of prompts are rounded up, so that batches of different sizes share compiled
programs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from dcvit.errors import NOT_FINITE, CheckpointError, ConfigError
from dcvit.inference.sampling import Sampling, sample
from dcvit.models.lm import LM, head_kernel, init_cache, unembed

Params = Mapping[str, Any]
Caches = dict[str, Any]
KeyPath = tuple[jax.tree_util.DictKey, ...]

# Parameters that the modules convert to their compute dtype before use; norms and W_b stay float32.
CAST = ("kernel", "embedding", "pos_embedding", "w_q1", "w_q2", "w_qg", "w_k1", "w_k2", "w_kg")


class Options(NamedTuple):
    """Options of `generate`: length, sampling and special tokens.

    Fields:
      max_tokens: the maximum number of new tokens per example.
      sampling: how a token is drawn.
      seed: seed of the random numbers.
      stop: tokens that end an example.
      begin: the token that replaces an empty prompt.
      vocab_size: only tokens below this number are generated, such as the size of a tokenizer that is smaller than the
        model's vocabulary; None is no limit.
    """

    max_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    stop: Sequence[int] = ()
    begin: int | None = None
    vocab_size: int | None = None

    def check(self, model: LM) -> None:
        """Raise ConfigError if a value is out of its range, or does not fit the model."""
        self.sampling.check()
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens} should be 1 or more")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed} should be in 0 … 2^32-1")
        if self.vocab_size is not None and not 1 <= self.vocab_size <= model.vocab_size:
            raise ConfigError(
                f"vocab_size={self.vocab_size} should be in 1 … {model.vocab_size}, the model's number of tokens"
            )


class Program(NamedTuple):
    """The static arguments of the compiled functions: the model, and how a token below `vocab_size` is selected."""

    model: LM
    sampling: Sampling
    vocab_size: int | None


def generate(
    model: LM,
    params: Params,
    prompts: Sequence[Sequence[int]],
    options: Options,
    examples: Sequence[int] | None = None,
) -> Iterator[list[int | None]]:
    """Continue prompts; yield the new token of every example after each step, None for an example that has ended.

    An example ends before a token of `options.stop`. The iteration ends when all examples have ended or after
    `options.max_tokens` steps; the caller may also stop earlier. The random numbers of an example depend only on the
    seed, the number of the example and the number of the token.

    Args:
      model: the language model.
      params: its parameters.
      prompts: token sequences of any lengths; an empty one is replaced by the token `options.begin`.
      options: see `Options`.
      examples: numbers of the examples; by default their indices in the batch.

    Raises:
      ConfigError: the arguments do not fit each other or the model; raised before the first step.
      CheckpointError: the model's logits are not finite; raised during iteration.
    """
    options.check(model)
    numbers = range(len(prompts)) if examples is None else examples
    if len(numbers) != len(prompts):
        raise ConfigError(f"{len(numbers)} example numbers for {len(prompts)} prompts")
    checked = [_check_prompt(model, prompt, options) for prompt in prompts]
    if not checked:
        return iter(())
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(options.seed)))(np.asarray(numbers, np.uint32))
    return _generate(model, params, checked, keys, options)


def cast_params(model: LM, params: Params) -> Params:
    """Move the parameters to the device and convert them to the dtype in which the model uses them.

    The results do not change, because the modules make the same conversion for every token. Parameters that have the
    dtype already are not copied.
    """

    def cast(path: KeyPath, leaf: Array | np.ndarray) -> Array:
        return jnp.asarray(leaf, model.dtype_mm if path[-1].key in CAST else None)

    converted: Params = jax.tree_util.tree_map_with_path(cast, params)
    return converted


def _check_prompt(model: LM, prompt: Sequence[int], options: Options) -> list[int]:
    """Return the tokens of a prompt, or `begin` if it is empty. Raise ConfigError if the model cannot continue it."""
    tokens = list(prompt)
    if not tokens:
        if options.begin is None:
            raise ConfigError("the prompt is empty and there is no end-of-text token to begin with: give a token")
        tokens = [options.begin]
    for token in tokens:
        if not 0 <= token < model.vocab_size:
            raise ConfigError(f"the prompt's token {token} should be in 0 … {model.vocab_size - 1}")
    if len(tokens) + options.max_tokens > model.context:
        raise ConfigError(
            f"a prompt of {len(tokens)} tokens and {options.max_tokens} new ones exceed the model's context of "
            f"{model.context}"
        )
    return tokens


def _generate(
    model: LM,
    params: Params,
    prompts: Sequence[Sequence[int]],
    keys: Key[Array, " B"],
    options: Options,
) -> Iterator[list[int | None]]:
    """Run `generate` on checked arguments, with one random key for each prompt."""
    program = Program(model, options.sampling, options.vocab_size)
    longest, max_tokens, stop = max(map(len, prompts)), options.max_tokens, frozenset(options.stop)
    length, slots = (min(round_up(n, 16), model.context) for n in (longest, longest + max_tokens))
    rows = [*prompts, *[prompts[-1]] * (round_up(len(prompts)) - len(prompts))]
    keys = jnp.concatenate([keys, jnp.repeat(keys[-1:], len(rows) - len(prompts))])
    padded = np.zeros((len(rows), length), np.int32)
    for row, prompt in zip(padded, rows, strict=True):
        row[: len(prompt)] = prompt
    count = np.array([len(row) for row in rows], np.int32)
    params = cast_params(model, params)
    token, cache = _prefill(program, slots, params, padded, count, keys)
    ended = [False] * len(prompts)
    for number in range(1, max_tokens + 1):
        latest = token
        if number < max_tokens:  # dispatch the next step before reading this one, so that the device does not wait
            token, cache = _step(program, params, cache, token, keys, np.int32(number))
        tokens = np.asarray(latest).tolist()
        if min(tokens) < 0:
            raise CheckpointError(f"the model's logits are {NOT_FINITE}")
        tokens = tokens[: len(prompts)]
        ended = [before or token in stop for before, token in zip(ended, tokens, strict=True)]
        if all(ended):
            return
        yield [None if end else token for end, token in zip(ended, tokens, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(
    program: Program,
    slots: int,
    params: Params,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    keys: Key[Array, " B"],
) -> tuple[Int[Array, " B"], Caches]:
    """Return each example's first new token, and the cache of its prompt, which is the first `count` of T tokens."""
    cache = init_cache(program.model, tokens.shape[0], slots)
    _, out = program.model.apply({"params": params}, tokens, cache=cache, count=count)
    last = jnp.take_along_axis(out["pre_logits"], (count - 1)[:, None, None], axis=1)[:, 0]
    logits = unembed(last, head_kernel(params))  # of one token per example instead of all T
    return _select(logits, keys, jnp.int32(0), program), out["cache"]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(
    program: Program,
    params: Params,
    cache: Caches,
    token: Int[Array, " B"],
    keys: Key[Array, " B"],
    number: Int[Array, ""],
) -> tuple[Int[Array, " B"], Caches]:
    """Return, for each example, its new token `number`, which follows `token`, and the cache that includes `token`."""
    logits, out = program.model.apply({"params": params}, token[:, None], cache=cache)
    return _select(logits[:, 0], keys, number, program), out["cache"]


def _select(
    logits: Float[Array, "B V"], keys: Key[Array, " B"], number: Int[Array, ""], program: Program
) -> Int[Array, " B"]:
    """Return the selected token of each example, its new token `number`; -1 if its logits are not finite."""
    logits = logits[:, : program.vocab_size]
    keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
    return jnp.where(jnp.isfinite(logits).all(axis=-1), sample(logits, keys, program.sampling), -1)


def round_up(size: int, multiple: int = 1) -> int:
    """Return a size rounded up to a multiple of `multiple`; above 8·multiple, to one of four sizes per doubling."""
    step = max(multiple, 2 ** ((size - 1).bit_length() - 3))
    return -(-size // step) * step
