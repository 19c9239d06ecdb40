"""Training: setup, tasks, optimizer, step, loop and hooks, resuming; `train` is a run as a call in Python.

Commands need the whole extra `train`; benchmarks of steps only the libraries of it that flax brings, too.
"""

import importlib
from typing import TYPE_CHECKING, Any

from input_pipeline.optional import FROM_FLAX, require_extra

if TYPE_CHECKING:
    from dcvit.training.run import TrainingRun, train

__all__ = ["TrainingRun", "train"]

require_extra("train", FROM_FLAX)


def __getattr__(name: str) -> Any:
    """Import `train` and `TrainingRun` when they are first used: benchmarks of steps need less."""
    if name in __all__:
        return getattr(importlib.import_module("dcvit.training.run"), name)
    raise AttributeError(f"module 'dcvit.training' has no attribute {name!r}")
