"""Metrics of a run: `metrics.jsonl`, `timing.jsonl`, and TensorBoard if it is installed.

`metrics.jsonl` has one row for each logged step. It contains only functions of the config and the data, so two runs of
one config write the same file; wall times are in `timing.jsonl`. The field `crc32` of a row is the checksum of the row
and of all rows before it, so that a changed or removed row is found.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import re
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO, runtime_checkable

from dcvit.errors import MetricsError, first_line
from dcvit.runs.files import Folder, file_identity, replace

FILES = ("metrics.jsonl", "timing.jsonl")
LOG = logging.getLogger(__name__)
UPLOAD_SECONDS = 30  # between uploads of a file to an object store
SEALED = re.compile(rb'(.+), "crc32": "([0-9a-f]{8})"\}')  # a row with its checksum
Values = dict[str, Any]  # fields of a row: finite numbers and None, by name
About = Mapping[str, Any]  # description of a checkpoint


class Row(NamedTuple):
    """A row of a metrics file."""

    values: Values  # with its `step`
    checksum: str  # of this row and the rows before it


class JsonLines:
    """File with one JSON object per line. Each has a `step`, steps increase, and the last field is a checksum.

    Nothing can be appended to an object in a store. There the whole file is uploaded, at most every `UPLOAD_SECONDS`.
    """

    def __init__(self, path: Folder, *, resume_step: int | None = None):
        """Open a file for appending.

        Args:
          path: the file.
          resume_step: the step of the checkpoint that a run resumes from; later rows are removed. None removes all.
        """
        self.path = path
        self.resumed = [row for row in _read(path) if resume_step is not None and row.values["step"] <= resume_step]
        self.last_step: int = self.resumed[-1].values["step"] if self.resumed else -1
        self.count, self.checksum = len(self.resumed), self.resumed[-1].checksum if self.resumed else path.name
        text = "".join(_line(json.dumps(values), checksum) for values, checksum in self.resumed)
        replace(path, text)
        self.file: TextIO | None = path.open("a") if isinstance(path, Path) else None
        self.lock = threading.RLock()  # of an upload; the thread that handles a stop signal also uploads
        self.text, self.uploaded, self.due = text, text, time.monotonic() + UPLOAD_SECONDS

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Append a row, unless the file already has a row of this or a later step. NaN and Inf are written as null.

        Raises:
          OSError: the disk is full or unavailable; the message names the file.
        """
        if step <= self.last_step:
            return
        valid = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        row = json.dumps({"step": step, **valid})
        checksum = _checksum(row, self.checksum)
        line = _line(row, checksum)
        if self.file:
            try:
                self.file.write(line)
                self.file.flush()
            except OSError as e:
                raise OSError(e.errno, os.strerror(e.errno or 0), str(self.path)) from None
        else:
            with self.lock:
                self.text += line
                if time.monotonic() > self.due:
                    self.flush()
        self.last_step, self.count, self.checksum = step, self.count + 1, checksum

    def position(self) -> dict[str, int | str]:
        """Return the number of rows and the checksum of the last one, which a checkpoint records."""
        return {"metrics_rows": self.count, "metrics_checksum": self.checksum}

    def missing(self, about: About) -> str | None:
        """Return a message if the file, when it was opened, lacked rows that it had at the `position` in `about`."""
        rows, found = about.get("metrics_rows", 0), self.resumed
        if len(found) < rows:
            return f"{self.path}: {rows - len(found)} of the {rows} rows before the checkpoint are missing"
        if rows > 0 and found[rows - 1].checksum != about.get("metrics_checksum"):
            return f"{self.path}: the rows before the checkpoint are not those that the run has written"
        return None

    def flush(self) -> None:
        """Return when all rows are on the disk or in the store.

        Raises:
          MetricsError: the file was removed or replaced, or its folder was moved, since it was opened.
        """
        if self.file and isinstance(self.path, Path):
            os.fsync(self.file.fileno())
            if file_identity(self.path) != file_identity(self.file.fileno()):
                raise MetricsError(f"{self.path} was removed or replaced during the run; its rows are lost")
            return
        with self.lock:
            text = self.text
            if text != self.uploaded:
                replace(self.path, text)
                self.uploaded, self.due = text, time.monotonic() + UPLOAD_SECONDS

    def close(self) -> None:
        """Write remaining rows and close the file."""
        if not self.file:
            self.flush()
        with contextlib.suppress(OSError):  # `write` has raised it before
            if self.file:
                self.file.close()


def read(path: Folder) -> list[Values]:
    """Read the rows of a file, without their checksums; a missing file has none.

    A truncated last line, left by a kill, is ignored. Rows without checksums, as older versions wrote them, are read
    if the whole file has none.

    Raises:
      MetricsError: any other line that is not a JSON object of numbers with an increasing step, or was changed.
    """
    return [row.values for row in _read(path)]


def _read(path: Folder) -> list[Row]:
    rows: list[Row] = []
    *lines, rest = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    if SEALED.match(rest):  # more than the beginning of a row
        lines.append(rest)
    sealed = False
    for number, line in enumerate(lines, start=1):
        try:
            found = SEALED.fullmatch(line)
            if sealed and not found:
                raise ValueError("no checksum")
            sealed = sealed or bool(found)
            text = (found[1] + b"}" if found else line).decode()
            values = _parse(text, rows[-1].values["step"] if rows else -1)
            checksum = _checksum(text if found else json.dumps(values), rows[-1].checksum if rows else path.name)
            if found and found[2].decode() != checksum:
                raise ValueError("its checksum differs: it was changed, or a line before it was removed")
        except (ValueError, RecursionError) as e:
            raise MetricsError(
                f"{path}:{number} is damaged ({first_line(e)}); remove this line and all after it to ignore them"
            ) from None
        rows.append(Row(values, checksum))
    return rows


def _parse(text: str, previous_step: int) -> Values:
    """Return the fields of a row. Raise ValueError if they are not numbers with a step after `previous_step`."""
    values = json.loads(text)
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise ValueError("expected a JSON object with a step")
    for name, value in values.items():
        if not (value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
            raise ValueError(f"expected a finite number or null for {name!r}")
    if values["step"] <= previous_step:
        raise ValueError(f"step {values['step']} after step {previous_step}")
    return values


def _checksum(row: str, previous: str) -> str:
    """Return the CRC-32 of a row and of the checksum before it, or the name of the file, as 8 hexadecimal digits."""
    return f"{zlib.crc32((previous + row).encode()):08x}"


def _line(row: str, checksum: str) -> str:
    return f'{row[:-1]}, "crc32": "{checksum}"}}\n'


@runtime_checkable
class SummaryWriter(Protocol):
    """The part of clu's TensorBoard writer that is used here."""

    def write_scalars(self, step: int, scalars: Mapping[str, object]) -> None:
        """Write the scalars of a step."""

    def flush(self) -> None:
        """Write buffered scalars to the disk."""

    def close(self) -> None:
        """Close the writer."""


class MetricWriter:
    """Writes metrics and timings to the workdir, and metrics to TensorBoard.

    Rows after the step that a run resumes from are removed from the files. TensorBoard, which only appends, shows these
    steps twice; it is used for local workdirs only.
    """

    def __init__(self, workdir: Folder, *, resumed: About, tensorboard: bool = True):
        """Open the files of a workdir, and report rows that are missing.

        Args:
          workdir: the run's folder.
          resumed: the description of the checkpoint that a run resumes from; empty for a new run.
          tensorboard: if False, TensorBoard is not used.
        """
        self.metrics, self.timing = (JsonLines(workdir / name, resume_step=resumed.get("step")) for name in FILES)
        if missing := self.metrics.missing(resumed):
            LOG.warning(missing)
        self.tensorboard = _tensorboard(workdir) if tensorboard and isinstance(workdir, Path) else None

    def write(self, step: int, metrics: Mapping[str, object], timing: Mapping[str, float] | None = None) -> None:
        """Write the metrics and timings of a step, unless the file already has them."""
        if self.tensorboard and step > self.metrics.last_step:
            self.tensorboard.write_scalars(step, {**metrics, **(timing or {})})
        self.metrics.write(step, metrics)
        if timing:
            self.timing.write(step, timing)

    @property
    def last_step(self) -> int:
        """The last step in `metrics.jsonl`; -1 if it is empty."""
        return self.metrics.last_step

    def flush(self) -> None:
        """Return when everything written so far would survive a kill."""
        self.metrics.flush()
        self.timing.flush()
        if self.tensorboard:
            self.tensorboard.flush()

    def close(self) -> None:
        """Close all files."""
        self.metrics.close()
        self.timing.close()
        if self.tensorboard:
            self.tensorboard.close()


def _tensorboard(workdir: Folder) -> SummaryWriter | None:
    """Return clu's TensorBoard writer, or None if clu, tensorflow or tensorboard is not installed or fails to load."""
    if any(importlib.util.find_spec(name) is None for name in ("clu", "tensorflow", "tensorboard")):
        return None
    from input_pipeline.optional import tensorflow

    try:
        tensorflow()  # before clu imports it: keeps TensorFlow off the accelerators
        from clu import metric_writers
    except Exception as e:  # a broken installation, or too little memory
        LOG.warning("no events for TensorBoard: %s", first_line(e))
        return None
    writer: SummaryWriter = metric_writers.SummaryWriter(str(workdir))
    return writer
