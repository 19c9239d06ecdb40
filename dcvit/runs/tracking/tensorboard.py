"""TensorBoard: a file of events in the workdir, if TensorBoard is installed and the workdir is local."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from pathlib import Path
from typing import Any

from dcvit.runs.tracking import Row, TrackedRun

PATTERN = "events.out.tfevents.*"  # names by which TensorBoard finds files of events


class Tracker:
    """A file of events. TensorBoard ignores later steps in the files of the same run before it was resumed.

    TensorFlow is not imported.
    """

    def __init__(self, run: TrackedRun, options: bool):
        """Start or continue; see `dcvit.runs.tracking.Tracker`. Do nothing for a workdir in a store."""
        self.writer: Any = None
        self.last_step = -1
        if not isinstance(run.workdir, Path) or importlib.util.find_spec("tensorboard") is None:
            return
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        if run.resume_step and any(run.workdir.glob(PATTERN)):
            self.last_step = run.resume_step
        self.event, self.summary = event_pb2, summary_pb2
        name = f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"  # TensorBoard reads files in order of names
        self.writer = RecordWriter((run.workdir / PATTERN.replace("*", name)).open("xb", buffering=0))
        self._add(file_version="brain.Event:2")
        self._add(step=self.last_step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, row: Row) -> None:
        """Add a row."""
        if self.writer:
            values = [self.summary.Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
            self._add(step=step, summary=self.summary.Summary(value=values))

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        if self.writer:
            self.writer.close()

    def _add(self, **fields: object) -> None:
        self.writer.write(self.event.Event(wall_time=time.time(), **fields).SerializeToString())
