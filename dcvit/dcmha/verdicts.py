"""Verdicts on implementations of attention, kept as JSON for each kind of device, version of JAX and state of the code.

The folder is $DCVIT_CACHE, or else `dcvit/kernels` in $XDG_CACHE_HOME or `~/.cache`. It has one file for each
environment (`environment`), so that a new version of JAX, of the driver or of the kernels begins without verdicts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeAlias

import jax

LOG = logging.getLogger(__name__)
FORMAT = 2
LARGEST_ERROR = 2e-2  # of an implementation that passed
MAX_BYTES = 2**24  # of a file; a verdict takes about 1 kB
DAY = 24 * 60 * 60.0  # seconds, after which an implementation that failed is tried again
PASSED, WRONG, FAILED, TIMED_OUT, STARTED = STATUSES = ("passed", "wrong", "failed", "timed out", "started")
BAD = (WRONG, FAILED, TIMED_OUT)
# What compiles programs: its versions and its flags.
PACKAGES = (
    "jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda13-plugin",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc",
)  # fmt: skip
DRIVER = Path("/proc/driver/nvidia/version")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of verifying one implementation on one case (`dcvit.dcmha.verification.Case`).

    Fields:
      status: one of `STATUSES`. "started" is written before the implementation runs; if it is found later, the process
        ended meanwhile, and the implementation is tried once more, with the reason "again".
      error: largest relative error of the output and the gradients, in the 2-norm; None if unknown.
      milliseconds: median time of the output and the gradients; None if it was not timed.
      reason: why the status is not "passed".
      forward_milliseconds: median time of the output alone; None if it was not timed.
      seconds: the time limit with which the implementation was compiled and run.
      when: time of the verdict, in seconds since 1970.
      tries: how often the implementation was tried.
    """

    status: str
    error: float | None = None
    milliseconds: float | None = None
    reason: str = ""
    forward_milliseconds: float | None = None
    seconds: float = 0.0
    when: float = dataclasses.field(default_factory=time.time)
    tries: int = 1

    @property
    def passed(self) -> bool:
        """True if the implementation may be selected automatically."""
        return self.status == PASSED

    def is_final(self, seconds: float) -> bool:
        """Return False if the implementation should be tried again with a limit of `seconds`.

        A failure or a time-out is tried again with a longer limit, and once more a day later. A wrong result is final
        in its environment.
        """
        is_recent = abs(time.time() - self.when) < DAY or self.tries > 1
        return self.status in (PASSED, WRONG) or (self.status != STARTED and seconds <= self.seconds and is_recent)


Cases: TypeAlias = dict[str, dict[str, Verdict]]  # by the key of a case and the name of an implementation


def fastest(found: Mapping[str, Verdict], *, forward_only: bool = False) -> str:
    """Return the implementation that passed in the shortest time (of the output alone if `forward_only`), or ""."""
    passed = {name: verdict for name, verdict in found.items() if verdict.passed}
    times = {name: (v.forward_milliseconds if forward_only else v.milliseconds) or 0.0 for name, v in passed.items()}
    return min(times, key=lambda name: times[name], default="")


def folder() -> Path:
    """Return the folder of the files with verdicts; see the module."""
    if chosen := os.environ.get("DCVIT_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - never raises
    return Path(base) / "dcvit" / "kernels"


def environment(device: jax.Device) -> dict[str, str]:
    """Return the properties that verdicts depend on: kind of device, compiler versions and flags, hash of the code."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    backend = " ".join(device.client.platform_version.split())
    flags = {name: os.environ[name] for name in FLAGS if os.environ.get(name)}
    return {
        "device": device.device_kind, **versions, "backend": backend, "driver": _driver(), **flags,
        "code": _hash_of_code(),
    }  # fmt: skip


def _driver() -> str:
    """Return the version of the NVIDIA driver, or "" without one."""
    with contextlib.suppress(OSError):
        return DRIVER.read_text().partition("\n")[0]
    return ""


@functools.cache
def _hash_of_code() -> str:
    """Return a hash of the source code of `dcvit.dcmha`."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _open(path: Path, flags: int) -> BinaryIO:
    """Return a file opened without following a link or waiting for a pipe; OSError (ELOOP) if it is not regular."""
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # which Windows lacks
    number = os.open(path, flags | safe, 0o666)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.ELOOP, "not a regular file", str(path))
    return os.fdopen(number, "rb" if flags == os.O_RDONLY else "r+b")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context manager: wait for the lock of a file with flock(2), and hold it; it also ends with the process.

    Without flock, on Windows and some network file systems, of two verdicts written at the same time one may be lost.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _open(path, os.O_RDWR | os.O_CREAT) as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Verdicts:
    """File with the verdicts of one environment, by the key of a case and the name of an implementation."""

    def __init__(self, environment: Mapping[str, str]):
        """Choose the file of an environment, which the function `environment` returns; it need not exist."""
        self.environment = dict(environment)
        name = hashlib.sha256(json.dumps(self.environment, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder() / f"{name}.json"

    def read(self, key: str) -> dict[str, Verdict]:
        """Return the verdicts on the case `key` by name of the implementation. A corrupt file is treated as missing."""
        try:
            return self._read().get(key, {})
        except OSError as e:
            LOG.warning("attention: cannot read the verdicts in %s: %s", self.path, e)
            return {}

    def write(self, key: str, name: str, verdict: Verdict | None) -> None:
        """Write the verdict on implementation `name` for case `key`; None removes it. OSError is logged, not raised."""

        def change(found: Cases) -> None:
            found.setdefault(key, {}).pop(name, None)
            if verdict is not None:
                found[key][name] = verdict

        self._change(change)

    def forget(self, name: str | None = None) -> None:
        """Remove the verdicts on the implementation `name` for all cases; None removes all verdicts."""

        def change(found: Cases) -> None:
            for some in found.values():
                some.clear() if name is None else some.pop(name, None)

        self._change(change)

    def _change(self, change: Callable[[Cases], None]) -> None:
        try:
            with _locked(self.path.with_suffix(".lock")):
                found = self._read()  # another process may have added verdicts
                change(found)
                cases = {key: {name: dataclasses.asdict(v) for name, v in some.items()} for key, some in found.items()}
                content = {"format": FORMAT, "environment": self.environment, "cases": cases}
                fresh = self.path.with_suffix(".tmp")  # of the process that has the lock
                fresh.unlink(missing_ok=True)
                with _open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                    file.write(json.dumps(content, indent=1).encode())
                fresh.replace(self.path)
        except OSError as e:
            LOG.warning("attention: verdicts are not kept: %s", e)

    @contextlib.contextmanager
    def verifying(self) -> Iterator[None]:
        """Context manager that only one process at a time can enter; others wait."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # the folder cannot be written, which `write` reports
                stack.enter_context(_locked(self.path.with_suffix(".verifying.lock")))
            yield

    def _read(self) -> Cases:
        """Return all verdicts of the file; none, after a warning, if it is damaged or of another environment.

        Raises:
          OSError: the file exists and cannot be read.
        """
        try:
            with _open(self.path, os.O_RDONLY) as file:
                text = file.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            content = json.loads(text, object_pairs_hook=_unique)
            if content["format"] != FORMAT or content["environment"] != self.environment:
                raise ValueError("it has another format or belongs to another environment")
            return {
                key: {name: _verdict(fields) for name, fields in some.items()} for key, some in content["cases"].items()
            }
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as e:
            if isinstance(e, OSError) and e.errno != errno.ELOOP:
                raise
            LOG.warning("attention: ignored the verdicts in %s: %s", self.path, e)
            return {}


def _verdict(fields: Mapping[str, object]) -> Verdict:
    """Return the verdict from its fields in JSON; raise ValueError or TypeError if they are invalid."""
    verdict = Verdict(**fields)  # type: ignore[arg-type]
    measured = [x for x in (verdict.error, verdict.milliseconds, verdict.forward_milliseconds) if x is not None]
    numbers = [*measured, verdict.seconds, verdict.when, verdict.tries]
    if verdict.status not in STATUSES or not all(type(x) in (int, float) and 0 <= x < 1e308 for x in numbers):
        raise ValueError(f"a verdict has invalid fields: {fields}")
    if verdict.passed and (len(measured) != 3 or verdict.reason or measured[0] > LARGEST_ERROR):
        raise ValueError(f"a verdict has passed without time, with a large error, or with a reason: {fields}")
    return verdict


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object from its pairs; raise ValueError if a name occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name occurs twice")
    return fields
