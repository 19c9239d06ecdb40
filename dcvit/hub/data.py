"""Data that a config names: opened, with the tokenizer of the run, and checked against its model."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.durations import Options
from dcvit.config.keys import OWN_TOKENIZER
from dcvit.config.values import replaced
from dcvit.errors import ConfigError, check_call
from dcvit.hub.open import TOKENIZER, Opened
from dcvit.models.packed_images import image_shape
from input_pipeline import CorruptPolicy, InputError, MissingDataError, Source, TokenSource
from input_pipeline.text.megatron_format import find_prefix, read_description
from input_pipeline.text.synthetic_tasks import WORDS
from input_pipeline.text.tokenizer import END_OF_TEXT, FileTokenizer, Tokenizer, WordTokenizer, open_tokenizer


def open_source(data: Options, what: str) -> Source:
    """Return the source of a config's `data`, opened; `what` is the name of `data` in error messages."""
    check_data(data, what)
    return input_pipeline.open_source(**dict(data))


def corrupt_hint(what: str) -> str:
    """Return the end of messages about damaged examples of the input `what`, such as "config.input"."""
    return f"; --{what}.corrupt=skip skips damaged examples, and `dcvit check-data` lists them"


def check_data(data: object, what: str) -> None:
    """Raise ConfigError if `data` has no known `kind`, such as "text", or an option of all kinds has a wrong type."""
    if not isinstance(data, Mapping | ConfigDict) or not isinstance(data.get("kind"), str):
        raise ConfigError(f"{what}.kind names the kind of data; known: {', '.join(input_pipeline.KINDS)}")
    common = {key: data[key] for key in ("kind", "part", "limit", "cache") if key in data}
    check_call(input_pipeline.open_source, common, what)


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


def text_example(source: Source, config: ConfigDict, what: str) -> jax.ShapeDtypeStruct:
    """Return the shape of one row of tokens as a model input, (1, T) int32.

    Raises:
      ConfigError: the source holds no text, or more tokens than the model's vocabulary.
    """
    text = as_text(source, config, what)
    if text.vocab_size is None:
        raise ConfigError(f"{what} does not state its vocabulary size: give {what}.vocab_size")
    if config.vocab_size is not None and text.vocab_size > config.vocab_size:
        raise ConfigError(f"{what} has {text.vocab_size} tokens, config.vocab_size={config.vocab_size}")
    return jax.ShapeDtypeStruct((1, text.context), np.int32)


def as_text(source: Source, config: ConfigDict, what: str) -> TokenSource:
    """Return the source. Raise ConfigError if it holds no text."""
    if not isinstance(source, TokenSource):
        raise ConfigError(f"{what} holds no text, which config.model_name={config.model_name!r} reads")
    return source


def image_example(
    source: Source,
    pp: str,
    config: ConfigDict,
    what: str,
    corrupt: CorruptPolicy,
    target: tuple[str, int] = ("labels", 1),
) -> jax.ShapeDtypeStruct:
    """Return the shape of one preprocessed image as a model input, (1, height, width, channels) float32.

    See `image_shape` for images of different sizes.

    Args:
      source: the images; the first readable one is preprocessed.
      pp: the preprocessing string.
      config: the config, for its number of classes.
      what: the name of `pp` in error messages.
      corrupt: the policy for damaged examples.
      target: name and rank of the label: ("labels", 1) for a vector over the classes, ("label", 0) for an index.

    Raises:
      ConfigError: `pp` does not yield a float32 image and the target.
    """
    batches = input_pipeline.eval_batches(source, pp, 1, corrupt=corrupt, threads=0)
    example = next(({k: v[0] for k, v in batch.items()} for batch in batches if batch["_mask"][0]), {})
    for key, ndim in (("image", 3), target):
        if key not in example or example[key].ndim != ndim:
            raise ConfigError(
                f"{what} yields {', '.join(k for k in example if k != '_mask')}; expected image (height, width, "
                f"channels) and {target[0]}"
            )
    if example["image"].dtype != np.float32:
        raise ConfigError(f"{what} yields {example['image'].dtype} images; add value_range(-1, 1)")
    classes = len(example["labels"]) if target[1] else config.num_classes
    if classes != config.num_classes:
        raise ConfigError(f"{what} yields {classes} classes, config.num_classes={config.num_classes}")
    if target[1] and len(source.class_names or ()) > classes:
        raise ConfigError(f"{what}: the data has {len(source.class_names or ())} classes, config.num_classes={classes}")
    return jax.ShapeDtypeStruct((1, *image_shape(example)), np.float32)


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
    options = _text_options(config)
    path = path or options.get("tokenizer")
    if path is None and options.get("kind") == "synthetic":
        return WordTokenizer(WORDS)
    if path is None and options.get("kind") in ("megatron", "input_ids") and "tokenizer" not in options:
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


def _text_options(config: ConfigDict) -> Mapping[str, Any]:
    """Return the options of the training data; for Megatron files, missing ones come from their PREFIX.json."""
    options = {key: value for key, value in dict(config.input.get("data", {})).items() if value is not None}
    stated: Mapping[str, object] = {}
    if options.get("kind") == "megatron":
        with contextlib.suppress(MissingDataError):
            stated = read_description(find_prefix(options["path"]))
    return {**stated, **options}
