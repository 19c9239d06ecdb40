"""One line in place of the C++ stack with which JAX ends a process after another one was lost.

JAX's client of the coordinator notices at once that the connection to process 0 is closed, writes a stack to file
descriptor 2 and calls abort(). It has no hook for Python: an exception of C++ passes through the one that it declares.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable

# The first line of what JAX writes before it aborts, and the processes that it names.
REPORT = re.compile(rb"^[EF]\d{4} [\d:.]+ +\d+ (?:coordination_service|coordination_service_agent|client)\.\w+:", re.M)
UNHEALTHY = re.compile(rb"stopped sending heartbeats\):\n(\d+)")
HOLD_SECONDS = 5  # between the beginning of the report and abort()
STDERR = 2


class StderrRelay:
    """Passes on what is written to file descriptor 2, but holds back JAX's report before it aborts the process.

    The report is dropped if the process is then aborted, and otherwise passed on.
    """

    def __init__(self, lost: Callable[[str], None]):
        """Redirect file descriptor 2 and handle SIGABRT.

        Args:
          lost: ends the process because of a lost process, which is given as a clause.
        """
        self.lost = lost
        self.stderr = os.dup(STDERR)
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.dup2(writer, STDERR)
        os.close(writer)
        self.held, self.held_since = b"", 0.0
        self.lock = threading.Lock()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._relay, name="stderr", daemon=True)
        self.thread.start()
        # Not signal.signal: Python would run the handler in the main thread, and abort() does not wait for it.
        self.libc = ctypes.CDLL(None)
        self.handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
        self.libc.signal(int(signal.SIGABRT), self.handler)

    def close(self, *, drop_report: bool = False) -> None:
        """Restore file descriptor 2, after everything that was written to it has been passed on.

        Args:
          drop_report: do not pass on what is held back.
        """
        if self.closed.is_set():
            return
        os.dup2(self.stderr, STDERR)
        self.closed.set()
        self.thread.join(HOLD_SECONDS)
        with self.lock:
            self._pass_on(hold=drop_report)
        self.libc.signal(int(signal.SIGABRT), None)

    def _relay(self) -> None:
        while not self.closed.is_set():
            select.select([self.reader], [], [], 0.1)
            with self.lock:
                self._pass_on(hold=not self.held or time.monotonic() < self.held_since + HOLD_SECONDS)

    def _pass_on(self, *, hold: bool) -> None:
        """Write to stderr what was read from the pipe; with `hold`, only what precedes a report."""
        text = b""
        with contextlib.suppress(BlockingIOError):
            while read := os.read(self.reader, 65536):
                text += read
        if not self.held:
            self.held_since = time.monotonic()
        text, self.held = self.held + text, b""
        if hold and (found := REPORT.search(text)):
            text, self.held = text[: found.start()], text[found.start() :]
        with contextlib.suppress(OSError):  # nobody reads stderr
            while text:
                text = text[os.write(self.stderr, text) :]

    def _aborted(self, _: int) -> None:
        """Handle SIGABRT, in the thread that called abort(), which ends the process when this returns."""
        locked = self.lock.acquire(timeout=1)
        self._pass_on(hold=True)
        if REPORT.match(self.held):
            process = UNHEALTHY.search(self.held)
            self.held = b""
            if locked:
                self.lock.release()
            self.lost(f"process {int(process[1]) if process else 0} was lost")
        self._pass_on(hold=False)
        self.libc.signal(int(signal.SIGABRT), None)
