"""Deterministic input pipeline: files to batches of numpy arrays.

A `Source` gives random access to the examples of one kind of data. `train_batches` and `eval_batches` shuffle,
preprocess and batch them. The content of a batch is a function of the source, the preprocessing string, the seed and
the step, so a stream can be resumed from any step. The package does not import JAX.

Public names other than the exceptions are imported on first use, so that `import input_pipeline` is fast.
"""

from typing import TYPE_CHECKING

from input_pipeline.errors import InputError, MissingDataError, MissingLibraryError, ReadingError

if TYPE_CHECKING:
    from input_pipeline.loader import CorruptPolicy, batch_ids, eval_batches, train_batches
    from input_pipeline.preprocess.builder import (
        Preprocess,
        ValueRange,
        after_resizing,
        defer_value_range,
        patch_sizes,
    )
    from input_pipeline.source import KINDS, Source, TokenSource, open_source
else:
    import importlib

    NAMES = {
        "loader": ("CorruptPolicy", "batch_ids", "eval_batches", "train_batches"),
        "preprocess.builder": ("Preprocess", "ValueRange", "after_resizing", "defer_value_range", "patch_sizes"),
        "source": ("KINDS", "Source", "TokenSource", "open_source"),
    }
    MODULES = {name: module for module, names in NAMES.items() for name in names}

    def __getattr__(name: str) -> object:
        """Import a public name on first use (PEP 562)."""
        if name not in MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
        globals()[name] = value
        return value


__all__ = [
    "KINDS", "CorruptPolicy", "InputError", "MissingDataError", "MissingLibraryError", "Preprocess", "ReadingError",
    "Source", "TokenSource", "ValueRange", "after_resizing", "batch_ids",
    "defer_value_range", "eval_batches", "open_source", "patch_sizes", "train_batches",
]  # fmt: skip
