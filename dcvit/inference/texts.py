"""Language models with their tokenizer: continuation of text prompts."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dcvit.errors import ConfigError, InputError
from dcvit.hub.open import Opened
from dcvit.hub.tokenizers import open_tokenizer_of
from dcvit.inference import generation
from dcvit.inference.model import Images, LoadedModel, Tokens
from dcvit.inference.sampling import Sampling
from dcvit.inference.text_stream import TextStream, push_steps
from dcvit.models.lm import LM
from input_pipeline.files import named_errors
from input_pipeline.text.tokenizer import Tokenizer

DEFAULT_TOKENS = 200


class TextOptions(NamedTuple):
    """Options of the continuation of a text.

    Fields:
      max_tokens: the maximum number of new tokens; None means `DEFAULT_TOKENS`, if the context allows.
      sampling: how a token is drawn.
      seed: seed of the random numbers.
      stop: strings that end the text and are not part of it.
    """

    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    seed: int = 0
    stop: Sequence[str] = ()

    def check(self) -> None:
        """Raise ConfigError if a value is out of its range."""
        self.sampling.check()
        if not all(self.stop):
            raise ConfigError("an empty stop string would end every text before it begins")


DEFAULT_OPTIONS = TextOptions()


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
    """

    texts: list[Continuation]
    tokens: int
    tokens_per_second: float | None


def read_prompts(texts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Return the given texts, followed by the contents of the given files.

    Raises:
      ConfigError: there is neither a text nor a file.
      InputError: a file cannot be read or is not UTF-8.
    """
    if not texts and not files:
        raise ConfigError('give --prompt TEXT or --prompt_file FILE; --prompt "" begins with an end-of-text token')
    prompts = list(texts)
    for file in files:
        with named_errors(file):
            content = file.read_bytes()
        try:
            prompts.append(content.decode())
        except UnicodeDecodeError as e:
            raise InputError(f"{file} is not UTF-8: {e.reason} at byte {e.start}") from None
    return prompts


def end_of_text(model: LM, tokenizer: Tokenizer) -> int | None:
    """Return the number of the end-of-text token: the tokenizer's, or else the model's; None if neither has one."""
    return model.end_of_text if tokenizer.end_of_text is None else tokenizer.end_of_text


@dataclasses.dataclass(frozen=True, repr=False)
class LanguageModel(LoadedModel):
    """A language model, with the tokenizer that turns text into its inputs.

    Fields, besides those of `LoadedModel`:
      open_tokenizer: returns the tokenizer at a path, or that of the training data for None.
      end_tokens: tokens that end a text, besides the tokenizer's or the model's.
    """

    module: LM
    open_tokenizer: Callable[[str | None], Tokenizer] = dataclasses.field(kw_only=True)
    end_tokens: Sequence[int] = ()

    kind = "a language model: use `dcvit generate`"

    @classmethod
    def _facts(cls, opened: Opened) -> dict[str, Any]:
        ends = opened.weights.description.end_tokens if opened.weights else ()
        return {"open_tokenizer": functools.partial(open_tokenizer_of, opened), "end_tokens": ends}

    def generate(
        self,
        prompt: str,
        tokens: int | None = None,
        *,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 0.95,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> str:
        """Return a continuation of a text; see `continue_texts`, `TextOptions` and `Sampling`.

        Raises:
          ConfigError: the model has no tokenizer, or an argument does not fit it.
        """
        ends = [stop] if isinstance(stop, str) else stop
        options = TextOptions(tokens, Sampling(temperature, top_k, top_p), seed, ends)
        return self.continue_texts([prompt], options).texts[0].text

    def stream(self, prompt: str, options: TextOptions = DEFAULT_OPTIONS) -> Iterator[str]:
        """Return an iterator over the pieces of a text's continuation, each as soon as its tokens are generated.

        Raises:
          ConfigError: the model has no tokenizer, or an option does not fit it; raised before the first piece.
          CheckpointError: the model's logits are not finite.
        """
        with self.on_devices():
            return self._pieces(_start(self, self.tokenizer, [prompt], options))

    def _pieces(self, started: _Started) -> Iterator[str]:
        """Yield the texts that become known; the model's mesh is the current one only while a token is computed."""
        while True:
            with self.on_devices():
                step = next(started.steps, None)
            if step is None:
                break
            yield from (piece for _, piece in step if piece)
        if rest := started.streams[0].rest():
            yield rest

    def continue_texts(
        self,
        prompts: Sequence[str],
        options: TextOptions,
        show: Callable[[str], None] = lambda _: None,
        tokenizer: Tokenizer | None = None,
    ) -> Continuations:
        """Continue texts as one batch.

        Args:
          prompts: the texts to continue; an empty one begins with an end-of-text token.
          options: see `TextOptions`.
          show: called with each new piece of the first prompt's text.
          tokenizer: the tokenizer, if not that of the training data.

        Raises:
          ConfigError: the prompts or the options do not fit the model.
          CheckpointError: the model's logits are not finite.
        """
        texts, counts = ["" for _ in prompts], [0 for _ in prompts]

        def add(i: int, piece: str) -> None:
            texts[i] += piece
            if i == 0:
                show(piece)

        first_tokens, first_time = 0, 0.0  # the tokens of the first step, and the time after it
        with self.on_devices():
            started = _start(self, tokenizer or self.tokenizer, prompts, options)
            for pieces in started.steps:
                for i, piece in pieces:
                    counts[i] += 1
                    add(i, piece)
                if not first_time:
                    first_tokens, first_time = sum(counts), time.perf_counter()
        speed = (sum(counts) - first_tokens) / (time.perf_counter() - first_time) or None
        results = []
        for i, stream in enumerate(started.streams):
            add(i, stream.rest())
            ended = "stop" if stream.stopped else "length" if counts[i] == started.max_tokens else "end_of_text"
            results.append(Continuation(prompts[i], texts[i], counts[i], ended))
        return Continuations(results, sum(counts), speed)

    @property
    def has_weights(self) -> bool:
        """True for weights of another library, whose tokenizer may have a template; False for a run."""
        return self.opened is not None and self.opened.weights is not None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training data. Raises ConfigError if the model has none."""
        return self.open_tokenizer(None)

    def _batches(self, inputs: Images | Tokens) -> Iterable[np.ndarray]:
        return [_rows(self.module, _encoded(self.tokenizer, inputs) if isinstance(inputs, str) else inputs)]


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text. Raise InputError if it is not valid Unicode."""
    try:
        return list(tokenizer.encode(text))
    except UnicodeEncodeError as e:
        raise InputError(f"the text is not valid Unicode: {e.reason} at character {e.start}") from None


def _rows(module: LM, given: Images | Tokens) -> np.ndarray:
    """Return tokens, given as T or B T, as int32 of shape B T. Raise InputError if they do not fit the model."""
    tokens = np.asarray(given)
    if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2) or not tokens.size:
        raise InputError(f"expected a text, or tokens of shape T or B T, found {tokens.dtype} of {tokens.shape}")
    if not 0 <= tokens.min() <= tokens.max() < module.vocab_size:
        raise InputError(f"tokens should be in 0 … {module.vocab_size - 1}")
    if module.position == "learned" and tokens.shape[-1] > module.context:
        raise InputError(f"{tokens.shape[-1]} tokens are more than the model's context of {module.context}")
    return np.atleast_2d(tokens).astype(np.int32)


class _Started(NamedTuple):
    """Generation that has begun: its steps, each prompt's text stream, and the limit of new tokens."""

    steps: Iterator[list[tuple[int, str]]]
    streams: list[TextStream]
    max_tokens: int


def _start(model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], options: TextOptions) -> _Started:
    """Return the begun generation for prompts. Raise ConfigError if they or the options do not fit the model."""
    options.check()
    module = model.module
    encoded = [_encoded(tokenizer, prompt) for prompt in prompts]
    ends = [token for token in (end_of_text(module, tokenizer), *model.end_tokens) if token is not None]
    room = module.context - max([1, *map(len, encoded)])
    max_tokens = max(1, min(DEFAULT_TOKENS, room)) if options.max_tokens is None else options.max_tokens
    streams = [TextStream(tokenizer.decode, options.stop, after=tokens) for tokens in encoded]
    token_options = generation.Options(
        max_tokens, options.sampling, options.seed, stop=ends, begin=ends[0] if ends else None,
        vocab_size=min(tokenizer.vocab_size, module.vocab_size),
    )  # fmt: skip
    steps = generation.generate(module, model.params, encoded, token_options)
    return _Started(push_steps(steps, streams), streams, max_tokens)
