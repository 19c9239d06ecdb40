"""Weights & Biases: a copy of the rows of metrics.jsonl as a W&B run, which a resumed run continues."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import logging
import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dcvit.errors import ConfigError, first_line_with_type, nearest
from dcvit.runs.files import Folder, replace

LOG = logging.getLogger(__name__)
FILE = "wandb.json"  # in the workdir: the id of the W&B run
OWN = ("id", "dir", "config", "resume")  # arguments of wandb.init that `WandbRun` sets
MODES = ("online", "offline", "disabled")


def check_wandb(options: Mapping[str, object]) -> None:
    """Raise ConfigError if `config.wandb` cannot be used: W&B is not installed, or an argument is unknown."""
    if not options:
        return
    try:
        importlib.metadata.version("wandb")  # a folder of W&B's files, also called wandb, can be imported, too
        import wandb
    except ImportError:
        raise ConfigError('config.wandb needs wandb, which is not installed: pip install "dcvit[wandb]"') from None
    known = [name for name in inspect.signature(wandb.init).parameters if name not in OWN]
    for name in options:
        if name not in known:
            raise ConfigError(f"config.wandb has no option {name!r}; {nearest(name, known)}")
    if options.get("mode", "online") not in MODES:
        raise ConfigError(f"config.wandb.mode={options['mode']!r}; {nearest(str(options['mode']), MODES)}")


class WandbRun:
    """A run of W&B. After an error of W&B, which is logged, nothing more is sent; training continues."""

    def __init__(self, workdir: Folder, options: Mapping[str, object], record: Mapping[str, object], *, resumed: bool):
        """Start the run, or continue that of the workdir.

        Args:
          workdir: the folder of the training run; W&B writes to its subfolder wandb.
          options: arguments of `wandb.init`.
          record: the config, which W&B shows.
          resumed: the training run resumes from a checkpoint.
        """
        self.run: Any = None

        def start() -> None:
            import wandb

            folder = workdir if isinstance(workdir, Path) else tempfile.mkdtemp()
            given = options.get("settings")
            settings = {"console": "off", **(given if isinstance(given, Mapping) else {})}
            arguments: dict[str, Any] = {"name": workdir.name, **options, "settings": settings}
            self.run = wandb.init(
                id=_run_id(workdir, resumed), dir=str(folder), config=dict(record), resume="allow", **arguments
            )

        self._attempt(start)

    def write(self, step: int, row: Mapping[str, object]) -> None:
        """Send the row of `step` in metrics.jsonl to W&B."""
        if self.run is not None:
            self._attempt(lambda: self.run.log(dict(row), step=step))

    def close(self, *, failed: bool) -> None:
        """End the W&B run, as failed or completed; this waits until its rows are sent."""
        if self.run is not None:
            self._attempt(lambda: self.run.finish(exit_code=int(failed)))

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as e:
            self.run = None
            LOG.warning("Weights & Biases failed, and training continues without it: %s", first_line_with_type(e))


def _run_id(workdir: Folder, resumed: bool) -> str:
    """Return the id of the W&B run: that stored in the workdir of a resumed run, or else a new one, which is stored."""
    path = workdir / FILE
    if resumed and path.is_file():
        return str(json.loads(path.read_text())["id"])
    found = secrets.token_hex(4)
    replace(path, json.dumps({"id": found}) + "\n")
    return found
