"""Trackio: a local database, or a Space of Hugging Face."""

from __future__ import annotations

import secrets

from dcvit.runs.tracking import Options, Row, TrackedRun, check_options, library

OWN = ("config", "resume", "settings", "embed")  # arguments of trackio.init that `Tracker` sets or that have no effect


def check(options: Options) -> None:
    """Raise ConfigError if `config.trackio` is invalid or Trackio is not installed."""
    check_options("trackio", options, library("trackio").init, OWN)


class Tracker:
    """A run of Trackio. Trackio finds a run to continue by its name, which therefore ends in random digits."""

    def __init__(self, run: TrackedRun, options: Options):
        """Start or continue; see `dcvit.runs.tracking.Tracker`. `options` are arguments of `trackio.init`."""
        name = run.saved_id("trackio") or f"{options.get('name') or run.workdir.name}-{secrets.token_hex(4)}"
        run.save_id("trackio", name)
        own = {"name": name, "config": dict(run.config), "resume": "allow", "embed": False}
        self.run = library("trackio").init(**{**options, **own})
        self.last_step: int = self.run._next_step - 1  # no public function returns it for a run on a server

    def write(self, step: int, row: Row) -> None:
        """Send a row."""
        self.run.log(dict(row), step=step)

    def close(self, *, failed: bool) -> None:
        """End the run; Trackio does not record if it failed."""
        self.run.finish()
