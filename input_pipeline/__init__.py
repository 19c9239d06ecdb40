"""Bytes to numpy batches: deterministic, resumable from any step. Knows nothing of jax or of the models.

A kind of data is a module here with a class `Source`: examples by index, and their number. What a batch holds is
a function of (source, preprocessing, seed, step) and nothing else.
"""

from input_pipeline.batches import Corrupt, eval_batches, train_batches
from input_pipeline.errors import InputError, MissingDataError
from input_pipeline.pp import Preprocess, ValueRange, defer_value_range
from input_pipeline.source import KINDS, Source, open_source

__all__ = [
    "KINDS", "Corrupt", "InputError", "MissingDataError", "Preprocess", "Source", "ValueRange", "defer_value_range",
    "eval_batches", "open_source", "train_batches",
]  # fmt: skip
