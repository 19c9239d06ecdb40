"""Data that a config names: opened, with the tokenizer of the run, and checked against its model."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.durations import Options
from dcvit.config.keys import OWN_TOKENIZER
from dcvit.config.values import replaced
from dcvit.errors import ConfigError, check_call, first_line
from dcvit.runs.files import Folder
from input_pipeline import CorruptPolicy, InputError, MissingDataError, Source, TokenSource
from input_pipeline.text.megatron_format import find_prefix, read_description
from input_pipeline.text.synthetic_tasks import WORDS
from input_pipeline.text.tokenizer import END_OF_TEXT, FileTokenizer, Tokenizer, WordTokenizer, open_tokenizer

T = TypeVar("T")
TOKENIZER = "tokenizer.json"  # file in the workdir of a run that trained its tokenizer


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


def trains_tokenizer(config: ConfigDict) -> bool:
    """Return True if the config's data has the tokenizer `OWN_TOKENIZER`, which the run trains and stores itself."""
    data = config.input.get("data")
    return isinstance(data, Mapping | ConfigDict) and data.get("tokenizer") == OWN_TOKENIZER


def stored_tokenizer(workdir: Folder) -> str:
    """Return the tokenizer.json that a run has trained and stored in its workdir.

    Raises:
      ConfigError: the file is missing or damaged.
    """
    try:
        return (workdir / TOKENIZER).read_bytes().decode()
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {workdir / TOKENIZER}, the run's tokenizer: {first_line(e)}") from None


@contextlib.contextmanager
def with_tokenizer(config: ConfigDict, tokenizer: str | None) -> Iterator[ConfigDict]:
    """Context manager: the config, with `OWN_TOKENIZER` replaced by a temporary file of `tokenizer` if it is given."""
    if tokenizer is None:
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


def require(value: T | None, key: str) -> T:
    """Return `value`, that of the config's `key`, which may also come from the data or from a workdir.

    Raises:
      ConfigError: the value is None.
    """
    if value is None:
        raise ConfigError(f"config.{key} is not known: set it, or give the data or the --workdir that determines it")
    return value


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


def image_shape(example: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    """Return the shape (height, width, channels) of a preprocessed example's image.

    With the op `patches`, whose images differ in size, it is that of the largest square image.
    """
    shape: tuple[int, ...] = example["image"].shape
    if "grid" not in example or len(shape) != 3:
        return shape
    side = math.isqrt(shape[0]) * math.isqrt(shape[1])
    return (side, side, shape[2])


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


def check_tokenizer(tokenizer: Tokenizer, outputs: int) -> None:
    """Raise ConfigError if the tokenizer has more tokens than a model has outputs."""
    if tokenizer.vocab_size > outputs:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {outputs}")
