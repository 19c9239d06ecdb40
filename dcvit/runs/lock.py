"""Lock of a local workdir: at most one run at a time writes to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from dcvit.errors import ConfigError
from dcvit.runs.files import file_identity

LOCK = ".lock"
LOCK_SECONDS = 0.2  # how long a run tries: `is_locked` in another process holds the lock for an instant


class WorkdirLock:
    """Context manager that holds the lock of a workdir until it exits or its process ends.

    The file `.lock`, which names the process, is locked with flock(2); the system releases the lock of a killed one.
    """

    def __init__(self, workdir: Path):
        """Acquire the lock.

        Raises:
          ConfigError: another process, which the message names, holds the lock, or the workdir cannot be written.
        """
        self.path = workdir / LOCK
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise ConfigError(f"{self.path} is not a regular file, and a run does not write to it; remove it")
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a")
        except OSError as e:
            raise ConfigError(f"cannot write to workdir {workdir}: {e.strerror or e}") from None
        try:
            is_ours = _lock(self.file)
        except OSError as e:
            self.file.close()
            raise ConfigError(f"workdir {workdir} cannot be locked: {e.strerror or e}") from None
        if not is_ours:
            self.file.close()
            owner = self.path.read_text().strip() or "another run"
            raise ConfigError(f"workdir {workdir} is in use by {owner}")
        with contextlib.suppress(OSError):  # on a full disk the file stays empty and the lock holds all the same
            self.path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}\n")

    def check(self) -> None:
        """Raise ConfigError if the file `.lock` was removed or replaced, so that another run could lock the workdir."""
        if file_identity(self.path) != file_identity(self.file.fileno()):
            raise ConfigError(f"{self.path} was removed or replaced during the run: another run may use the workdir")

    def __enter__(self) -> WorkdirLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def is_locked(workdir: Path) -> bool:
    """Return True if a run holds the lock of a workdir."""
    try:
        number = os.open(workdir / LOCK, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(number)  # also unlocks it
    return False


def _lock(file: TextIO) -> bool:
    """Lock an open file; return False if another process holds the lock for `LOCK_SECONDS`."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOCK_SECONDS / 10)
        else:
            return True
