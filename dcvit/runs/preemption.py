"""Being told to stop. SIGTERM, once, saves the run and ends it with status 75, whatever its main thread is at: a step,
a compilation, an evaluation, waiting for data. Another SIGTERM, not right after it, or Ctrl-C, ends it at once.

Python runs handlers of signals in the main thread, which cannot while it compiles. So a thread listens to the file
that the interpreter writes each signal's number to, and another one saves.
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

from dcvit.errors import first_line
from dcvit.parallel import multihost

SAVED = 75  # EX_TEMPFAIL of sysexits.h: nothing is lost, the same command goes on
INTERRUPTED, KILLED = 130, 143  # as the shell says of SIGINT and SIGTERM
AGAIN_SECONDS = 2  # SIGTERMs less apart are one: `timeout` sends it to its child and then to the group
POLL_SECONDS = 0.5  # how often one of several processes looks whether another was told


class Preemption:
    """Listens to signals while it is entered, which only the main thread can."""

    def __init__(self) -> None:
        self.save: Callable[[], str] | None = None  # saves the run; returns one line for the user
        self.ended = threading.Event()
        self.stopper: threading.Thread | None = None  # saves and ends the process, once a stop has begun
        self.starting = threading.Lock()  # held while a stop begins, or is ruled out

    @contextlib.contextmanager
    def saving(self, save: Callable[[], str], ended: Callable[[], None] = lambda: None) -> Iterator[None]:
        """A stop calls `save` while the body runs.

        However the body ends, a stop that has begun by then is completed first: `ended` is called, so that `save` does
        not wait for the main thread, and the process exits with the stop's status.
        """
        outer, self.save = self.save, save
        try:
            yield
        finally:
            self._finish(ended)
            self.save = outer

    def _finish(self, ended: Callable[[], None] = lambda: None) -> None:
        """Does not return once a stop has begun, which ends the process."""
        with self.starting:
            stopper = self.stopper
        if stopper:
            ended()
            stopper.join()

    def __enter__(self) -> Preemption:
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.before_fd = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        self.before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in self.before:
            signal.siginterrupt(number, False)  # the main thread's reads and writes go on
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
        told = math.inf  # when SIGTERM came first
        while self.stopper or not self.ended.is_set():
            ready, _, _ = select.select([self.reader], [], [], POLL_SECONDS)
            for number in self.reader.recv(64) if ready else b"":
                if number == signal.SIGINT:
                    self._at_once("interrupted", INTERRUPTED)
                elif number == signal.SIGTERM:
                    if time.monotonic() > told + AGAIN_SECONDS:
                        self._at_once("killed by a second SIGTERM", KILLED)
                    told = min(told, time.monotonic())
                    multihost.request_stop()
            if not self.stopper and (told < math.inf or multihost.stop_requested()):
                with self.starting:
                    if not self.ended.is_set():
                        self.stopper = threading.Thread(target=self._stop, name="stop", daemon=True)
                        self.stopper.start()

    def _stop(self) -> None:
        say("SIGTERM: saving and stopping")
        try:
            save = self.save
            ready = all(multihost.gather("ready", save is not None))  # one may still be opening its data
            done = save() if ready and save else "nothing to save"
        except Exception as e:
            say(f"error: {first_line(e)}")
            if multihost.is_single_process():
                multihost.exit_process(2)
            multihost.fail(first_line(e), 2)
        say(f"stopped by SIGTERM: {done}; the same command goes on")
        multihost.exit_process(SAVED)

    def _at_once(self, message: str, status: int) -> None:
        say(message)
        if multihost.is_single_process():
            multihost.exit_process(status)
        multihost.fail(message, status)


def say(line: str) -> None:
    """Prints a line to stderr, of several processes only the first; that nobody reads it changes nothing."""
    if multihost.is_first():
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
