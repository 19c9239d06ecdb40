"""Trackers of experiments: copies of the rows of metrics in TensorBoard and Weights & Biases."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import os
import secrets
import socket
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dcvit.errors import ConfigError, check_call, first_line_with_type, nearest
from dcvit.runs.files import Folder, replace
from input_pipeline.optional import require

LOG = logging.getLogger(__name__)
NAMES = ("tensorboard", "wandb")  # keys of a config that enable a tracker
OWN = ("id", "dir", "config", "resume", "resume_from", "fork_from")  # arguments of wandb.init that `WandB` sets
MODES = ("online", "offline", "disabled")  # of W&B

Options = Mapping[str, Any]  # arguments of `wandb.init`
Row = Mapping[str, Any]  # numbers by name; they may be NaN or infinite


class TrackedRun(NamedTuple):
    """A training run that trackers record.

    Fields:
      workdir: the folder of the run.
      config: the config, which W&B shows.
      resume_step: the step of the checkpoint that the run resumes from; 0 for a new run.
    """

    workdir: Folder
    config: Options
    resume_step: int


class Tracker(Protocol):
    """Interface of a tracker, whose methods may raise the errors of its library."""

    def write(self, step: int, row: Row) -> None:
        """Add the row of a step. After a kill, the tracker may have a row of this step already."""

    def close(self, *, failed: bool) -> None:
        """End the run of the tracker, as failed or completed, when all rows are sent."""


class Trackers:
    """The trackers of a run. An error of one is logged, and training continues without it."""

    def __init__(self, trackers: Options, run: TrackedRun):
        """Start trackers; each key of `trackers` is in `NAMES`, and its value is that of the config key."""
        self.active: dict[str, Tracker] = {}
        for name, options in trackers.items():
            self._attempt(name, functools.partial(self._start, name, options, run))

    def write(self, step: int, row: Row) -> None:
        """Send the row of a step to all trackers."""
        for name, tracker in list(self.active.items()):
            self._attempt(name, functools.partial(tracker.write, step, row))

    def close(self, *, failed: bool) -> None:
        """End all runs of trackers, as failed or completed; this waits until their rows are sent."""
        for name, tracker in list(self.active.items()):
            self._attempt(name, functools.partial(tracker.close, failed=failed))
        self.active = {}

    def _start(self, name: str, options: Any, run: TrackedRun) -> None:
        if name == "wandb":
            self.active[name] = WandB(run, options)
        elif isinstance(run.workdir, Path) and importlib.util.find_spec("tensorboard"):
            self.active[name] = TensorBoard(run.workdir, run.resume_step)

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as e:  # of any library
            if tracker := self.active.pop(name, None):
                with contextlib.suppress(Exception):  # otherwise the next run of this process would continue it
                    tracker.close(failed=True)
            LOG.warning("%s failed, and training continues without it: %s", name, first_line_with_type(e))


class TensorBoard:
    """A file of events in a local workdir, written without TensorFlow, which clu's writer would import.

    TensorBoard ignores later steps in the files of the same run before it was resumed.
    """

    def __init__(self, workdir: Path, resume_step: int):
        """Start a file."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.event, self.summary = event_pb2, summary_pb2
        name = f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"  # TensorBoard reads files in order of names
        self.writer = RecordWriter((workdir / f"events.out.tfevents.{name}").open("xb", buffering=0))
        first = resume_step + 1 if resume_step else 0
        self._add(file_version="brain.Event:2")
        self._add(step=first, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, row: Row) -> None:
        """Add a row."""
        values = [self.summary.Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._add(step=step, summary=self.summary.Summary(value=values))

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        self.writer.close()

    def _add(self, **fields: object) -> None:
        self.writer.write(self.event.Event(wall_time=time.time(), **fields).SerializeToString())


class WandB:
    """A run of W&B, whose id is in the workdir's `wandb.json`: a resumed run continues it.

    Without a connection (`mode="offline"`), each start of a training run writes a file of its own.
    """

    def __init__(self, run: TrackedRun, options: Options):
        """Start or continue; `options` are arguments of `wandb.init`."""
        path = run.workdir / "wandb.json"
        is_known = run.resume_step and path.is_file()
        identifier = str(json.loads(path.read_text())["id"]) if is_known else secrets.token_hex(4)
        replace(path, json.dumps({"id": identifier}) + "\n")
        settings = {"console": "off", "reinit": "create_new", **(options.get("settings") or {})}
        folder = run.workdir if isinstance(run.workdir, Path) else tempfile.mkdtemp()
        own = {"id": identifier, "dir": str(folder), "config": dict(run.config), "resume": "allow"}
        self.run = _wandb().init(**{"name": run.workdir.name, **options, **own, "settings": settings})
        self.next_step: int = self.run.step  # of the server; 0 without a connection

    def write(self, step: int, row: Row) -> None:
        """Send a row, unless the server has it."""
        if step >= self.next_step:
            self.run.log(dict(row), step=step, commit=True)

    def close(self, *, failed: bool) -> None:
        """End the run, with exit code 1 if it failed."""
        self.run.finish(exit_code=int(failed))


def check(trackers: Options) -> None:
    """Check the options of trackers, by names in `NAMES`.

    Raises:
      ConfigError: an option is unknown or of the wrong type, or would store a key.
      MissingLibraryError: W&B is not installed.
    """
    if "wandb" not in trackers:
        return
    options, init = trackers["wandb"], _wandb().init
    if options.get("mode", "online") not in MODES:
        raise ConfigError(f"config.wandb.mode={options['mode']!r}; {nearest(str(options['mode']), MODES)}")
    known = [argument for argument in inspect.signature(init).parameters if argument not in OWN]
    for option in options:
        if option not in known:
            raise ConfigError(f"config.wandb has no option {option!r}; {nearest(option, known)}")
    check_call(init, options, "config.wandb")
    if "api_key" in (options.get("settings") or {}):
        raise ConfigError("config.wandb.settings has an api_key, which config.json would store: set WANDB_API_KEY")


def _wandb() -> types.ModuleType:
    """Return the library of W&B."""
    module = require("wandb")
    if module.__file__ is None:  # a folder of the same name, such as that of W&B's files
        raise ConfigError('config.wandb needs wandb, which is not installed: pip install "dcvit[wandb]"')
    return module
