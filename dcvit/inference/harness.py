"""lm-evaluation-harness: its tasks, with log-likelihoods of texts and generation by a language model.

Weights of another library are evaluated as by the harness's own class for transformers, `HFLM`: with the template and
the special tokens of their tokenizer. Texts of a run have the tokens that they would have as training data. Importing
this module imports the library `lm_eval`, which the extra `eval` installs, and which reads environment variables then.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from yaml import YAMLError

from dcvit.errors import NOT_FINITE, CheckpointError, ConfigError, first_line_with_type
from dcvit.inference.generation import Options, Params, cast_params, generate, round_up
from dcvit.inference.sampling import Sampling
from dcvit.inference.texts import LanguageModel, end_of_text
from dcvit.models.lm import LM, head_kernel, unembed
from dcvit.models.losses import target_scores
from dcvit.parallel.sharding import data_mesh, put_batch, replicated
from dcvit.runs.progress import Progress
from dcvit.weights.tensors import Json, read_json
from input_pipeline.optional import require
from input_pipeline.text.tokenizer import FileTokenizer, Tokenizer

if TYPE_CHECKING:
    import tokenizers

NEW_TOKENS = 256  # the harness's default for a task without a limit; at most half the model's context
# Resamples of the bootstrap, for metrics whose standard error has no formula. The harness's 100,000 take minutes.
RESAMPLES = 1000

Request = tuple[object, list[int], list[int]]  # anything, the tokens of a context, the tokens of its continuation
Score = tuple[float, bool]  # log p of a continuation, and whether all its tokens are those of the highest logits


def evaluate_tasks(
    model: TemplateLM, names: Sequence[str], include_path: Path | None = None, **options: object
) -> dict[str, Any]:
    """Run tasks, groups or tags on a model and return the library's results.

    Task files in the folder `include_path` may run code. `options` are further arguments of `simple_evaluate`.

    Raises:
      ConfigError: a task is unknown or not supported, or its data is missing.
    """
    expected = ImportError, KeyError, OSError, ValueError, require("jinja2").TemplateError, YAMLError
    try:
        manager = TaskManager(include_path=include_path and str(include_path))
        with contextlib.redirect_stdout(sys.stderr):  # the library prints to stdout
            results: dict[str, Any] = simple_evaluate(
                model, tasks=list(names), task_manager=manager, log_samples=False, bootstrap_iters=RESAMPLES, **options
            )
        return results
    except (ConfigError, CheckpointError):
        raise
    except expected as e:
        raise ConfigError(f"lm_eval: {first_line_with_type(e)}") from e


def table_rows(results: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """Yield a row with the value and its standard error for each task or group, metric and filter."""
    for task, measures in results["results"].items():
        for key, value in measures.items():
            metric, comma, name = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                n = results["n-samples"].get(task, {}).get("effective") or measures.get("sample_len")
                yield {
                    "task": task, "metric": metric, "filter": name, "value": _number(value),
                    "stderr": _number(measures.get(f"{metric}_stderr,{name}")), "n": n,
                    "num_fewshot": results["n-shot"].get(task),
                }  # fmt: skip


def _number(value: object) -> float | None:
    """Return a finite number as a float, and None for anything else."""
    return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None


@functools.partial(jax.jit, static_argnums=0)
def score(model: LM, params: Params, tokens: Int[Array, "B T"]) -> tuple[Float[Array, "B T-1"], Bool[Array, "B T-1"]]:
    """Return log p of each token after the first of its row, and whether it is the token of the highest logit."""
    _, out = model.apply({"params": params}, tokens[:, :-1])
    unembed_position = functools.partial(unembed, kernel=head_kernel(params))
    return target_scores(unembed_position, out["pre_logits"], tokens[:, 1:])


def read_generation_options(options: Mapping[str, object], context: int) -> tuple[Options, list[str]]:
    """Return the options and the stop strings of a request's `generation_kwargs`, for a model with this context.

    Raises:
      ConfigError: an unsupported option, a value out of its range, or a number of new tokens that leaves no room for a
        prompt.
    """
    given = dict(normalize_gen_kwargs(dict(options), min(NEW_TOKENS, context // 2)))
    until, max_tokens = [text for text in given.pop("until") if text], int(given.pop("max_gen_toks"))
    sampled, temperature = given.pop("do_sample"), float(given.pop("temperature", 1.0))
    top_k, top_p = int(given.pop("top_k", 0) or 0), float(given.pop("top_p", 1.0) or 1.0)
    if given and given != {"num_beams": 1}:
        raise ConfigError(f"a task's generation_kwargs have {given}, which is not supported")
    sampling = Sampling(temperature if sampled else 0.0, top_k, top_p)
    sampling.check()
    if not 1 <= max_tokens < context:
        raise ConfigError(f"a task asks for {max_tokens} new tokens; the model's context is {context} with the prompt")
    return Options(max_tokens, sampling), until


def open_as_transformers(path: str) -> tuple[tokenizers.Tokenizer, int | None, int | None]:
    """Open a tokenizer.json with its template, and with special tokens in texts, unless a file beside it forbids them.

    Returns:
      The tokenizer, the token that begins texts and the one that ends them; None if it has none.
    """
    opened = require("tokenizers").Tokenizer.from_file(path)
    opened.no_truncation()
    opened.no_padding()
    beside: Json = {}
    for file in map(Path(path).with_name, ("tokenizer_config.json", "special_tokens_map.json")):
        beside |= read_json(file) if file.is_file() else {}
    opened.encode_special_tokens = bool(beside.get("split_special_tokens"))
    named = [beside.get(name) for name in ("bos_token", "eos_token")]
    texts = [token.get("content") if isinstance(token, dict) else token for token in named]
    begin, end = [opened.token_to_id(text) if text else None for text in texts]
    template: list[int] = opened.encode("").ids
    return opened, template[0] if begin is None and template else begin, end


class HarnessModel(TemplateLM):
    """Adapter that answers the three kinds of requests of lm-evaluation-harness with a language model.

    Requests are processed in order of decreasing length, so that a batch that does not fit in memory fails first.
    Results are in the order of the requests.

    Args:
      model: the language model.
      tokenizer: the tokenizer, if not the model's own.
      batch_size: rounded up to a multiple of the number of devices, which share a batch.

    Raises:
      ConfigError: there is no token with which the harness begins a text.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer | None = None, batch_size: int = 8):
        super().__init__()
        self.net, self.text, self.max_length = model.module, tokenizer or model.tokenizer, model.module.context
        self.file, begin, end = None, None, None
        if model.has_weights and isinstance(self.text, FileTokenizer):
            self.file, begin, end = open_as_transformers(self.text.path)
        ends = (end, end_of_text(model.module, self.text), *model.end_tokens)
        self.ends = [token for token in ends if token is not None]
        self.begins = self.ends if begin is None else [begin]
        if not self.begins:
            raise ConfigError("the tokenizer has no end-of-text token, with which the harness begins a text")
        self.end_text = self.file.id_to_token(self.ends[0]) if self.file and self.ends else None
        self.mesh = data_mesh()
        self.batch_size = -(-batch_size // self.mesh.size) * self.mesh.size
        self.params = jax.device_put(cast_params(model.module, model.params), replicated(self.mesh))

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, or the one that begins it if there is none."""
        return (self.ends or self.begins)[0]

    @property
    def prefix_token_id(self) -> int:
        """The token after which the first one of a text is scored."""
        return self.begins[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: object) -> list[int]:
        """Return the tokens of a text, by default with those of a template unless the text begins with its first."""
        if self.file is None:
            return list(self.text.encode(string))
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.file.id_to_token(self.prefix_token_id) or "")
        return list(self.file.encode(string, add_special_tokens=add_special_tokens).ids)

    def _loglikelihood_tokens(self, requests: Sequence[Request], **options: object) -> list[Score]:
        """Score the continuation of each request, given as many tokens before it as the model's context holds.

        Raises:
          ConfigError: a continuation is longer than the context.
          CheckpointError: the model's logits are not finite.
        """
        rows = [((context + scored)[-(self.max_length + 1) :], len(scored)) for _, context, scored in requests]
        if (longest := max((scored for _, scored in rows), default=0)) > self.max_length:
            raise ConfigError(f"a continuation of {longest} tokens exceeds the model's context of {self.max_length}")
        order = Collator(rows, lambda row: -len(row[0]))
        results: list[Score] = []
        progress = Progress("loglikelihood", len(rows))
        for part in order.get_batched(n=self.batch_size):
            results += self._score(part)
            progress.show(len(results))
        return list(order.get_original(results))

    def _score(self, rows: Sequence[tuple[list[int], int]]) -> list[Score]:
        """Score the end of each row: (tokens, number of tokens to score). Raise CheckpointError if not finite."""
        length = round_up(max(len(row) for row, _ in rows), 64)  # few lengths, for few compiled programs
        tokens = np.zeros((self.batch_size, min(length, self.max_length) + 1), np.int32)
        for padded, (row, _) in zip(tokens, rows, strict=False):
            padded[: len(row)] = row
        batch = put_batch({"tokens": tokens}, self.mesh, self.batch_size)
        with jax.set_mesh(self.mesh):  # the kernels need it
            log_p, greedy = jax.device_get(score(self.net, self.params, batch["tokens"]))
        found = []
        for i, (row, scored) in enumerate(rows):
            end = slice(len(row) - 1 - scored, len(row) - 1)
            found.append((float(log_p[i, end].sum(dtype=np.float64)), bool(greedy[i, end].all())))
        if not np.isfinite([total for total, _ in found]).all():
            raise CheckpointError(f"the model's logits are {NOT_FINITE}")
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the sum of log p over all tokens of each text, the first one after `prefix_token_id`.

        A text is scored in windows of the model's context, and every token is scored once. The last window includes
        preceding tokens up to the length of the context.
        """
        windows: list[tuple[int, list[int], list[int]]] = []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            found = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            windows += [(i, *make_disjoint_window(window)) for window in found]
        totals = [0.0] * len(requests)
        for (i, _, _), (log_p, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += log_p
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue the context of each request until a stop string, an end-of-text token or the maximum length.

        A prompt that leaves too little room for the new tokens is truncated on the left. The sampled tokens of a
        request depend on its index and not on its batch.

        Raises:
          ConfigError: the options of a request are not supported, or do not fit the model.
          CheckpointError: the model's logits are not finite.
        """
        rows = [(self.tok_encode(request.args[0]), i, request.args[1]) for i, request in enumerate(requests)]
        order = Collator(rows, lambda row: -len(row[0]), lambda row: row[2], "gen_kwargs")
        texts: list[str] = []
        progress = Progress("generation", len(rows))
        for part in order.get_batched(n=self.batch_size):
            prompts, numbers, kwargs = zip(*part, strict=True)
            texts += self._continue(prompts, numbers, *read_generation_options(kwargs[0], self.max_length))
            progress.show(len(texts))
        return list(order.get_original(texts))

    def _continue(
        self, prompts: Sequence[list[int]], numbers: Sequence[int], options: Options, until: list[str]
    ) -> list[str]:
        """Return the text generated after each prompt, up to a string `until`; `numbers` seed the prompts' sampling."""
        room, known = self.max_length - options.max_tokens, min(self.text.vocab_size, self.net.vocab_size)
        options = options._replace(stop=self.ends, begin=self.prefix_token_id, vocab_size=known)
        until = handle_stop_sequences(until, self.end_text)
        reach = max((len(text.encode()) for text in until), default=1)  # the most tokens that a stop string consists of
        found: list[list[int]] = [[] for _ in prompts]
        running = set(range(len(prompts)))
        for step in generate(self.net, self.params, [tokens[-room:] for tokens in prompts], options, numbers):
            for i in list(running):
                if (token := step[i]) is not None:
                    found[i].append(token)
                latest = self.text.decode(found[i][-reach:])
                if token is None or any(text in latest for text in until):
                    running.remove(i)
            if not running:
                break
        return [postprocess_generated_text(self.text.decode(tokens), until, None) for tokens in found]
