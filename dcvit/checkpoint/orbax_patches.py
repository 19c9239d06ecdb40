"""Workarounds for defects of Orbax 0.12 and TensorStore 0.1.86. Each replaces one private function of Orbax.

A version of Orbax without such a function is used as it is.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from orbax.checkpoint._src.serialization import tensorstore_utils

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
    if original := getattr(tensorstore_utils, name, None):
        setattr(tensorstore_utils, name, wrap(original))
