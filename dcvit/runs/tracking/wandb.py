"""Weights & Biases."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dcvit.errors import ConfigError, nearest
from dcvit.runs.tracking import Options, Row, TrackedRun, check_options, library

OWN = ("id", "dir", "config", "resume", "resume_from", "fork_from")  # arguments of wandb.init that `Tracker` sets
MODES = ("online", "offline", "disabled")


def check(options: Options) -> None:
    """Raise ConfigError if `config.wandb` is invalid or W&B is not installed."""
    init = library("wandb").init
    if options.get("mode", "online") not in MODES:
        raise ConfigError(f"config.wandb.mode={options['mode']!r}; {nearest(str(options['mode']), MODES)}")
    check_options("wandb", options, init, OWN)
    if isinstance(settings := options.get("settings"), Mapping) and "api_key" in settings:
        raise ConfigError("config.wandb.settings has an api_key, which config.json would store: set WANDB_API_KEY")


class Tracker:
    """A run of W&B.

    Without a connection (`mode="offline"`), each start of a training run writes a file of its own. What earlier files
    contain is not known then: rows after the checkpoint of a resumed run are in two files.
    """

    def __init__(self, run: TrackedRun, options: Options):
        """Start or continue; see `dcvit.runs.tracking.Tracker`. `options` are arguments of `wandb.init`."""
        saved = run.saved_id("wandb")
        identifier = saved or secrets.token_hex(4)
        run.save_id("wandb", identifier)
        given = options.get("settings")
        settings = {"console": "off", "reinit": "create_new", **(given if isinstance(given, Mapping) else {})}
        folder = run.workdir if isinstance(run.workdir, Path) else tempfile.mkdtemp()
        own = {"id": identifier, "dir": str(folder), "config": dict(run.config), "resume": "allow"}
        self.run = library("wandb").init(**{"name": run.workdir.name, **options, **own, "settings": settings})
        known = self.run.step - 1  # of the server; 0 - 1 if there is none
        self.last_step: int = run.resume_step if saved and self.run.offline else known

    def write(self, step: int, row: Row) -> None:
        """Send a row."""
        self.run.log(dict(row), step=step, commit=True)

    def close(self, *, failed: bool) -> None:
        """End the run, with exit code 1 if it failed."""
        self.run.finish(exit_code=int(failed))
