"""A process of limited time and memory, for what a file of a user can make a library do."""

import contextlib
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from input_pipeline import limited_worker
from input_pipeline.errors import InputError

SECONDS = 10  # limit of CPU time of each call, to which `limited_worker` adds time for the bytes of the request
CAUSES: dict[int, str] = {  # by the signal that ended the process
    signal.SIGXCPU: "the limit of time is exceeded",
    signal.SIGABRT: "the limit of memory is exceeded",
    signal.SIGKILL: "the process was killed, most likely because the machine has too little memory",
}


class LimitedProcess:
    """A process that answers requests, with the limits of `input_pipeline.limited_worker`.

    The process ends with this object. Several threads may use it.

    Args:
      handler: a Python file that defines the class `Handler`, as `input_pipeline.limited_worker` describes.
    """

    def __init__(self, handler: str | Path):
        self._process = subprocess.Popen(
            [sys.executable, "-P", limited_worker.__file__, handler, str(SECONDS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._process)

    def __call__(self, *request: bytes) -> list[bytes]:
        """Send a request and return the reply. Raises InputError with the cause of a failure in one line."""
        assert self._process.stdin
        assert self._process.stdout
        with self._lock:
            try:
                with contextlib.suppress(BrokenPipeError):  # the process has ended
                    limited_worker.write(self._process.stdin, request)
                reply = limited_worker.read(self._process.stdout)
            except BaseException:  # the next reply would be that of this request
                self._process.kill()
                raise
        if not reply:
            status = self._process.wait()
            raise InputError(CAUSES.get(-status, f"the process ended with status {status}"))
        error, *result = reply
        if error:
            raise InputError(error.decode(errors="replace").splitlines()[0])
        return result


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and release its pipes."""
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:  # closes the pipes and waits
        pass
