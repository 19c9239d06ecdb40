"""Progress on the console: a live bar with the estimated time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import datetime
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from rich import progress as columns
from rich.console import Console

from dcvit.errors import escaped
from dcvit.parallel import multihost

LIVE_SECONDS = 0.2  # between updates of a live bar
LINE_SECONDS = 10.0  # between lines without a terminal


@contextlib.contextmanager
def stage(name: str, show: Callable[[str], None], *, announce: bool = True) -> Iterator[None]:
    """Show the name of the work in the context at once, and every `LINE_SECONDS` also the seconds that it has taken.

    Args:
      name: the name of the work, such as "compiling the training step".
      show: prints a line; also called by another thread.
      announce: show the name at once, not only if the body takes long.
    """
    ended, started = threading.Event(), time.monotonic()

    def show_time() -> None:
        while not ended.wait(LINE_SECONDS):
            show(f"{name}: {time.monotonic() - started:.0f} s")

    if announce:
        show(name)
    thread = threading.Thread(target=show_time, name="stage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class ProgressBar:
    """Context manager that shows the progress of a computation or a transfer.

    Attributes:
      live: True on a terminal, where a bar is shown.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        start: int = 0,
        in_bytes: bool = False,
        lines: bool = False,
        stderr: bool = True,
    ):
        """Prepare the bar.

        Args:
          title: name of the work.
          total: its size.
          start: how much of it was completed before.
          in_bytes: if True, sizes are numbers of bytes and are shown in MB.
          lines: if True, print a line every `LINE_SECONDS` without a terminal.
          stderr: write to stderr instead of stdout.
        """
        self.title, self.total, self.in_bytes, self.lines = escaped(title), total, in_bytes, lines
        self.console = Console(stderr=stderr, soft_wrap=True, highlight=False)
        self.live = self.console.is_terminal
        self.bar = columns.Progress(
            columns.TextColumn("{task.description}", markup=False), columns.BarColumn(),
            columns.DownloadColumn() if in_bytes else columns.MofNCompleteColumn(),
            columns.TextColumn("{task.fields[status]}", markup=False), columns.TimeElapsedColumn(),
            columns.TextColumn("ETA"), columns.TimeRemainingColumn(), console=self.console, disable=not self.live,
        )  # fmt: skip
        self.task = self.bar.add_task(self.title, total=total, completed=start, status="")
        self.started = self.shown = time.monotonic()

    def __enter__(self) -> ProgressBar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, completed: int, total: int | None = None, status: str = "") -> None:
        """Show the completed amount and a status, unless the last update was shortly before; `total` is a new size."""
        self.total, now = total or self.total, time.monotonic()
        if now < self.shown + (LIVE_SECONDS if self.live else LINE_SECONDS):
            return
        self.shown = now
        self.bar.update(self.task, completed=completed, total=self.total, status=status)
        if self.lines and not self.live:
            left = (now - self.started) * (self.total - completed) / max(1, completed)
            scale, unit = (1e6, " MB") if self.in_bytes else (1, "")
            amount = f"{completed / scale:,.0f} of {self.total / scale:,.0f}{unit}"
            self.line(f"{self.title}: {amount}  {status}  ETA {_duration(left)}")

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one; characters that cannot be printed are escaped."""
        self.bar.console.print(escaped(text), markup=False, emoji=False)


class RunProgress(ProgressBar):
    """Progress of a training run, on stdout. Call `advance` at every step and `report` at logged steps.

    Inside the context, the log records of `dcvit` and `input_pipeline` are printed above the bar. The choice of an
    attention implementation, which `dcvit.dcmha` logs whenever a model is traced, is printed once per distinct choice.
    """

    def __init__(self, title: str, total: int, start: int = 0, rate: tuple[str, int] = ("img/s", 1)):
        """Prepare the display.

        Args:
          title: name of the run.
          total: number of steps.
          start: number of steps completed before.
          rate: unit of speed, and how many of that unit an example is.
        """
        super().__init__(title, total, start=start, stderr=False)
        self.rate, self.start = rate, start
        self.logs = [_LogLines("dcvit.dcmha", self, distinct=True)]
        if self.live:
            self.logs += [_LogLines("dcvit", self), _LogLines("input_pipeline", self)]

    def __enter__(self) -> RunProgress:
        super().__enter__()
        for log in self.logs:
            log.attach()
        return self

    def __exit__(self, *_: object) -> None:
        for log in self.logs:
            log.detach()
        super().__exit__()

    def advance(self, step: int) -> None:
        """Show the number of completed steps: in the bar, or as a line every `LINE_SECONDS` after the first step."""
        self.bar.update(self.task, completed=step)
        now = time.monotonic()
        if step <= self.start + 1:
            self.shown = now
        elif not self.live and now >= self.shown + LINE_SECONDS:
            self.shown = now
            self.line(f"step {step}/{self.total}")

    def report(self, step: int, metrics: Mapping[str, object], timing: Mapping[str, float]) -> None:
        """Show a logged step: loss and speed in the bar, or as a line, and a line for each evaluation."""
        loss = metrics.get("loss")
        status = f"loss {loss:.4f}" if isinstance(loss, float) else ""
        if timing:
            unit, each = self.rate
            status += f"  {timing['examples_per_second'] * each:.0f} {unit}  {timing['step_seconds'] * 1e3:.1f} ms/step"
            if "mfu" in timing:
                status += f"  MFU {timing['mfu']:.1%}"
        self.bar.update(self.task, completed=step, status=status)
        if not self.live and status:
            left = f"  ETA {_duration((self.total - step) * timing['step_seconds'])}" if timing else ""
            self.line(f"step {step}/{self.total}  {status}{left}")
            self.shown = time.monotonic()
        evaluations: dict[str, list[str]] = {}
        for name, value in metrics.items():
            evaluator, slash, metric = name.partition("/")
            if slash:
                text = f"{value:.4f}" if isinstance(value, float) else str(value)
                evaluations.setdefault(evaluator, []).append(f"{metric} {text}")
        for evaluator, values in evaluations.items():
            self.line(f"step {step}  {evaluator}: {'  '.join(values)}")


def _duration(seconds: float) -> str:
    """Return a number of seconds as text, such as "0:01:30" or "10 days, 0:00:00"."""
    return str(datetime.timedelta(seconds=round(seconds)))


class _LogLines(logging.Handler):
    """Prints the log records of a logger above a progress bar, in place of the logger's other handlers.

    Records do not reach the root logger, to which absl, imported by Orbax, adds a handler.
    """

    def __init__(self, name: str, progress: ProgressBar, *, distinct: bool = False):
        """Prepare the handler; if `distinct`, equal messages are printed once."""
        super().__init__(logging.INFO)
        self.logger, self.progress, self.distinct = logging.getLogger(name), progress, distinct
        self.printed: set[str] = set()

    def attach(self) -> None:
        """Replace the handlers of the logger."""
        self.previous = self.logger.handlers, self.logger.level, self.logger.propagate
        self.logger.handlers, self.logger.propagate = [self], False
        self.logger.setLevel(logging.INFO)

    def detach(self) -> None:
        """Restore the handlers of the logger."""
        self.logger.handlers, level, self.logger.propagate = self.previous
        self.logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record above the bar; on stderr if it is a warning of another process than the first."""
        line = record.getMessage()
        if self.distinct and line in self.printed:
            return
        self.printed.add(line)
        if record.levelno > logging.INFO and not multihost.is_first():
            print(escaped(line), file=sys.stderr, flush=True)
        else:
            self.progress.line(line)
