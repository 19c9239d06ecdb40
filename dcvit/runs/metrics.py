"""Metrics of a run: `metrics.jsonl`, `timing.jsonl`, and copies in trackers of experiments.

`metrics.jsonl` has one row for each logged step. It contains only functions of the config and the data, so two runs of
one config write the same file; wall times are in `timing.jsonl`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from dcvit.errors import MetricsError, first_line
from dcvit.runs.files import Folder, file_identity, replace
from dcvit.runs.trackers import Trackers

FILES = ("metrics.jsonl", "timing.jsonl")
UPLOAD_SECONDS = 30  # between uploads of a file to an object store
Values = dict[str, Any]  # fields of a row: finite numbers and None, by name
About = Mapping[str, Any]  # description of a checkpoint


class JsonLines:
    """File with one JSON object per line. Each has a `step`, and steps increase.

    An object in a store cannot be appended to. There the whole file is uploaded, at most every `UPLOAD_SECONDS`.
    """

    def __init__(self, path: Folder, *, resume_step: int | None = None):
        """Open a file for appending.

        Args:
          path: the file.
          resume_step: the step of the checkpoint that a run resumes from; later rows are removed, all rows for None.
        """
        self.path = path
        self.resumed = [row for row in read(path) if resume_step is not None and row["step"] <= resume_step]
        self.last_step: int = self.resumed[-1]["step"] if self.resumed else -1
        text = "".join(json.dumps(row) + "\n" for row in self.resumed)
        replace(path, text)
        self.file: TextIO | None = path.open("a") if isinstance(path, Path) else None
        self.text, self.uploaded, self.due = text, text, time.monotonic() + UPLOAD_SECONDS

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Append a row, unless the file already has a row of this or a later step. NaN and Inf are written as null.

        Raises:
          OSError: the disk is full or unavailable; the message names the file.
        """
        if step <= self.last_step:
            return
        valid = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        line = json.dumps({"step": step, **valid}) + "\n"
        if self.file:
            try:
                self.file.write(line)
                self.file.flush()
            except OSError as e:
                raise OSError(e.errno, os.strerror(e.errno or 0), str(self.path)) from None
        else:
            self.text += line
            if time.monotonic() > self.due:
                self.flush()
        self.last_step = step

    def flush(self) -> None:
        """Return when all rows are on the disk or in the store.

        Raises:
          MetricsError: the file was removed or replaced, or its folder was moved, since it was opened.
        """
        if self.file and isinstance(self.path, Path):
            os.fsync(self.file.fileno())
            if file_identity(self.path) != file_identity(self.file.fileno()):
                raise MetricsError(f"{self.path} was removed or replaced during the run; its rows are lost")
        elif self.text != self.uploaded:
            replace(self.path, self.text)
            self.uploaded, self.due = self.text, time.monotonic() + UPLOAD_SECONDS

    def close(self) -> None:
        """Write remaining rows and close the file."""
        if not self.file:
            self.flush()
        with contextlib.suppress(OSError):  # `write` has raised it before
            if self.file:
                self.file.close()


def read(path: Folder) -> list[Values]:
    """Return the rows of a file; a missing file has none. A truncated last line, left by a kill, is ignored.

    Raises:
      MetricsError: any other line that is not a JSON object of numbers with an increasing step.
    """
    rows: list[Values] = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_parse(line.decode(), rows[-1]["step"] if rows else -1))
        except (ValueError, RecursionError) as e:
            raise MetricsError(
                f"{path}:{number} is damaged ({first_line(e)}); remove this line and all after it to ignore them"
            ) from None
    return rows


def _parse(text: str, previous_step: int) -> Values:
    """Return the fields of a row. Raise ValueError if they are not numbers with a step after `previous_step`."""
    values = json.loads(text)
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise ValueError("expected a JSON object with a step")
    for name, value in values.items():
        if not (value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)):
            raise ValueError(f"expected a finite number or null for {name!r}")
    if values["step"] <= previous_step:
        raise ValueError(f"step {values['step']} after step {previous_step}")
    return values


class MetricWriter:
    """Writes metrics and timings to the workdir, and both to trackers.

    Rows after the step that a run resumes from are removed from the files.
    """

    def __init__(
        self,
        workdir: Folder,
        *,
        resumed: About,
        trackers: Mapping[str, object] | None = None,
        config: About | None = None,
    ):
        """Open the files of a workdir, and start trackers.

        Args:
          workdir: the run's folder.
          resumed: the description of the checkpoint that a run resumes from; empty for a new run.
          trackers: see `dcvit.runs.trackers.Trackers`.
          config: the config, which trackers show.
        """
        self.metrics, self.timing = (JsonLines(workdir / name, resume_step=resumed.get("step")) for name in FILES)
        self.trackers = Trackers(trackers or {}, workdir, config or {}, resumed.get("step", 0))

    def write(self, step: int, metrics: Mapping[str, object], timing: Mapping[str, float] | None = None) -> None:
        """Write the metrics and timings of a step, unless the files already have rows of it or of a later step."""
        new = step > self.metrics.last_step
        self.metrics.write(step, metrics)
        if timing:
            self.timing.write(step, timing)
        if new:
            self.trackers.write(step, {**metrics, **(timing or {})})

    def flush(self) -> None:
        """Return when everything written so far would survive a kill."""
        self.metrics.flush()
        self.timing.flush()

    def close(self) -> None:
        """Close all files, and the trackers of a run that failed before it closed them."""
        self.metrics.close()
        self.timing.close()
        self.trackers.close(failed=True)
