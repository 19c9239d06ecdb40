"""Continuation of text prompts with a language model and its tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dcvit.errors import ConfigError, InputError
from dcvit.inference.generation import Params, generate
from dcvit.inference.sampling import Sampling
from dcvit.inference.text_stream import TextStream, push_steps
from dcvit.models.lm import LM
from input_pipeline.files import read_regular
from input_pipeline.text.tokenizer import Tokenizer

DEFAULT_TOKENS = 200


class Continuation(NamedTuple):
    """The text after one prompt.

    Fields:
      prompt: the prompt.
      text: the text after it.
      tokens: the number of generated tokens.
      ended: "stop" after a stop string, "length" after the maximum number of tokens, or "end_of_text".
    """

    prompt: str
    text: str
    tokens: int
    ended: str


class Continuations(NamedTuple):
    """The continuations of a batch of prompts, and their cost.

    Fields:
      texts: one continuation per prompt.
      tokens: the number of generated tokens.
      tokens_per_second: the speed after the first token, so without compilation; None without a second token.
      positions: the length of the longest prompt with its continuation, in tokens.
    """

    texts: list[Continuation]
    tokens: int
    tokens_per_second: float | None
    positions: int


def read_prompts(texts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Return the given texts, followed by the contents of the given files.

    Raises:
      ConfigError: there is neither a text nor a file, or a text is not valid Unicode.
      InputError: a file cannot be read or is not UTF-8.
    """
    if not texts and not files:
        raise ConfigError('give --prompt TEXT or --prompt_file FILE; --prompt "" begins with an end-of-text token')
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"--prompt {text!r} is not valid UTF-8") from None
    prompts = list(texts)
    for file in files:
        try:
            prompts.append(read_regular(file).decode())
        except OSError as e:
            raise InputError(f"cannot read {file}: {e.strerror}") from None
        except InputError as e:
            raise InputError(f"cannot read {file}: {e}") from None
        except UnicodeDecodeError as e:
            raise InputError(f"{file} is not UTF-8: {e.reason} at byte {e.start}") from None
    return prompts


def end_of_text(model: LM, tokenizer: Tokenizer) -> int | None:
    """Return the token between documents: the tokenizer's, or else the model's; None if neither has one."""
    return model.end_of_text if tokenizer.end_of_text is None else tokenizer.end_of_text


def _default_tokens(model: LM, lengths: Sequence[int]) -> int:
    """Return the maximum number of new tokens after prompts of these lengths."""
    return max(1, min(DEFAULT_TOKENS, model.context - max(lengths, default=1)))


def continue_texts(
    model: LM,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int | None,
    sampling: Sampling,
    seed: int,
    stop: Sequence[str],
    show: Callable[[str], None],
    end_tokens: Sequence[int] = (),
) -> Continuations:
    """Continue text prompts as one batch.

    Args:
      model: the language model.
      params: its parameters.
      tokenizer: the tokenizer of its training data.
      prompts: the texts to continue; an empty one begins with an end-of-text token.
      max_tokens: the maximum number of new tokens per prompt; by default `DEFAULT_TOKENS`, if the context allows.
      sampling, seed: how a token is drawn, and the seed of the random numbers.
      stop: strings that end a text.
      show: called with each new piece of the first prompt's text.
      end_tokens: tokens that end a text, besides the one between documents.

    Raises:
      ConfigError: the prompts or the arguments do not fit the model.
      FloatingPointError: the model's logits are not finite.
    """
    encoded = [list(tokenizer.encode(prompt)) for prompt in prompts]
    ends = [token for token in (end_of_text(model, tokenizer), *end_tokens) if token is not None]
    lengths = [max(1, len(tokens)) for tokens in encoded]
    max_tokens = _default_tokens(model, lengths) if max_tokens is None else max_tokens
    streams = [TextStream(tokenizer.decode, stop, after=tokens) for tokens in encoded]
    texts, counts = ["" for _ in prompts], [0 for _ in prompts]

    def add(i: int, piece: str) -> None:
        texts[i] += piece
        if i == 0:
            show(piece)

    steps = generate(
        model, params, encoded, max_tokens=max_tokens, sampling=sampling, seed=seed, stop=ends,
        begin=ends[0] if ends else None, vocab_size=min(tokenizer.vocab_size, model.vocab_size),
    )  # fmt: skip
    first_tokens, started = 0, 0.0  # the tokens of the first step, and the time after it
    for pieces in push_steps(steps, streams):
        for i, piece in pieces:
            counts[i] += 1
            add(i, piece)
        if not started:
            first_tokens, started = sum(counts), time.perf_counter()
    speed = (sum(counts) - first_tokens) / (time.perf_counter() - started) or None
    results = []
    for i, stream in enumerate(streams):
        add(i, stream.rest())
        ended = "stop" if stream.stopped else "length" if counts[i] == max_tokens else "end_of_text"
        results.append(Continuation(prompts[i], texts[i], counts[i], ended))
    return Continuations(results, sum(counts), speed, max(map(sum, zip(lengths, counts, strict=True)), default=0))
