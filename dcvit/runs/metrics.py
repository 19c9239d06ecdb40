"""What a run records: `metrics.jsonl`, `timing.jsonl`, and TensorBoard where it is installed.

`metrics.jsonl` holds one row for each logged step and only what is a function of config and data, so two
runs of one config write the same file; wall times go to `timing.jsonl`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from dcvit.checkpoint.files import Folder, replace
from dcvit.errors import MetricsError

FILES = ("metrics.jsonl", "timing.jsonl")
UPLOAD_SECONDS = 30


class JsonLines:
    """A file of one JSON object a line, each with its own `step`, in rising order.

    A store cannot append to an object: there the whole file is written anew, at most every `UPLOAD_SECONDS`.
    """

    def __init__(self, path: Folder, *, resume_step: int | None = None):
        """Opens `path` to append after the row of `resume_step`; later rows, of a lost stretch, are dropped."""
        self.path = path
        self.rows = [row for row in read(path) if resume_step is not None and row["step"] <= resume_step]
        self.last_step = self.rows[-1]["step"] if self.rows else -1
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        replace(path, text)
        self.file: TextIO | None = path.open("a") if isinstance(path, Path) else None
        self.text, self.uploaded, self.due = text, text, time.monotonic() + UPLOAD_SECONDS

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a row, unless this step has one. What is not finite is null, which JSON can say.

        Raises:
          OSError: the disk is full, or gone; with the path.
        """
        if step <= self.last_step:
            return
        said = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        line = json.dumps({"step": step, **said}) + "\n"
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
        """What was written is on the disk, or in the store, when this returns."""
        if self.file:
            os.fsync(self.file.fileno())
        elif self.text != self.uploaded:
            replace(self.path, self.text)
            self.uploaded, self.due = self.text, time.monotonic() + UPLOAD_SECONDS

    def close(self) -> None:
        if not self.file:
            self.flush()
        with contextlib.suppress(OSError):  # what could not be written was said by `write`
            if self.file:
                self.file.close()


def read(path: Folder) -> list[dict[str, Any]]:
    """The rows of a file; a last line cut short by a kill is left out; no file, no rows.

    Raises:
      MetricsError: any other line that is no JSON object with a step.
    """
    rows = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"] + 0
        except (ValueError, TypeError, KeyError, IndexError):
            raise MetricsError(f"{path}:{number} is damaged: expected a JSON object with a step") from None
        rows.append(row)
    return rows


class MetricWriter:
    """Writes a run's metrics and timings to its workdir, and the metrics to TensorBoard too.

    Steps of a stretch that a kill lost are dropped from the files; TensorBoard, append-only, shows them twice, and is
    written to disks only.
    """

    def __init__(self, workdir: Folder, *, resume_step: int | None = None, tensorboard: bool = True):
        self.metrics, self.timing = (JsonLines(workdir / name, resume_step=resume_step) for name in FILES)
        self.tensorboard = _tensorboard(workdir) if tensorboard and isinstance(workdir, Path) else None

    def write(self, step: int, metrics: Mapping[str, Any], timing: Mapping[str, float] | None = None) -> None:
        """Records one step; a step that stands in the file already is not written again."""
        if self.tensorboard and step > self.metrics.last_step:
            self.tensorboard.write_scalars(step, {**metrics, **(timing or {})})
        self.metrics.write(step, metrics)
        if timing:
            self.timing.write(step, timing)

    @property
    def last_step(self) -> int:
        """The newest step that stands in the file; -1 where none does."""
        return self.metrics.last_step

    def flush(self) -> None:
        """What was recorded up to now is where it will be found after a kill."""
        self.metrics.flush()
        self.timing.flush()
        if self.tensorboard:
            self.tensorboard.flush()

    def close(self) -> None:
        self.metrics.close()
        self.timing.close()
        if self.tensorboard:
            self.tensorboard.close()


def _tensorboard(workdir: Folder) -> Any:
    """clu's TensorBoard writer, or None where clu, tensorflow or tensorboard is absent."""
    if any(importlib.util.find_spec(name) is None for name in ("clu", "tensorflow", "tensorboard")):
        return None
    from input_pipeline.optional import tensorflow

    tensorflow()  # before clu uses it: kept off the accelerators
    from clu import metric_writers

    return metric_writers.SummaryWriter(str(workdir))
