"""Tokenizers of language models: that of the training data, or the one beside their weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ml_collections import ConfigDict

from dcvit.config.keys import OWN_TOKENIZER
from dcvit.config.values import replaced
from dcvit.errors import ConfigError
from dcvit.hub.open import TOKENIZER, Opened
from input_pipeline import InputError, MissingDataError
from input_pipeline.text.megatron import find_prefix, read_description
from input_pipeline.text.synthetic import WORDS
from input_pipeline.text.tokenizer import END_OF_TEXT, FileTokenizer, Tokenizer, WordTokenizer, open_tokenizer


@contextlib.contextmanager
def with_tokenizer(config: ConfigDict, tokenizer: str | Path | None) -> Iterator[ConfigDict]:
    """Context manager: the config, with `OWN_TOKENIZER` replaced by a temporary file if `tokenizer` is its content."""
    if not isinstance(tokenizer, str):
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / TOKENIZER
        file.write_text(tokenizer, encoding="utf-8")
        values = {"input": config.input.to_dict(), "evals": config.evals.to_dict()}
        for holder in (values["input"], *values["evals"].values()):
            data = holder.get("data") if isinstance(holder, dict) else None
            if isinstance(data, dict) and data.get("tokenizer") == OWN_TOKENIZER:
                holder["data"] = {**data, "tokenizer": str(file)}
        yield replaced(config, **{key: ConfigDict(value) for key, value in values.items()})


def open_tokenizer_of(opened: Opened, path: str | None = None) -> Tokenizer:
    """Open the tokenizer at `path`, or else that of a language model: of its training data, or beside its weights.

    Raises:
      ConfigError: the model is none of language, there is no tokenizer, or it has more tokens than the model.
    """
    if opened.config.model_name != "lm":
        raise ConfigError(f"config.model_name={opened.config.model_name!r}: this needs a language model, 'lm'")
    if opened.weights:
        if (file := path or opened.tokenizer) is None:
            raise ConfigError("the weights have no tokenizer.json beside them: give --tokenizer, a tokenizer.json")
        found = open_tokenizer(str(file), None)
    else:
        with with_tokenizer(opened.config, opened.tokenizer) as config:
            found = tokenizer_of(config, path)
    if opened.num_outputs and found.vocab_size > opened.num_outputs:
        raise ConfigError(f"the tokenizer has {found.vocab_size} tokens, the model {opened.num_outputs}")
    return found


def tokenizer_of(config: ConfigDict, path: str | None = None) -> Tokenizer:
    """Open the tokenizer at `path`, or else that of the training data, which may be the tokenizer of bytes.

    Raises:
      ConfigError: the training data was tokens, and no path is given.
    """
    options: Mapping[str, object] = {k: x for k, x in dict(config.input.get("data", {})).items() if x is not None}
    kind = options.get("kind")
    if kind == "megatron":
        with contextlib.suppress(MissingDataError):  # what its PREFIX.json states
            options = {**read_description(find_prefix(str(options["path"]))), **options}
    path = path or options.get("tokenizer")  # type: ignore[assignment]
    if path is None and kind == "synthetic":
        return WordTokenizer(WORDS)
    if path is None and kind in ("megatron", "input_ids") and "tokenizer" not in options:
        raise ConfigError("the training data came as tokens: give --tokenizer, a tokenizer.json")
    end_of_text = options.get("end_of_text", END_OF_TEXT)
    try:
        found = open_tokenizer(path, end_of_text if isinstance(end_of_text, str) else None)
    except InputError:
        if "end_of_text" in options:
            raise
        found = open_tokenizer(path, None)  # the tokenizer has no END_OF_TEXT, and nothing names another one
    if isinstance(found, FileTokenizer) and isinstance(end_of_text, int):  # data of tokens states the number only
        found.end_of_text = end_of_text
    return found
