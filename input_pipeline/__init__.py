"""Bytes to numpy batches: deterministic, resumable from any step. Knows nothing of jax or of the models.

A kind of data is a module here with a class `Source`: examples by index, and their number. What a batch holds is
a function of (source, preprocessing, seed, step) and nothing else. What reads is told by `working`, which examples
make a batch by `batch_ids`; an `InputError` says what is wrong with data, a `ReadingError` what it is not to blame for.
"""

from input_pipeline.errors import InputError, MissingDataError, ReadingError
from input_pipeline.loader import Corrupt, batch_ids, eval_batches, train_batches, working
from input_pipeline.preprocess.builder import Preprocess, ValueRange, defer_value_range
from input_pipeline.source import KINDS, Source, open_source

__all__ = [
    "KINDS", "Corrupt", "InputError", "MissingDataError", "Preprocess", "ReadingError", "Source", "ValueRange",
    "batch_ids", "defer_value_range", "eval_batches", "open_source", "train_batches", "working",
]  # fmt: skip
