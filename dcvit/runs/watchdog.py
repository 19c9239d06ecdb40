"""Watchdog of a run: reports the stacks of all threads, and the files that input workers read, if the run stalls."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import tempfile
import threading
import time
from pathlib import Path

import input_pipeline
from dcvit.parallel import multihost
from dcvit.runs.files import Folder

LOG = "watchdog.log"
STDERR = 2  # the file descriptor: `sys.stderr` may be replaced
STALLED = 124  # exit status, as of timeout(1)
REPORT_SECONDS = 10  # until a report is written
SAVE_FACTOR = 4  # a save that stalls is reported like other work, and ends the process after this multiple of the time


class Watchdog:
    """Reports a run that makes no progress for a given time.

    Call the instance with a description of the current work whenever the run makes progress. Each stall is reported
    once, to stderr and to `watchdog.log` in the workdir. If the run waits for a checkpoint to be saved and this takes
    `SAVE_FACTOR` times as long, the process is ended.
    """

    def __init__(self, workdir: Folder, seconds: float, *, exit_on_stall: bool = False):
        """Start the watchdog.

        Args:
          workdir: the folder for `watchdog.log`.
          seconds: time without progress that counts as a stall; 0 disables the watchdog.
          exit_on_stall: if True, end the process with status 124 after the report of any stall.
        """
        self.workdir, self.seconds, self.exit_on_stall = workdir, seconds, exit_on_stall
        self.ended = threading.Event()
        self("starting")
        if seconds:
            self._arm()
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def __call__(self, phase: str, *, saves: bool = False) -> None:
        self.saves = saves
        self.phase, self.since, self.reported = phase, time.monotonic(), False

    def close(self) -> None:
        """Stop the watchdog."""
        self.ended.set()

    def _arm(self) -> None:
        """Set faulthandler's timer, which the watchdog thread sets again in time as long as it can run.

        A C function that does not release the interpreter lock also stops the watchdog thread. The timer's C thread
        then writes the stacks to stderr; it cannot list what input workers read, and it exits with status 1. The timer
        leaves the watchdog thread enough time for its own report.
        """
        faulthandler.dump_traceback_later(self.seconds + REPORT_SECONDS, file=STDERR, exit=self.exit_on_stall)

    def _watch(self) -> None:
        while not self.ended.wait(self.seconds / 8):
            self._arm()
            since, saves = self.since, self.saves
            stalled = time.monotonic() - since
            line = f"no progress for {self.seconds:g} s while {self.phase}"
            if stalled > self.seconds and not self.reported:
                self.reported = True
                # If not even a thread can be started, the timer ends a save.
                faulthandler.dump_traceback_later(self.seconds * SAVE_FACTOR, file=STDERR, exit=saves)
                reporter = threading.Thread(target=self._report, args=(line,), daemon=True)
                reporter.start()
                reporter.join(REPORT_SECONDS)  # the run may be waiting for the disk that the log is on
                faulthandler.cancel_dump_traceback_later()
            ends = self.exit_on_stall or (saves and stalled > SAVE_FACTOR * self.seconds)
            if ends and self.reported and self.since == since:
                multihost.fail(line, STALLED)
        faulthandler.cancel_dump_traceback_later()

    def _report(self, line: str) -> None:
        text = report(line)
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # the report is on stderr
            path = self.workdir / LOG
            if isinstance(path, Path):
                with path.open("a") as file:
                    file.write(text)
            else:
                path.write_text(text)


def report(line: str) -> str:
    """Return a report: the time, the line, the process index, what input workers read, and the stack of each thread.

    faulthandler writes the stacks, to a file: it needs no lock that a stalled thread may hold.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read()
    reading = [f"  {work}" for work in input_pipeline.active_reads()] or ["  nothing"]
    head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line} (process {multihost.index()})"
    return "\n".join([head, "input workers read:", *reading, stacks])
