"""Models by name: those in the package, the folders of `dcvit/pretrained`, and those of the Hugging Face Hub.

A folder of the package holds the weights as `dcvit convert --to safetensors` writes them, the config of their run in
run.json, and a card, README.md with its figures in card.json. `scripts/pretrain.py` makes all of them.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TypeGuard

from input_pipeline import huggingface

LOG = logging.getLogger(__name__)
FOLDER = Path(__file__).parents[1] / "pretrained"
RUN = "run.json"  # the config of the run, complete


def names() -> list[str]:
    """Return the names of the pretrained models in the package."""
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{RUN}"))


def resolve(source: str) -> str:
    """Return the folder of the model of this name; any other source unchanged.

    A path with a separator, such as `./digits`, is never the name of a model of the package. A local file or folder of
    the same name is opened instead of that model, with a warning. `hf:OWNER/NAME` is downloaded.

    Raises:
      CheckpointError: see `dcvit.hub.repository.download`.
    """
    if huggingface.is_name(source):
        from dcvit.hub import repository  # late: a command imports this module before it needs weights

        return str(repository.download(source))
    if os.sep in source or source not in names():
        return source
    if Path(source).exists():
        LOG.warning("%s: the local path is opened, not the model of the package with this name", source)
        return source
    return str(FOLDER / source)


def is_pretrained(path: object) -> TypeGuard[Path]:
    """Return True for the folder of a model of the package."""
    return isinstance(path, Path) and path.absolute().parent == FOLDER and (path / RUN).is_file()


def hint(path: object) -> str:
    """Return the end of a message about a missing path: the names of the package's models, if it looks like a name."""
    return "" if os.sep in str(path) else f"; the models of the package are {', '.join(names())}"
