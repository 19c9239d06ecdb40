"""A run on the console: a live bar with ETA on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_SECONDS = 10.0  # between lines of `ByteProgress` without a terminal
LIVE_SECONDS = 0.2  # between updates of its live bar


def _bar(console: Console, counts: ProgressColumn) -> Progress:
    """Return a bar with elapsed time and ETA, which is shown only on a terminal."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), counts, TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=console, disable=not console.is_terminal,
    )  # fmt: skip


class _Lines(logging.Handler):
    """Shows each distinct message of a logger once, as a line."""

    def __init__(self, progress: RunProgress):
        super().__init__(logging.INFO)
        self.progress, self.shown = progress, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self.shown:
            self.shown.add(line)
            self.progress.line(line)


class RunProgress:
    """Use as a context manager around the training loop; `advance` at every step, `report` at logged ones.

    `rate` is the unit of speed and how many of it an example is.
    """

    def __init__(self, title: str, total: int, start: int = 0, rate: tuple[str, int] = ("img/s", 1)):
        self.rate = rate
        self.console = Console(soft_wrap=True, highlight=False)
        self.live = self.console.is_terminal
        self.total = total
        self.bar = _bar(self.console, MofNCompleteColumn())
        self.task = self.bar.add_task(title, total=total, completed=start, status="")
        self.choices, self.lines = logging.getLogger("dcvit.dcmha"), _Lines(self)  # which implementation attends

    def __enter__(self) -> RunProgress:
        self.bar.start()
        self.choices.addHandler(self.lines)
        self.choices.setLevel(logging.INFO)
        self.choices.propagate = False  # Orbax has absl give the root logger a handler of its own
        return self

    def __exit__(self, *_: object) -> None:
        self.choices.removeHandler(self.lines)
        self.choices.propagate = True
        self.bar.stop()

    def line(self, text: str) -> None:
        """Prints a line, above the bar where there is one."""
        self.bar.console.print(text, markup=False)

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def report(self, step: int, metrics: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        """Shows a logged step: evaluations as a line of their own, the rest in the bar or as a line."""
        status = f"loss {metrics['loss']:.4f}" if metrics.get("loss") is not None else ""
        if timing:
            unit, each = self.rate
            status += f"  {timing['examples_per_second'] * each:.0f} {unit}  {timing['step_seconds'] * 1e3:.1f} ms/step"
            if "mfu" in timing:
                status += f"  MFU {timing['mfu']:.1%}"
        self.bar.update(self.task, completed=step, status=status)
        if not self.live and status:
            left = (self.total - step) * timing["step_seconds"] if timing else 0
            self.line(f"step {step}/{self.total}  {status}" + (f"  ETA {left:.0f}s" if timing else ""))
        evaluations: dict[str, list[str]] = {}
        for name, value in metrics.items():
            evaluator, slash, metric = name.partition("/")
            if slash:
                shown = f"{value:.4f}" if isinstance(value, float) else str(value)
                evaluations.setdefault(evaluator, []).append(f"{metric} {shown}")
        for evaluator, values in evaluations.items():
            self.line(f"step {step}  {evaluator}: {'  '.join(values)}")


class ByteProgress:
    """Context manager that shows on stderr how many bytes of input are processed, and the speed of the output.

    A terminal shows a live bar; otherwise a line is printed every LINE_SECONDS.
    """

    def __init__(self, title: str, unit: str):
        """
        Args:
          title: name of the operation.
          unit: unit of the output, such as "tok"; the speed is shown in millions of it per second.
        """
        self.title, self.unit = title, unit
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self.bar = _bar(self.console, DownloadColumn())
        self.task = self.bar.add_task(title, total=None, status="")
        self.start = self.shown = time.monotonic()

    def __enter__(self) -> ByteProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, completed: int, total: int, produced: int) -> None:
        """Show that `completed` of `total` bytes are processed and `produced` units are written."""
        now, live = time.monotonic(), self.console.is_terminal
        if now < self.shown + (LIVE_SECONDS if live else LINE_SECONDS):
            return
        self.shown, seconds = now, now - self.start
        status = f"{produced / seconds / 1e6:.2f} M{self.unit}/s"
        self.bar.update(self.task, completed=completed, total=total, status=status)
        if not live:
            remaining = seconds * (total - completed) / max(1, completed)
            amount = f"{completed / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            self.console.print(f"{self.title}: {amount}  {status}  ETA {remaining:.0f}s", markup=False)
