"""Text generation: the choice of the next token, the loop around a model's cached decoding, and its text as it grows.

The prompts of a batch are read in one call, and each further token comes from one compiled step whose shapes never
change. Lengths are rounded up a little, so that prompts of many lengths share a few compiled programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.errors import ConfigError
from dcvit.models.lm import LM, head_kernel, init_cache, unembed

# What the modules cast to their dtype before they use it; norms and W_b stay float32.
CAST = ("kernel", "embedding", "pos_embedding", "w_q1", "w_q2", "w_qg", "w_k1", "w_k2", "w_kg")
SHORTLIST = 1024  # how many tokens are sorted before all of them are
INCOMPLETE = "\ufffd"  # what the bytes of a character that is not whole yet decode to


class Sampling(NamedTuple):
    """How a token is drawn: from softmax(logits / temperature), of the `top_k` likeliest tokens (0: of all), of the
    fewest likeliest among those whose probability reaches `top_p`. A temperature of 0 takes the likeliest one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def check(self) -> None:
        """Raises ConfigError for a value out of its range."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} should be 0 or more, and finite")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} should be 0, for all tokens, or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} should be above 0 and at most 1")


PLAIN = Sampling()


def sample(logits: Float[Array, "B V"], keys: Any, sampling: Sampling) -> Int[Array, " B"]:
    """A token for each example, by its own random key of `keys`; of equally likely tokens the lower ones come first.

    Raises:
      ConfigError: a value of `sampling` is out of its range.
    """
    sampling.check()
    logits = logits.astype(jnp.float32)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    temperature = min(max(sampling.temperature, 1e-30), 1e30)  # float32 knows it and its reciprocal
    logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    # Every token has its own noise, wherever it ranks: two that swap their ranks by rounding change nothing.
    size = logits.shape[-1]
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32))(keys)
    if not sampling.top_k and sampling.top_p == 1:
        return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def draw(count: int) -> tuple[Array, Array]:
        """A token of the `count` likeliest, and their probability."""
        ranked, order = jax.lax.top_k(logits, count)
        whole = jax.nn.logsumexp(ranked, axis=-1, keepdims=True) if sampling.top_k else total
        reached = jnp.cumsum(jnp.exp(ranked - whole), axis=-1)
        kept = jnp.pad(reached[:, :-1] < sampling.top_p, ((0, 0), (1, 0)), constant_values=True)
        noisy = jnp.where(kept, ranked + jnp.take_along_axis(noise, order, axis=-1), -jnp.inf)
        best = jnp.argmax(noisy, axis=-1, keepdims=True)
        return jnp.take_along_axis(order, best, axis=-1)[:, 0].astype(jnp.int32), reached[:, -1]

    if sampling.top_k or size <= SHORTLIST:
        return draw(min(sampling.top_k or size, size))[0]
    token, reached = draw(SHORTLIST)  # to sort all tokens is slow, and seldom needed
    return jax.lax.cond((reached >= sampling.top_p).all(), lambda: token, lambda: draw(size)[0])


class Choice(NamedTuple):
    """What of a token's choice is compiled in."""

    sampling: Sampling
    vocab_size: int | None  # only tokens below it


def generate(
    net: LM,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling = PLAIN,
    seed: int = 0,
    stop: Sequence[int] = (),
    begin: int | None = None,
    examples: Sequence[int] | None = None,
    vocab_size: int | None = None,
) -> Iterator[list[int | None]]:
    """Continues prompts: yields after each step every example's new token, None where the example has ended.

    An example ends before a token of `stop`; the iteration ends with the last example, or after `max_tokens` steps.
    It may be left at any time. An example's randomness depends on `seed`, its number and the token's number only.

    Args:
      prompts: of any lengths; `begin` stands for an empty one.
      stop: tokens that end an example.
      examples: the examples' numbers; their indices in the batch by default.
      vocab_size: only tokens below it are produced: a tokenizer's size, where the model's is padded.

    Raises:
      ConfigError: at once, where prompts, numbers and model do not fit together.
      FloatingPointError: while iterating, where the model's logits are not finite.
    """
    sampling.check()
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens} should be 1 or more")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} should be in 0 … 2^32-1")
    if vocab_size is not None and not 1 <= vocab_size <= net.vocab_size:
        raise ConfigError(f"vocab_size={vocab_size} should be in 1 … {net.vocab_size}, the model's number of tokens")
    numbers = range(len(prompts)) if examples is None else examples
    if len(numbers) != len(prompts):
        raise ConfigError(f"{len(numbers)} numbers of examples for {len(prompts)} prompts")
    filled = [_checked(net, prompt, max_tokens, begin) for prompt in prompts]
    if not filled:
        return iter(())
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(np.asarray(numbers, np.uint32))
    return _steps(net, params, filled, keys, max_tokens, Choice(sampling, vocab_size), frozenset(stop))


def complete(net: LM, params: Any, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """The new tokens of each example, once all have ended; takes and raises what `generate` does."""
    found: list[list[int]] = [[] for _ in prompts]
    for step in generate(net, params, prompts, **options):
        for tokens, token in zip(found, step, strict=True):
            if token is not None:
                tokens.append(token)
    return found


def _checked(net: LM, prompt: Sequence[int], max_tokens: int, begin: int | None) -> list[int]:
    """The prompt, or `begin` where it is empty; raises ConfigError where the model cannot continue it."""
    tokens = list(prompt)
    if not tokens:
        if begin is None:
            raise ConfigError("an empty prompt, and no end-of-text token to begin with: give at least one token")
        tokens = [begin]
    for token in tokens:
        if not 0 <= token < net.vocab_size:
            raise ConfigError(f"token {token} of a prompt is none of the model's {net.vocab_size}")
    if len(tokens) >= net.context:
        raise ConfigError(f"a prompt of {len(tokens)} tokens fills the model's context of {net.context}")
    if len(tokens) + max_tokens > net.context:
        raise ConfigError(
            f"{len(tokens)} tokens of a prompt and {max_tokens} new ones are more than the model's context of "
            f"{net.context}"
        )
    return tokens


def _steps(
    net: LM,
    params: Any,
    prompts: Sequence[Sequence[int]],
    keys: Any,
    max_tokens: int,
    choice: Choice,
    stop: frozenset[int],
) -> Iterator[list[int | None]]:
    """The loop of `generate`."""
    longest = max(map(len, prompts))
    width, slots = (min(_rounded(length), net.context) for length in (longest, longest + max_tokens))
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    count = np.array([len(prompt) for prompt in prompts], np.int32)
    params = narrowed(net, params)
    token, cache = _prefill(net, choice, slots, params, tokens, count, keys)
    ended = [False] * len(prompts)
    for number in range(1, max_tokens + 1):
        newest = token
        if number < max_tokens:  # begun before the newest token is read: the device does not wait for the host
            token, cache = _step(net, choice, params, cache, token, keys, np.int32(number))
        found = np.asarray(newest).tolist()
        if min(found) < 0:
            raise FloatingPointError("the model's logits are not finite")
        ended = [was or token in stop for was, token in zip(ended, found, strict=True)]
        if all(ended):
            return
        yield [None if end else token for end, token in zip(ended, found, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(
    net: LM, choice: Choice, slots: int, params: Any, tokens: Int[Array, "B T"], count: Int[Array, " B"], keys: Any
) -> tuple[Int[Array, " B"], dict[str, Any]]:
    """Each example's first new token, and the cache of its prompt: `count` of the T tokens."""
    cache = init_cache(net, tokens.shape[0], slots)
    _, out = net.apply({"params": params}, tokens, cache=cache, count=count)
    last = jnp.take_along_axis(out["pre_logits"], (count - 1)[:, None, None], axis=1)[:, 0]
    logits = unembed(last, head_kernel(params))  # of one token each, not of all T
    return _choose(logits, keys, jnp.int32(0), choice), out["cache"]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _step(
    net: LM,
    choice: Choice,
    params: Any,
    cache: dict[str, Any],
    token: Int[Array, " B"],
    keys: Any,
    number: Int[Array, ""],
) -> tuple[Int[Array, " B"], dict[str, Any]]:
    """Each example's next token, and the cache with its newest one."""
    logits, out = net.apply({"params": params}, token[:, None], cache=cache)
    return _choose(logits[:, 0], keys, number, choice), out["cache"]


def _choose(logits: Array, keys: Any, number: Array, choice: Choice) -> Int[Array, " B"]:
    """Each example's token of this number; -1 where the logits are not finite."""
    logits = logits[:, : choice.vocab_size]
    keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
    return jnp.where(jnp.isfinite(logits).all(axis=-1), sample(logits, keys, choice.sampling), -1)


def _rounded(length: int) -> int:
    """The next of a few lengths: multiples of 16, and from 128 on four in each doubling."""
    step = max(16, 2 ** ((length - 1).bit_length() - 3))
    return -(-length // step) * step


def narrowed(net: LM, params: Any) -> Any:
    """The parameters on the device, in the dtype to which the modules would cast them again for each token.

    The results do not change; those that are narrowed already are not copied.
    """

    def narrow(path: tuple[Any, ...], leaf: Any) -> Array:
        return jnp.asarray(leaf, net.dtype_mm if path[-1].key in CAST else None)

    return jax.tree_util.tree_map_with_path(narrow, params)


class TextStream:
    """The text of one example while its tokens come: whole characters only, and nothing from a stop string on.

    `stopped` says that a string of `stop` has come.

    Args:
      decode: a tokenizer's, of tokens into text.
      stop: strings that end the text; they are no part of it.
      after: the tokens before, whose text is not repeated.
    """

    KEPT = 16  # tokens before the new ones, for decoders that treat a text's beginning in their own way

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), after: Sequence[int] = ()):
        if not all(stop):
            raise ConfigError("an empty stop string would end every text before it begins")
        self.decode, self.stop, self.stopped = decode, tuple(stop), False
        self._ids = self._tail(list(after))
        self._shown = len(self._whole())

    def push(self, token: int) -> str:
        """The text that can be shown now that `token` has come."""
        if self.stopped:
            return ""
        self._ids.append(token)
        text = self._whole()
        end = len(text)
        found = [at for at in (text.find(word, self._shown) for word in self.stop) if at >= 0]
        if found:
            self.stopped, end = True, min(found)
        else:  # what may become a stop string waits
            starts = range(self._shown, end)
            end = next((at for at in starts if any(word.startswith(text[at:]) for word in self.stop)), end)
        piece, self._shown = text[self._shown : end], max(self._shown, end)
        if len(self._ids) > 4 * self.KEPT and self._shown == len(self.decode(self._ids)):
            self._ids = self._tail(self._ids)
            self._shown = len(self._whole())
        return piece

    def rest(self) -> str:
        """What waited for a stop string that did not come; a character cut short is left out."""
        return "" if self.stopped else self._whole()[self._shown :]

    def _whole(self) -> str:
        """The text without what is not whole yet at its end: some decoders give a mark for each byte of it, and for
        those of the whole characters just before."""
        return self.decode(self._ids).rstrip(INCOMPLETE)

    def _tail(self, ids: list[int]) -> list[int]:
        """The last KEPT tokens, or up to 3 more, so that they do not begin inside a character of 4 bytes."""
        starts = [max(0, len(ids) - self.KEPT - more) for more in range(4)]
        whole = (start for start in starts if not self.decode(ids[start:]).startswith(INCOMPLETE))
        return ids[next(whole, starts[0]) :]
