"""One line in place of the C++ stack with which JAX ends a process after another one was lost.

JAX's client of the coordinator notices at once that the connection to process 0 is closed, writes a stack to file
descriptor 2 and calls abort(). It has no hook for Python: an exception of C++ passes through the one that it declares.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dcvit.parallel import stderr_relay

STDERR = 2
ABORT_REASON_TIMEOUT = 5  # until the relay says why JAX has called abort()


class StderrRelay:
    """Sends what is written to file descriptor 2 through the process `dcvit.parallel.stderr_relay`."""

    def __init__(self, lost: Callable[[], None]):
        """Start the process, redirect file descriptor 2 and handle SIGABRT.

        Args:
          lost: ends this process; called if JAX aborts it because of a lost process, after the line about it.
        """
        self.lost = lost
        self.stderr = os.dup(STDERR)
        reader, writer = os.pipe()
        self.verdict, verdict = os.pipe()
        command = [sys.executable, "-I", "-S", stderr_relay.__file__, str(verdict)]
        with Path(os.devnull).open("w") as null:
            self.process = subprocess.Popen(command, stdin=reader, stdout=null, pass_fds=[verdict])
        os.close(reader)
        os.close(verdict)
        os.dup2(writer, STDERR)
        os.close(writer)
        self.closed = False
        # Not signal.signal: Python would run the handler in the main thread, and abort() does not wait for it.
        self.libc = ctypes.CDLL(None)
        self.handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
        self.libc.signal(int(signal.SIGABRT), self.handler)

    def close(self, *, drop_report: bool = False) -> None:
        """Restore file descriptor 2, and return once everything that was written to it has been passed on.

        Args:
          drop_report: do not pass on JAX's report about a lost process.
        """
        if self.closed:
            return
        self.closed = True
        if drop_report:
            os.write(STDERR, stderr_relay.DROP)
        os.dup2(self.stderr, STDERR)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a child of this process still has the pipe
            self.process.wait(ABORT_REASON_TIMEOUT)
        self.libc.signal(int(signal.SIGABRT), None)

    def _aborted(self, _: int) -> None:
        """Handle SIGABRT, in the thread that called abort(), which ends the process when this returns."""
        with contextlib.suppress(OSError):
            os.write(STDERR, stderr_relay.ABORTED)
            ready = select.select([self.verdict], [], [], ABORT_REASON_TIMEOUT)[0]
            if ready and os.read(self.verdict, 1) == stderr_relay.LOST:
                self.lost()
        self.libc.signal(int(signal.SIGABRT), None)
