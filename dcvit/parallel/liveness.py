"""Heartbeats between the processes of a run, by which each process notices that another one was killed or stopped.

Each process sets its key in the coordinator's key-value store to a new value every `BEAT_SECONDS`. Process 0 reports a
process whose value does not change; the others report process 0 if it does not answer. Silence is measured in polls of
this process, not by a clock, so that a process which was stopped itself and continues does not blame the others. C code
that holds the interpreter lock for `LOST_SECONDS` counts as a stopped process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from dcvit.errors import first_line

LOST_SECONDS = 30  # of silence
BEAT_SECONDS = 2
POLL_SECONDS = 0.5  # between two looks at the message of a failed process
FAILURE, ALIVE = "dcvit/failure", "dcvit/alive"  # key of the message of the first failure, folder of the heartbeats
LEFT = "left"  # the last heartbeat of a process that ends without an error


@runtime_checkable
class Coordinator(Protocol):
    """The part of JAX's client of the coordinator that is used here and in `dcvit.parallel.multihost`."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Set a key. Raise an exception if the key exists, unless it may be overwritten."""

    def key_value_try_get(self, key: str) -> str:
        """Return the value of a key. Raise an exception with "NOT_FOUND" if it does not exist."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Return the keys and values in a folder."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Return the value of a key, after waiting for it."""


class Liveness:
    """Two threads: one exchanges heartbeats with the coordinator, the other one measures how long that takes."""

    def __init__(self, coordinator: Coordinator, index: int, count: int, end: Callable[[str], None]):
        """Start the threads.

        Args:
          coordinator: the client of the coordinator.
          index: the index of this process.
          count: the number of processes.
          end: ends this process because of a failure, which is given as a clause, such as "process 1 was lost".
        """
        self.coordinator, self.index, self.count, self.end = coordinator, index, count, end
        self.leaving = threading.Event()
        self.answers = 0  # number of polls that the coordinator has answered
        self.error = ""  # of the last poll
        self.silence: dict[int, tuple[str, int]] = {}  # in process 0: last value of each process, how often it was seen
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange, self._await_answers)]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Send the last heartbeat: from now on, silence is not a failure."""
        self.leaving.set()
        for thread in self.threads:
            thread.join(LOST_SECONDS)

    def _exchange(self) -> None:
        beats_due = round(BEAT_SECONDS / POLL_SECONDS)
        while not self.leaving.wait(POLL_SECONDS):
            try:
                if self.answers % beats_due == 0:
                    self._beat(str(self.answers))
                failure = self.coordinator.key_value_try_get(FAILURE)
            except Exception as e:
                if "NOT_FOUND" not in str(e):
                    self.error = f": {first_line(e)}"  # it may pass
                    continue
                failure = ""
            self.answers, self.error = self.answers + 1, ""
            if failure:
                self.end(failure)
        with contextlib.suppress(Exception):  # the coordinator may have ended
            self._beat(LEFT)

    def _beat(self, value: str) -> None:
        """Send a heartbeat; in process 0, report a process that has given none for too long."""
        self.coordinator.key_value_set(f"{ALIVE}/{self.index}", value, allow_overwrite=True)
        if self.index:
            return
        values = dict(self.coordinator.key_value_dir_get(ALIVE))
        for process in range(self.count):
            found = values.get(f"{ALIVE}/{process}", "")
            before, times = self.silence.get(process, (found, 0))
            self.silence[process] = found, times + 1 if found == before else 0
            if found != LEFT and self.silence[process][1] * BEAT_SECONDS >= LOST_SECONDS:
                lost = f"process {process} was lost: no heartbeat for {LOST_SECONDS} s"
                with contextlib.suppress(Exception):  # another failure was reported before
                    self.coordinator.key_value_set(FAILURE, lost)

    def _await_answers(self) -> None:
        answered, polls = 0, 0
        while not self.leaving.wait(1):
            answered, polls = self.answers, polls + 1 if self.answers == answered else 0
            if polls >= LOST_SECONDS:
                self.end(f"process 0 was lost: no answer for {LOST_SECONDS} s{self.error}")
