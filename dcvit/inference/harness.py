"""A language model for lm-evaluation-harness: log-likelihoods of texts, and generation until a stop string.

Importing this module imports the library `lm_eval`, which the extra `eval` installs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import chunks, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from dcvit.errors import NOT_FINITE, CheckpointError, ConfigError
from dcvit.inference.generation import Options, Params, cast_params, generate
from dcvit.inference.sampling import Sampling
from dcvit.inference.text_stream import TextStream, push_steps
from dcvit.inference.texts import end_of_text
from dcvit.models.lm import LM, head_kernel, unembed
from dcvit.models.losses import target_scores
from dcvit.parallel.sharding import data_mesh, prefetch, replicated
from dcvit.runs.progress import ProgressBar
from input_pipeline.text.tokenizer import Tokenizer

SHORTEST = 32  # the smallest length to which rows are padded
NEW_TOKENS = 256  # the harness's default for a task without a limit; at most half the model's context

Batch = dict[str, Array]
Request = tuple[object, list[int], list[int]]  # anything, the tokens of a context, the tokens of its continuation


def padded_length(length: int, maximum: int) -> int:
    """Return a length rounded up to a power of two or 3/4 of one, at most `maximum`.

    Rows of different lengths then share few compiled programs.
    """
    power = max(SHORTEST, 1 << (length - 1).bit_length())
    return min(power * 3 // 4 if length <= power * 3 // 4 else power, maximum)


def make_scorer(model: LM, mesh: Mesh) -> Callable[[Params, Batch], Batch]:
    """Return the compiled function (params, batch) -> scores.

    A batch has `tokens`, `targets` and `mask`, each of shape B T. The scores are `log_p` (B T), which is
    log p(target | tokens up to its position) and 0 where the mask is False, and `greedy` (B), which is True if every
    target where the mask is True is the token of the highest logit.
    """

    def score(params: Params, batch: Batch) -> Batch:
        _, out = model.apply({"params": params}, batch["tokens"])
        mask, unembed_position = batch["mask"], functools.partial(unembed, kernel=head_kernel(params))
        log_p, best = target_scores(unembed_position, out["pre_logits"], batch["targets"])
        return {"log_p": jnp.where(mask, log_p, 0.0), "greedy": jnp.all(best | ~mask, axis=1)}

    return jax.jit(score, out_shardings=replicated(mesh))


def read_generation_options(options: Mapping[str, object], context: int) -> tuple[Options, list[str]]:
    """Return the options and the stop strings of a request's `generation_kwargs`, for a model with this context.

    Raises:
      ConfigError: an unsupported option, or a value out of its range.
    """
    given = dict(normalize_gen_kwargs(dict(options), min(NEW_TOKENS, context // 2)))
    until, max_tokens = given.pop("until"), int(given.pop("max_gen_toks"))
    sampled, temperature = given.pop("do_sample"), float(given.pop("temperature", 1.0))
    sampling = Sampling(
        temperature if sampled else 0.0, int(given.pop("top_k", 0) or 0), float(given.pop("top_p", 1.0) or 1.0)
    )
    sampling.check()
    if given and given != {"num_beams": 1}:
        raise ConfigError(f"a task's generation_kwargs have {given}, which is not supported")
    if not 1 <= max_tokens < context:
        raise ConfigError(f"a task asks for {max_tokens} new tokens; the model's context is {context} with the prompt")
    return Options(max_tokens, sampling), [text for text in until if text]


class HarnessModel(TemplateLM):
    """Adapter that answers the three kinds of requests of lm-evaluation-harness with a language model.

    Requests are processed in order of decreasing length, so that a batch that does not fit in memory fails first.
    Results are in the order of the requests.

    Args:
      model: the language model.
      params: its parameters.
      tokenizer: the tokenizer of its training data.
      end_tokens: tokens that end a text; the first is used if neither the tokenizer nor the model has one.
      batch_size: rounded up to a multiple of the number of devices, which share a batch.

    Raises:
      ConfigError: there is no end-of-text token, with which the harness begins texts.
    """

    def __init__(
        self, model: LM, params: Params, tokenizer: Tokenizer, *, end_tokens: Sequence[int] = (), batch_size: int = 8
    ):
        super().__init__()
        end = next((token for token in (end_of_text(model, tokenizer), *end_tokens) if token is not None), None)
        if end is None:
            raise ConfigError("the tokenizer has no end-of-text token, with which the harness begins a text")
        self.net, self.text, self.end = model, tokenizer, int(end)
        self.mesh = data_mesh()
        self.batch_size = -(-batch_size // self.mesh.size) * self.mesh.size
        self.params = jax.device_put(cast_params(model, params), replicated(self.mesh))
        self.score = make_scorer(model, self.mesh)

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return self.end

    @property
    def max_length(self) -> int:
        """The length of the model's context in tokens."""
        return self.net.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: object) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        return list(self.text.encode(string))

    def _loglikelihood_tokens(self, requests: Sequence[Request], **options: object) -> list[tuple[float, bool]]:
        """Score the continuation of each request: (anything, tokens of a context, tokens of its continuation).

        Returns:
          For each request the sum of log p over the tokens of the continuation, each given all tokens before it that
          the model's context holds, and whether each of them is the token of the highest logit.

        Raises:
          ConfigError: a continuation is longer than the context.
          CheckpointError: the model's logits are not finite.
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
        parts = list(chunks(order, self.batch_size))
        batches = prefetch((self._batch([rows[i] for i in part]) for part in parts), self.mesh, self.batch_size)
        results: dict[int, tuple[float, bool]] = {}
        with ProgressBar("loglikelihood", len(rows)) as bar:
            for part, batch in zip(parts, batches, strict=True):
                with jax.set_mesh(self.mesh):  # the kernels need it
                    scores = jax.device_get(self.score(self.params, batch))
                sums = scores["log_p"].sum(axis=1, dtype=np.float64)
                if not np.isfinite(sums).all():
                    raise CheckpointError(f"the model's logits are {NOT_FINITE}")
                results.update((i, (float(sums[j]), bool(scores["greedy"][j]))) for j, i in enumerate(part))
                bar.show(len(results))
        return [results[i] for i in range(len(rows))]

    def _batch(self, rows: Sequence[tuple[list[int], int]]) -> dict[str, np.ndarray]:
        """Return the batch for `make_scorer` of rows (tokens, number of tokens to score at the end)."""
        length = padded_length(max(1, max(len(tokens) for tokens, _ in rows) - 1), self.max_length)
        batch = {name: np.zeros((self.batch_size, length), np.int32) for name in ("tokens", "targets")}
        batch["mask"] = np.zeros((self.batch_size, length), bool)
        for i, (tokens, scored) in enumerate(rows):
            last = len(tokens) - 1
            batch["tokens"][i, :last], batch["targets"][i, :last] = tokens[:-1], tokens[1:]
            batch["mask"][i, last - scored : last] = True
        return batch

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the sum of log p over all tokens of each text, which begins with an end-of-text token.

        A text is scored in windows of the model's context, and every token is scored once. The last window includes
        preceding tokens up to the length of the context.
        """
        windows: list[Request] = []
        owners: list[int] = []  # the request of each window
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0 for _ in requests]
        for i, (log_p, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += log_p
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue the context of each request until a stop string, an end-of-text token or the maximum length.

        A prompt that leaves too little room for the new tokens is truncated on the left. The sampled tokens of a
        request depend on its index and not on its batch.

        Raises:
          ConfigError: see `read_generation_options`.
          CheckpointError: the model's logits are not finite.
        """
        groups: dict[str, list[int]] = {}  # requests of equal options
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        texts: dict[int, str] = {}
        with ProgressBar("generation", len(requests)) as bar:
            for members in groups.values():
                options, until = read_generation_options(requests[members[0]].args[1], self.max_length)
                room = self.max_length - options.max_tokens
                prompts = {i: self.tok_encode(requests[i].args[0])[-room:] or [self.end] for i in members}
                members.sort(key=lambda i: -len(prompts[i]))
                for part in chunks(members, self.batch_size):
                    found = self._continue([prompts[i] for i in part], part, options, until)
                    texts.update(zip(part, found, strict=True))
                    bar.show(len(texts))
        return [texts[i] for i in range(len(requests))]

    def _continue(
        self, prompts: Sequence[list[int]], numbers: Sequence[int], options: Options, until: Sequence[str]
    ) -> list[str]:
        """Return the text generated after each prompt, up to a string `until`; `numbers` seed the prompts' sampling."""
        streams = [TextStream(self.text.decode, until, after=prompt) for prompt in prompts]
        texts = ["" for _ in prompts]
        options = options._replace(stop=(self.end,), vocab_size=min(self.text.vocab_size, self.net.vocab_size))
        steps = generate(self.net, self.params, prompts, options, examples=numbers)
        for pieces in push_steps(steps, streams):
            for i, piece in pieces:
                texts[i] += piece
        return [text + stream.rest() for text, stream in zip(texts, streams, strict=True)]
