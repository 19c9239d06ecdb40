"""Trackers of experiments: copies of the rows of metrics in TensorBoard and Weights & Biases."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dcvit.errors import ConfigError, check_call, first_line_with_type
from dcvit.runs.files import Folder, replace
from input_pipeline.files import record
from input_pipeline.optional import require

LOG = logging.getLogger(__name__)
NAMES = ("tensorboard", "wandb")  # keys of a config that enable a tracker
OWN = ("id", "dir", "config", "resume", "resume_from", "fork_from")  # arguments of wandb.init that `WandB` sets

Options = Mapping[str, Any]  # arguments of `wandb.init`, or the config of a run
Row = Mapping[str, Any]  # numbers by name; they may be NaN or infinite


class Trackers:
    """The trackers of a run. An error of one is logged, and training continues without it."""

    def __init__(self, trackers: Options, workdir: Folder, config: Options, resume_step: int):
        """Start trackers.

        Args:
          trackers: the values of the config keys `NAMES` that enable one.
          workdir: the folder of the run.
          config: the config, which W&B shows.
          resume_step: the step of the checkpoint that the run resumes from; 0 for a new run.
        """
        self.active: dict[str, TensorBoard | WandB] = {}

        def start(name: str) -> None:
            if name == "wandb":
                self.active[name] = WandB(workdir, config, resume_step, trackers[name])
            elif isinstance(workdir, Path) and importlib.util.find_spec("tensorboard"):
                self.active[name] = TensorBoard(workdir, resume_step)

        for name in trackers:
            self._attempt(name, functools.partial(start, name))

    def write(self, step: int, row: Row) -> None:
        """Send the row of a step to all trackers. After a kill, they may have a row of this step already."""
        for name, tracker in list(self.active.items()):
            self._attempt(name, functools.partial(tracker.write, step, row))

    def close(self, *, failed: bool) -> None:
        """End all runs of trackers, as failed or completed; this waits until their rows are sent."""
        for name, tracker in list(self.active.items()):
            self._attempt(name, functools.partial(tracker.close, failed=failed))
        self.active = {}

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
        from tensorboard.compat.proto import event_pb2, summary_pb2  # tensorboard's own writer imports boto3

        self.event, self.summary = event_pb2, summary_pb2
        name = f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"  # TensorBoard reads files in order of names
        self.file = (workdir / f"events.out.tfevents.{name}").open("xb", buffering=0)
        first = resume_step + 1 if resume_step else 0
        self._add(file_version="brain.Event:2")
        self._add(step=first, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, row: Row) -> None:
        """Add a row."""
        values = [self.summary.Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._add(step=step, summary=self.summary.Summary(value=values))

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        self.file.close()

    def _add(self, **fields: object) -> None:
        self.file.write(record(self.event.Event(wall_time=time.time(), **fields).SerializeToString()))


class WandB:
    """A run of W&B, whose id is in the workdir's `wandb.json`: a resumed run continues it.

    Without a connection (`mode="offline"`), each start of a training run writes a file of its own.
    """

    def __init__(self, workdir: Folder, config: Options, resume_step: int, options: Options):
        """Start or continue; `options` are arguments of `wandb.init`."""
        path = workdir / "wandb.json"
        is_known = resume_step and path.is_file()
        identifier = str(json.loads(path.read_text())["id"]) if is_known else secrets.token_hex(4)
        replace(path, json.dumps({"id": identifier}) + "\n")
        settings = {"console": "off", "reinit": "create_new", **(options.get("settings") or {})}
        folder = workdir if isinstance(workdir, Path) else tempfile.mkdtemp()
        own = {"id": identifier, "dir": str(folder), "config": dict(config), "resume": "allow"}
        self.run = require("wandb").init(**{"name": workdir.name, **options, **own, "settings": settings})
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
      ConfigError: an option is unknown, of the wrong type or set by the run, or would store a key.
      MissingLibraryError: W&B is not installed.
    """
    if "wandb" not in trackers:
        return
    options, init = trackers["wandb"], getattr(require("wandb"), "init", None)
    if init is None:  # a folder of the same name, such as that of W&B's files
        raise ConfigError('config.wandb needs wandb, which is not installed: pip install "dcvit[wandb]"')
    if own := sorted({*OWN} & {*options}):
        raise ConfigError(f"config.wandb.{own[0]} is set by the run")
    check_call(init, options, "config.wandb")
    if "api_key" in (options.get("settings") or {}):
        raise ConfigError("config.wandb.settings has an api_key, which config.json would store: set WANDB_API_KEY")
