"""Verdicts on implementations of attention, kept as JSON for each kind of device and version of the software.

The folder is $DCVIT_CACHE, or else `dcvit/kernels` in $XDG_CACHE_HOME or `~/.cache`. It has one file for each
environment (`environment`), so that a new version of JAX, of its backend or of this package begins without verdicts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import jax

from dcvit.versions import __version__

LOG = logging.getLogger(__name__)
LARGEST_ERROR = 2e-2  # of an implementation that passed
PASSED, WRONG, FAILED, TIMED_OUT, STARTED = ("passed", "wrong", "failed", "timed out", "started")
BAD = (WRONG, FAILED, TIMED_OUT)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of verifying one implementation on one case (`dcvit.dcmha.verification.Case`).

    Fields:
      status: one of the names above. "started" is written before the implementation runs; if it is found later, the
        process ended meanwhile.
      error: largest relative error of the output and the gradients, in the 2-norm; None if unknown.
      milliseconds: median time of the output and the gradients; None if it was not timed.
      reason: why the status is not "passed".
      forward_milliseconds: median time of the output alone; None if it was not timed.
    """

    status: str
    error: float | None = None
    milliseconds: float | None = None
    reason: str = ""
    forward_milliseconds: float | None = None

    @property
    def passed(self) -> bool:
        """True if the implementation may be selected automatically."""
        return self.status == PASSED


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
    """Return the properties that verdicts depend on: kind of device, versions of JAX, its backend and this package."""
    return {
        "device": device.device_kind, "jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib"),
        "backend": " ".join(device.client.platform_version.split()), "dcvit": __version__,
    }  # fmt: skip


class Verdicts:
    """File with the verdicts of one environment, by the key of a case and the name of an implementation."""

    def __init__(self, environment: Mapping[str, str]):
        """Choose the file of an environment, which the function `environment` returns; it need not exist."""
        self.environment = dict(environment)
        name = hashlib.sha256(json.dumps(self.environment, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder() / f"{name}.json"

    def read(self, key: str) -> dict[str, Verdict]:
        """Return the verdicts on the case `key` by name of the implementation. A corrupt file is treated as missing."""
        return self._read().get(key, {})

    def write(self, key: str, name: str, verdict: Verdict | None) -> None:
        """Write the verdict on implementation `name` for case `key`; None removes it. OSError is logged, not raised."""
        try:
            found = self._read()
            found.setdefault(key, {}).pop(name, None)
            if verdict is not None:
                found[key][name] = verdict
            cases = {key: {name: dataclasses.asdict(v) for name, v in some.items()} for key, some in found.items()}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(f".{os.getpid()}")  # renamed, because other processes read the file
            fresh.write_text(json.dumps({"environment": self.environment, "cases": cases}, indent=1))
            fresh.replace(self.path)
        except OSError as e:
            LOG.warning("attention: verdicts are not kept: %s", e)

    def forget(self) -> None:
        """Remove all verdicts."""
        self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def verifying(self) -> Iterator[None]:
        """Context manager that one process at a time enters, where flock(2) works; others wait."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(ImportError, OSError):
                import fcntl

                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(self.path.with_suffix(".lock").open("ab"))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read(self) -> Cases:
        """Return all verdicts of the file; none, after a warning, if it is damaged."""
        try:
            cases = json.loads(self.path.read_text())["cases"].items()
            return {key: {name: Verdict(**fields) for name, fields in some.items()} for key, some in cases}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            LOG.warning("attention: ignored the verdicts in %s: %s", self.path, e)
            return {}
