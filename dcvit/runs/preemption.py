"""Stop signals: SIGTERM, SIGHUP or Ctrl-C saves the run and ends the process, in any state of the main thread.

The run is also saved during a compilation, an evaluation, or while it waits for data. The exit status is 75 after
SIGTERM and SIGHUP, and 130 after Ctrl-C (SIGINT). A second signal, at least `REPEAT_SECONDS` after the first one, ends
the process at once. A terminal that closes and a connection that is lost send SIGHUP, unless `nohup` has disabled it.

Python executes signal handlers in the main thread, which cannot do so while it compiles. Therefore a thread reads the
socket to which the interpreter writes the number of each signal, and another thread saves.
"""

from __future__ import annotations

import contextlib
import math
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from dcvit.errors import escaped, first_line
from dcvit.parallel import multihost

SAVED = 75  # exit status EX_TEMPFAIL of sysexits.h: the same command resumes the run
INTERRUPTED = 130  # exit status that a shell reports for SIGINT
# Exit status once the run is saved.
STOPPED = {signal.SIGTERM: SAVED, signal.SIGHUP: SAVED, signal.SIGINT: INTERRUPTED}
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP", signal.SIGINT: "Ctrl-C"}
# Signals at a shorter distance count as one: `timeout` sends a signal to its child and to the group.
REPEAT_SECONDS = {signal.SIGTERM: 2.0, signal.SIGHUP: 2.0, signal.SIGINT: 0.2}
POLL_SECONDS = 0.5  # interval at which one of several processes checks if another received a signal


class Preemption:
    """Context manager that saves the run and ends the process at a stop signal; only the main thread can enter it."""

    def __init__(self) -> None:
        self.save: Callable[[], str] | None = None  # saves the run and returns a message for the user
        self.ended = threading.Event()
        self.signal = signal.SIGTERM  # the first signal; SIGTERM if another process received it
        self.stopper: threading.Thread | None = None  # saves and ends the process, once a stop has started
        self.starting = threading.Lock()  # held while a stop starts, or is ruled out

    @contextlib.contextmanager
    def saving(self, save: Callable[[], str], ended: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Set the function that saves the run if a stop signal arrives while the body runs.

        A stop that has started is always completed: when the body returns or raises, this calls `ended` and waits until
        the process exits with the status of the stop.

        Args:
          save: saves the run and returns a message for the user; called in another thread.
          ended: informs `save` that the main thread completes no further step, so that it does not wait for one.
        """
        outer, self.save = self.save, save
        try:
            yield
        finally:
            self._finish(ended)
            self.save = outer

    def _finish(self, ended: Callable[[], None] = lambda: None) -> None:
        """If a stop has started, call `ended` and wait until the stop ends the process; otherwise return."""
        with self.starting:
            stopper = self.stopper
        if stopper:
            ended()
            stopper.join()

    def __enter__(self) -> Preemption:
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.before_fd = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # by `nohup`
        handled = [number for number in STOPPED if number != signal.SIGHUP or not ignored]
        self.before = {number: signal.signal(number, lambda *_: None) for number in handled}
        for number in self.before:
            signal.siginterrupt(number, False)  # do not interrupt system calls of the main thread
        self.listener = threading.Thread(target=self._listen, name="signals", daemon=True)
        self.listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._finish()
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.before_fd)
        self.writer.send(b"\0")
        self.listener.join()
        self.reader.close()
        self.writer.close()

    def _listen(self) -> None:
        first = math.inf  # time of the first signal
        while self.stopper or not self.ended.is_set():
            ready, _, _ = select.select([self.reader], [], [], POLL_SECONDS)
            for number in self.reader.recv(64) if ready else b"":
                if number not in STOPPED:
                    continue
                received, now = signal.Signals(number), time.monotonic()
                if first == math.inf:
                    self.signal, first = received, now
                    multihost.request_stop()
                elif now > first + REPEAT_SECONDS[received]:
                    message = f"ended by {NAMES[received]} before the run was saved"
                    say(message)
                    multihost.fail(message, 128 + received)  # as a shell reports the signal
            if not self.stopper and (first < math.inf or multihost.stop_requested()):
                with self.starting:
                    if not self.ended.is_set():
                        self.stopper = threading.Thread(target=self._stop, name="stop", daemon=True)
                        self.stopper.start()

    def _stop(self) -> None:
        name = NAMES[self.signal]
        again = "; press Ctrl-C again to end without saving" if self.signal == signal.SIGINT else ""
        say(f"{name}: saving and stopping{again}")
        try:
            save = self.save
            ready = all(multihost.gather("ready", save is not None))  # False while a process opens its data
            message = save() if ready and save else "nothing to save"
        except Exception as e:
            _print(f"error: {first_line(e)}")
            multihost.fail(first_line(e), 2)
        say(f"stopped by {name}: {message}; re-run the same command to resume")
        multihost.exit_process(STOPPED[self.signal])


def say(line: str) -> None:
    """Print a line to stderr in the first process."""
    if multihost.is_first():
        _print(line)


def _print(line: str) -> None:
    """Print a line to stderr; ignore errors, such as a closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        print(escaped(line), file=sys.stderr, flush=True)
