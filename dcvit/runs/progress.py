"""Progress on the console, in lines with the estimated time left."""

from __future__ import annotations

import contextlib
import datetime
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from dcvit.errors import escaped
from dcvit.parallel import multihost
from dcvit.process import logging_to, number, say

LINE_SECONDS = 10.0  # between lines


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


class Progress:
    """Progress of a computation, in a line on stderr every `LINE_SECONDS`."""

    def __init__(self, title: str, total: int = 0, *, in_bytes: bool = False):
        """Start the clock.

        Args:
          title: name of the work.
          total: its size, which `show` may change.
          in_bytes: if True, sizes are numbers of bytes and are shown in MB.
        """
        self.title, self.total = title, total
        self.scale, self.unit = (1e6, " MB") if in_bytes else (1.0, "")
        self.started = self.shown = time.monotonic()

    def show(self, completed: int, total: int | None = None, status: str = "") -> None:
        """Show the completed amount and a status, unless the last line was shortly before; `total` is a new size."""
        self.total, now = total or self.total, time.monotonic()
        if now < self.shown + LINE_SECONDS:
            return
        self.shown = now
        left = (now - self.started) * (self.total - completed) / max(1, completed)
        amount = f"{completed / self.scale:,.0f} of {self.total / self.scale:,.0f}{self.unit}"
        print(escaped(f"{self.title}: {amount}  {status}  ETA {_duration(left)}"), file=sys.stderr, flush=True)


class RunProgress:
    """Progress of a training run, on stdout. Call `advance` at every step and `report` at logged steps.

    Inside the context, the choice of an attention implementation, which `dcvit.dcmha` logs whenever a model is traced,
    is printed once per distinct choice.
    """

    def __init__(self, total: int, start: int = 0, rate: tuple[str, int] = ("img/s", 1)):
        """Prepare the display.

        Args:
          total: number of steps.
          start: number of steps completed before.
          rate: unit of speed, and how many of that unit an example is.
        """
        self.total, self.start, self.rate = total, start, rate
        self.shown = time.monotonic()
        self.logs = contextlib.ExitStack()

    def __enter__(self) -> RunProgress:
        self.logs.enter_context(logging_to(_DistinctLines(self.line), "dcvit.dcmha"))
        return self

    def __exit__(self, *_: object) -> None:
        self.logs.close()

    def line(self, text: str) -> None:
        """Print a line; training continues if no reader is left."""
        say(text)

    def advance(self, step: int) -> None:
        """Show the number of completed steps in a line every `LINE_SECONDS` after the first step."""
        now = time.monotonic()
        if step <= self.start + 1:
            self.shown = now
        elif now >= self.shown + LINE_SECONDS:
            self.shown = now
            self.line(f"step {step}/{self.total}")

    def report(self, step: int, metrics: Mapping[str, object], timing: Mapping[str, float]) -> None:
        """Show a logged step: a line with loss and speed, and a line for each evaluation."""
        loss = metrics.get("loss")
        status = f"loss {loss:.4f}" if isinstance(loss, float) else ""
        if timing:
            unit, each = self.rate
            status += f"  {timing['examples_per_second'] * each:.0f} {unit}  {timing['step_seconds'] * 1e3:.1f} ms/step"
            if "mfu" in timing:
                status += f"  MFU {timing['mfu']:.1%}"
        if status:
            left = f"  ETA {_duration((self.total - step) * timing['step_seconds'])}" if timing else ""
            self.line(f"step {step}/{self.total}  {status}{left}")
            self.shown = time.monotonic()
        evaluations: dict[str, list[str]] = {}
        for name, value in metrics.items():
            evaluator, slash, metric = name.partition("/")
            if slash:
                text = number(value) if isinstance(value, float) else str(value)
                evaluations.setdefault(evaluator, []).append(f"{metric} {text}")
        for evaluator, values in evaluations.items():
            self.line(f"step {step}  {evaluator}: {'  '.join(values)}")


def _duration(seconds: float) -> str:
    """Return a number of seconds as text, such as "0:01:30" or "10 days, 0:00:00"."""
    return str(datetime.timedelta(seconds=round(seconds)))


class _DistinctLines(logging.Handler):
    """Prints each distinct log record once."""

    def __init__(self, show: Callable[[str], None]):
        super().__init__(logging.INFO)
        self.show, self.printed = show, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record; on stderr if it is a warning of another process than the first, whose stdout is discarded."""
        line = record.getMessage()
        if line in self.printed:
            return
        self.printed.add(line)
        if record.levelno > logging.INFO and not multihost.is_first():
            print(escaped(line), file=sys.stderr, flush=True)
        else:
            self.show(line)
