"""A language model as lm-evaluation-harness asks for one: the log-likelihood of text, and text that continues text.

Imports the library `lm_eval`, of the `eval` extra.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from dcvit.dcmha.shapes import Array
from dcvit.errors import ConfigError
from dcvit.inference.generation import Sampling, TextStream, generate, narrowed
from dcvit.models.lm import LM, head_kernel, unembed
from dcvit.parallel.sharding import data_mesh, prefetch, replicated
from dcvit.runs.progress import ProgressBar

SHORTEST = 32  # rows are padded to this length at least, and to few others: each is compiled once
POSITIONS = 256  # of a row have logits at a time: those of all, B·T·V, may not fit in memory
NEW_TOKENS = 256  # where a task does not say how many, as far as half the context allows: the harness's number
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1}  # options that change nothing so


def padded_length(length: int, most: int) -> int:
    """The next of a few lengths, powers of two and 3/4 of them, and `most` at the most."""
    power = max(SHORTEST, 1 << (length - 1).bit_length())
    return min(power * 3 // 4 if length <= power * 3 // 4 else power, most)


def scorer(net: LM, mesh: Mesh) -> Callable[[Any, dict[str, Array]], dict[str, Array]]:
    """The compiled scoring of rows: (parameters, batch) -> `log_p` B T, and `greedy` B.

    A batch has `tokens`, `targets` and `mask`, all B T. `log_p` is log p(target | tokens so far), 0 where the mask is
    False; `greedy` says whether all other targets are the likeliest tokens.
    """

    def score(params: Any, batch: dict[str, Array]) -> dict[str, Array]:
        _, out = net.apply({"params": params}, batch["tokens"])
        kernel, mask = head_kernel(params), batch["mask"]

        def position(pair: tuple[Array, Array]) -> tuple[Array, Array]:
            hidden, target = pair
            logits = unembed(hidden, kernel)
            picked = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
            return picked - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == target

        pairs = (jnp.swapaxes(out["pre_logits"], 0, 1), jnp.swapaxes(batch["targets"], 0, 1))
        log_p, best = (jnp.swapaxes(x, 0, 1) for x in jax.lax.map(position, pairs, batch_size=POSITIONS))
        return {"log_p": jnp.where(mask, log_p, 0.0), "greedy": jnp.all(best | ~mask, axis=1)}

    return jax.jit(score, out_shardings=replicated(mesh))


class Generation(NamedTuple):
    """What a task's `generation_kwargs` ask for."""

    until: tuple[str, ...]
    max_tokens: int
    sampling: Sampling


def read_generation(options: Mapping[str, Any], context: int) -> Generation:
    """The `generation_kwargs` of a request, for a model of this context.

    Raises:
      ConfigError: an unknown option, a value out of its range, or no room for a prompt beside the new tokens.
    """
    found = dict(normalize_gen_kwargs(dict(options), min(NEW_TOKENS, context // 2)))
    until, max_tokens = found.pop("until"), int(found.pop("max_gen_toks"))
    temperature = float(found.pop("temperature", 1.0)) if found.pop("do_sample") else 0.0
    found.pop("temperature", None)
    sampling = Sampling(temperature, int(found.pop("top_k", 0) or 0), float(found.pop("top_p", 1.0) or 1.0))
    sampling.check()
    for key, value in found.items():
        if key not in NEUTRAL or value != NEUTRAL[key]:
            raise ConfigError(f"a task's generation_kwargs ask for {key}={value!r}, which is not supported")
    if not 1 <= max_tokens < context:
        raise ConfigError(f"a task asks for {max_tokens} new tokens; the model's context is {context} with the prompt")
    return Generation(tuple(text for text in until if text), max_tokens, sampling)


class HarnessModel(TemplateLM):
    """The model behind the harness's three kinds of requests; results are in the order of the requests.

    Requests are batched by length, the longest first: what does not fit in memory fails at once.
    """

    def __init__(self, net: LM, params: Any, tokenizer: Any, *, batch_size: int = 8):
        """
        Args:
          net, params: see `dcvit.training.setup.language_model`.
          tokenizer: see `dcvit.training.setup.tokenizer`.
          batch_size: rounded up to a multiple of the device count, which share a batch.

        Raises:
          ConfigError: neither tokenizer nor model has an end-of-text token, with which texts begin.
        """
        super().__init__()
        end = net.end_of_text if tokenizer.end_of_text is None else tokenizer.end_of_text
        if end is None:
            raise ConfigError("the tokenizer has no end-of-text token, with which the harness begins a text")
        self.net, self.text, self.end = net, tokenizer, int(end)
        self.mesh = data_mesh()
        self.batch_size = -(-batch_size // self.mesh.size) * self.mesh.size
        self.params = jax.device_put(narrowed(net, params), replicated(self.mesh))
        self.score = scorer(net, self.mesh)

    @property
    def eot_token_id(self) -> int:
        return self.end

    @property
    def max_length(self) -> int:
        """The most tokens that the model reads."""
        return self.net.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """The tokens of a text; none is added."""
        return list(self.text.encode(string))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """For requests (anything, context, continuation): Σ log p of the continuation's tokens, each given all before
        it that the model's context holds, and whether each is the likeliest one.

        Raises:
          ConfigError: a continuation is longer than the context.
          FloatingPointError: the model's logits are not finite.
        """
        rows = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"a continuation of {len(continuation)} tokens is longer than the model's context of "
                    f"{self.max_length}"
                )
            rows.append(((context + continuation)[-(self.max_length + 1) :], len(continuation)))
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        parts = list(_parts(order, self.batch_size))
        made = (self._batch([rows[i] for i in part]) for part in parts)
        batches = prefetch(made, self.mesh, self.batch_size)
        found: dict[int, tuple[float, bool]] = {}
        with ProgressBar("loglikelihood", len(rows)) as bar:
            for part, batch in zip(parts, batches, strict=True):
                scores = jax.device_get(self.score(self.params, batch))
                sums = scores["log_p"].sum(axis=1, dtype=np.float64)
                if not np.isfinite(sums).all():
                    raise FloatingPointError("the model's logits are not finite")
                found.update((i, (float(sums[j]), bool(scores["greedy"][j]))) for j, i in enumerate(part))
                bar.show(len(found))
        return [found[i] for i in range(len(rows))]

    def _batch(self, rows: Sequence[tuple[list[int], int]]) -> dict[str, np.ndarray]:
        """Rows of (tokens, how many at the end are scored), padded on the right, as `scorer` takes them."""
        length = padded_length(max(1, max(len(tokens) for tokens, _ in rows) - 1), self.max_length)
        batch = {name: np.zeros((self.batch_size, length), np.int32) for name in ("tokens", "targets")}
        batch["mask"] = np.zeros((self.batch_size, length), bool)
        for i, (tokens, scored) in enumerate(rows):
            last = len(tokens) - 1
            batch["tokens"][i, :last], batch["targets"][i, :last] = tokens[:-1], tokens[1:]
            batch["mask"][i, last - scored : last] = True
        return batch

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Σ log p of all tokens of each text, after an end-of-text token, in windows of the model's context.

        Every token is scored once. The last window reaches back as far as the context does.
        """
        windows: list[tuple[int, list[int], list[int]]] = []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append((i, *make_disjoint_window(window)))
        totals = [0.0 for _ in requests]
        for (i, *_), (log_p, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += log_p
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each context's continuation, up to one of its stop strings, an end-of-text token or its number of tokens.

        A prompt that leaves no room for the new tokens is cut on the left. What is drawn depends on the request's
        index, not on its batch.

        Raises:
          ConfigError: see `read_generation`.
          FloatingPointError: the model's logits are not finite.
        """
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        texts: dict[int, str] = {}
        with ProgressBar("generation", len(requests)) as bar:
            for members in alike.values():
                how = read_generation(requests[members[0]].args[1], self.max_length)
                room = self.max_length - how.max_tokens
                prompts = {i: self.tok_encode(requests[i].args[0])[-room:] or [self.end] for i in members}
                members.sort(key=lambda i: -len(prompts[i]))
                for part in _parts(members, self.batch_size):
                    texts.update(zip(part, self._continue([prompts[i] for i in part], part, how), strict=True))
                    bar.show(len(texts))
        return [texts[i] for i in range(len(requests))]

    def _continue(self, prompts: Sequence[list[int]], numbers: Sequence[int], how: Generation) -> list[str]:
        """The text after each prompt; `numbers` seed what is drawn."""
        streams = [TextStream(self.text.decode, how.until, after=prompt) for prompt in prompts]
        pieces: list[list[str]] = [[] for _ in prompts]
        steps = generate(
            self.net, self.params, prompts, max_tokens=how.max_tokens, sampling=how.sampling, examples=numbers,
            stop=(self.end,), vocab_size=min(self.text.vocab_size, self.net.vocab_size),
        )  # fmt: skip
        for step in steps:
            for token, stream, text in zip(step, streams, pieces, strict=True):
                if token is not None and not stream.stopped:
                    text.append(stream.push(token))
            if all(token is None or stream.stopped for token, stream in zip(step, streams, strict=True)):
                break
        return ["".join(text) + stream.rest() for text, stream in zip(pieces, streams, strict=True)]


def _parts(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Consecutive parts of up to `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
