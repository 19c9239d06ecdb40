"""A run that stands still says where: the stacks of all its threads, and what each input worker is reading."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import tempfile
import threading
import time
from pathlib import Path

import input_pipeline
from dcvit.checkpoint.files import Folder
from dcvit.parallel import multihost

TELL_SECONDS = 10
STALLED = 124  # the exit status, as of timeout(1)
LOG = "watchdog.log"


class Watchdog:
    """Call it with what the run is at whenever it gets on; where `seconds` pass between two calls, it reports.

    The report goes to stderr and to `watchdog.log` in the workdir; it comes once for each time the run stands still.
    """

    def __init__(self, workdir: Folder, seconds: float, *, exit_on_stall: bool = False):
        """`seconds` of 0 are never over. `exit_on_stall` ends the process after the report, with status 124."""
        self.workdir, self.seconds, self.exit_on_stall = workdir, seconds, exit_on_stall
        self.ended = threading.Event()
        self("starting")
        if seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def __call__(self, phase: str) -> None:
        self.phase, self.since, self.reported = phase, time.monotonic(), False

    def close(self) -> None:
        self.ended.set()

    def _watch(self) -> None:
        while not self.ended.wait(self.seconds / 8):
            if time.monotonic() - self.since > self.seconds and not self.reported:
                self.reported = True
                line = f"no progress for {self.seconds:g} s while {self.phase}"
                telling = threading.Thread(target=self._tell, args=(line,), daemon=True)
                telling.start()
                telling.join(TELL_SECONDS)  # what the run waits for may be the disk of the log
                if self.exit_on_stall and multihost.is_single_process():
                    multihost.exit_process(STALLED)
                elif self.exit_on_stall:
                    multihost.fail(line, STALLED)

    def _tell(self, line: str) -> None:
        text = report(line)
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # it stands on stderr
            path = self.workdir / LOG
            if isinstance(path, Path):
                with path.open("a") as file:
                    file.write(text)
            else:
                path.write_text(text)


def report(line: str) -> str:
    """The line, the process, what the input workers read, and every thread's stack."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read()
    reading = [f"  {work}" for work in input_pipeline.active_reads()] or ["  nothing"]
    head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line} (process {multihost.index()})"
    return "\n".join([head, "input workers read:", *reading, stacks])
