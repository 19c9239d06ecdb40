"""Bytes to numpy batches: deterministic, resumable from any step. Knows nothing of jax or of the models.

A data source is a module here with a class `Source`: examples by index, and their number. What a batch
holds is a function of (source, preprocessing, seed, step) and nothing else.
"""

import importlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from input_pipeline.errors import InputError, check_arguments, nearest
from input_pipeline.order import example_at, example_rng
from input_pipeline.pp import Preprocess

__all__ = ["InputError", "Preprocess", "Source", "eval_batches", "open_source", "train_batches"]

KINDS = ("digits",)

Batch = dict[str, np.ndarray]


@runtime_checkable
class Source(Protocol):
    """What every kind of data offers: random access to examples, each a dict of arrays."""

    class_names: tuple[str, ...] | None

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def open_source(kind: str, **options: Any) -> Source:
    """Opens the data source of module `input_pipeline.<kind>`.

    Raises:
      InputError: an unknown kind or option, or data that is missing or unusable.
    """
    if kind not in KINDS:
        raise InputError(f"unknown kind of data {kind!r}; {nearest(kind, KINDS)}")
    source = importlib.import_module(f"input_pipeline.{kind}").Source
    check_arguments(source, (), options, f"data of kind {kind!r}")
    opened: Source = source(**options)
    if not len(opened):
        raise InputError(f"data of kind {kind!r} with {options} holds no examples")
    return opened


def train_batches(source: Source, pp: str, batch_size: int, seed: int, start_step: int = 0) -> Iterator[Batch]:
    """The endless training stream from step `start_step` on, shuffled anew in every epoch.

    An epoch's last batch is filled up from the next epoch; no example is dropped.
    """
    preprocess = Preprocess(pp)
    position = start_step * batch_size
    while True:
        examples = []
        for at in range(position, position + batch_size):
            epoch, index = example_at(at, len(source), seed)
            examples.append(_example(source, preprocess, index, example_rng(seed, epoch, index)))
        position += batch_size
        yield _stack(examples)


def eval_batches(source: Source, pp: str, batch_size: int) -> Iterator[Batch]:
    """Every example once, in order. The last batch is filled up with zeros; `_mask` is 1 for real examples."""
    preprocess = Preprocess(pp)
    for start in range(0, len(source), batch_size):
        indices = range(start, min(start + batch_size, len(source)))
        batch = _stack([_example(source, preprocess, i, example_rng(0, 0, i)) for i in indices])
        batch["_mask"] = np.ones(len(indices), np.float32)
        missing = batch_size - len(indices)
        yield {k: np.pad(v, [(0, missing)] + [(0, 0)] * (v.ndim - 1)) for k, v in batch.items()}


def _example(source: Source, preprocess: Preprocess, index: int, rng: np.random.Generator) -> dict[str, Any]:
    """One preprocessed example; an error in it names its index."""
    try:
        return preprocess(source[index], rng)
    except InputError as e:
        raise InputError(f"example {index}: {e}") from None


def _stack(examples: list[dict[str, Any]]) -> Batch:
    """A batch from examples of equal shapes."""
    batch = {}
    for key in examples[0]:
        try:
            batch[key] = np.stack([example[key] for example in examples])
        except ValueError:
            shapes = sorted({np.shape(example[key]) for example in examples})
            raise InputError(f"{key!r} has shapes {shapes} in one batch; resize it, or drop it with keep") from None
    return batch
