"""Workarounds for defects of Orbax 0.12 and TensorStore 0.1.86: growing memory, and tracebacks of failed saves."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from orbax.checkpoint._src.serialization import tensorstore_utils

if TYPE_CHECKING:
    from sys import UnraisableHookArgs as Unraisable

Spec = dict[str, object]  # of TensorStore, as JSON


@functools.cache
def stop_leak() -> None:
    """Keep the memory of a process from growing with each save.

    TensorStore never frees the Python objects in the JSON that it returns. Orbax asks for such JSON once for each array
    that it saves, only to learn the default fields of the folder's spec, and twice for each item, only to log a rate.
    """
    _replace("_build_ocdbt_kvstore_tspec", _once_per_folder)
    _replace("get_tensorstore_raw_bytes", lambda _: lambda *_: 0)


def _once_per_folder(build: Callable[..., Spec]) -> Callable[..., Spec]:
    """Return a function that computes the spec of a folder once, and adds the name of each array to a copy of it."""
    latest: dict[str, Spec] = {}

    def spec(directory: str, name: str | None = None, **options: object) -> Spec:
        key = repr((directory, options))
        if key not in latest:
            latest.clear()
            latest[key] = build(directory, None, **options)
        found = copy.deepcopy(latest[key])
        return found if name is None else {**found, "path": name}

    return spec


def _replace(name: str, wrap: Callable[[Callable[..., Spec]], Callable[..., object]]) -> None:
    """Replace a private function of Orbax, if its version has such a function."""
    if original := getattr(tensorstore_utils, name, None):
        setattr(tensorstore_utils, name, wrap(original))


@functools.cache
def silence_failed_saves() -> None:
    """Print no traceback when a save fails: the caller of Orbax gets the first error, and reports it in one line.

    Orbax closes its event loop at the first error of a save. Other writes that are still in progress then report their
    own errors to asyncio's logger, or cannot report their success because the loop is closed.
    """
    logging.getLogger("asyncio").addFilter(lambda record: "was never retrieved" not in record.getMessage())
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    report = sys.unraisablehook

    def except_closed_loop(error: Unraisable) -> None:
        closed = error.object is None and str(error.exc_value) == "Event loop is closed"
        if not closed and error.object is not asyncio.BaseEventLoop.__del__:  # of a loop that could not be opened
            report(error)

    sys.unraisablehook = except_closed_loop  # TensorStore's threads call it
