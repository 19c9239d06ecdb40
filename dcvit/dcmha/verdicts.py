"""Verdicts on implementations of attention, kept as JSON for each kind of device, version of JAX and state of the code.

The folder is $DCVIT_CACHE, or else `dcvit/kernels` in $XDG_CACHE_HOME or `~/.cache`. It has one file for each
environment (`environment`), so that a new version of JAX, of the driver or of the kernels begins without verdicts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import jax

LOG = logging.getLogger(__name__)
FORMAT = 3
LARGEST_ERROR = 2e-2  # of an implementation that passed
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
    """

    status: str
    error: float | None = None
    milliseconds: float | None = None
    reason: str = ""
    forward_milliseconds: float | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if the implementation may be selected automatically."""
        return self.status == PASSED

    def is_final(self, seconds: float) -> bool:
        """Return False if the implementation should be tried again with a limit of `seconds`.

        A failure or a time-out is tried again with a longer limit. A wrong result is final in its environment.
        """
        return self.status in (PASSED, WRONG) or (self.status != STARTED and seconds <= self.seconds)


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


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context manager: wait for the lock of a file with flock(2), and hold it; it also ends with the process.

    Without flock, on Windows and some network file systems, of two verdicts written at the same time one may be lost.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
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

    def forget(self) -> None:
        """Remove all verdicts."""
        self._change(dict.clear)

    def _change(self, change: Callable[[Cases], None]) -> None:
        try:
            with _locked(self.path.with_suffix(".lock")):
                found = self._read()  # another process may have added verdicts
                change(found)
                cases = {key: {name: dataclasses.asdict(v) for name, v in some.items()} for key, some in found.items()}
                content = {"format": FORMAT, "environment": self.environment, "cases": cases}
                fresh = self.path.with_suffix(".tmp")  # of the process that has the lock
                fresh.write_text(json.dumps(content, indent=1))
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
            content = json.loads(self.path.read_text())
            if content["format"] != FORMAT or content["environment"] != self.environment:
                raise ValueError("it has another format or belongs to another environment")
            cases = content["cases"].items()
            found = {key: {name: Verdict(**fields) for name, fields in some.items()} for key, some in cases}
            if statuses := {verdict.status for some in found.values() for verdict in some.values()} - {*STATUSES}:
                raise ValueError(f"it has the status {statuses.pop()!r}")
            return found
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            LOG.warning("attention: ignored the verdicts in %s: %s", self.path, e)
            return {}
