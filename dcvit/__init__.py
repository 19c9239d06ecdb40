"""Vision transformers and language models with Dynamically Composable Multi-Head Attention, in JAX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcvit.training.loaded import LoadedModel

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(source: str | Path, *, config: str | None = None, sharding: str | None = None) -> LoadedModel:
    """Load a trained model, such as `dcvit.load("runs/W").predict("image.png")`; see `dcvit.training.loaded.load`."""
    from dcvit.training import loaded  # late: `import dcvit` needs no library

    return loaded.load(source, config=config, sharding=sharding)
