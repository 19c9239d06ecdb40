"""Stopping of a run: by a signal, with a checkpoint at the next step boundary, and by a hang, with all stacks.

SIGTERM, SIGHUP and Ctrl-C set a flag, which the training loop reads before each step. In a run of several processes,
JAX's preemption service handles SIGTERM: its processes agree on the step that all of them save. The exit status is 75
after SIGTERM and SIGHUP, and 130 after Ctrl-C (SIGINT). A second signal ends the process at once. A terminal that
closes and a connection that is lost send SIGHUP, unless `nohup` has disabled it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from dcvit.errors import escaped
from dcvit.parallel import multihost

SAVED = 75  # exit status EX_TEMPFAIL of sysexits.h: the same command resumes the run
INTERRUPTED = 130  # exit status that a shell reports for SIGINT
STOPPED = {signal.SIGTERM: SAVED, signal.SIGHUP: SAVED, signal.SIGINT: INTERRUPTED}  # exit status after a stop
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP", signal.SIGINT: "Ctrl-C"}
REPEAT_SECONDS = 0.5  # signals at a shorter distance count as one: `timeout` sends one to its child and to the group
STDERR = 2  # the file descriptor: `sys.stderr` may be replaced


class StopSignals:
    """Context manager that turns the first stop signal into a flag; only the main thread can enter it.

    Outside of `training` there is nothing to save, and the first signal ends the command. One that arrives in the last
    step, or while the last checkpoint is finished, ends neither: the run is complete.
    """

    def __init__(self) -> None:
        self.is_training = False
        self.received: signal.Signals | None = None
        self.since: float | None = None  # time of the first signal
        self.boundaries = 0  # calls of `is_set`, whose number all processes of a run share

    def __enter__(self) -> StopSignals:
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.before_fd = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        own = {number for number in STOPPED if number != signal.SIGTERM or multihost.is_single_process()}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by `nohup`
            own.remove(signal.SIGHUP)
        self.before = {number: signal.signal(number, self._receive) for number in own}
        self.listener = threading.Thread(target=self._listen, name="signals", daemon=True)
        self.listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.before_fd)
        self.writer.send(b"\0")
        self.listener.join()
        self.reader.close()
        self.writer.close()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Context of the loop over steps, which reads the flag, and of work that a signal does not end."""
        self.is_training = True
        try:
            yield
        finally:
            self.is_training = False

    def is_set(self) -> bool:
        """Return True if training is to stop before the next step; every process calls this before each of its steps.

        In a run of several processes, this is the same step in all of them.
        """
        self.boundaries += 1
        if multihost.is_single_process():
            return self.received is not None
        if not multihost.reached_stop(self.boundaries):
            return False
        self.received, self.since = self.received or signal.SIGTERM, time.monotonic()
        self.before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._receive)  # a second one ends the process
        return True

    def end(self, done: str) -> NoReturn:
        """Exit with the status of a stopped run, after a message to the user, in which `done` says what is saved."""
        received = self.received or signal.SIGTERM
        say(f"stopped by {NAMES[received]}: {done}; re-run the same command to resume")
        raise SystemExit(STOPPED[received])

    def _receive(self, number: int, _: object) -> None:
        """Set the flag at the first signal, in the main thread, once it executes Python code."""
        if self.received:
            return
        self.received = signal.Signals(number)
        if not self.is_training and multihost.is_single_process():
            if self.received == signal.SIGINT:
                raise KeyboardInterrupt
            self.end("nothing to save")
        again = "; press Ctrl-C again to end without saving" if number == signal.SIGINT else ""
        say(f"{NAMES[self.received]}: stopping before the next step, if there is one{again}")
        if not multihost.is_single_process():
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's preemption service informs the other processes

    def _listen(self) -> None:
        """End the process at the second signal, also while the main thread compiles and executes no Python code.

        The interpreter writes the number of each signal to the socket at once.
        """
        while number := self.reader.recv(1)[0]:
            now = time.monotonic()
            if number not in STOPPED:
                continue
            if self.since is None:
                self.since = now
            elif now > self.since + REPEAT_SECONDS:
                message = f"ended by {NAMES[signal.Signals(number)]} before the run was saved"
                say(message)
                multihost.fail(message, 128 + number)  # as a shell reports the signal


class Watchdog:
    """Ends a run that makes no progress for a given time: faulthandler writes all stacks to stderr, and exits with 1.

    Its timer is a thread in C, which also runs while other code holds the interpreter lock.
    """

    def __init__(self, seconds: float):
        """Start the timer; `seconds` is the time without progress, and 0 disables the watchdog."""
        self.seconds = seconds
        self.progress()

    def progress(self) -> None:
        """Start the timer again: a step, a compilation, an evaluation or a save begins."""
        if self.seconds:
            faulthandler.dump_traceback_later(self.seconds, file=STDERR, exit=True)

    def close(self) -> None:
        """Stop the timer."""
        if self.seconds:
            faulthandler.cancel_dump_traceback_later()


def say(line: str) -> None:
    """Print a line to stderr in the first process; ignore errors, such as a closed pipe."""
    if multihost.is_first():
        with contextlib.suppress(OSError, ValueError):
            print(escaped(line), file=sys.stderr, flush=True)
