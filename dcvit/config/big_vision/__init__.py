"""Config files of big_vision: the modules that they import, and the translation of their keys."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

from dcvit.config.big_vision import arguments
from dcvit.config.big_vision.translation import is_big_vision, translate

__all__ = ["importable", "is_big_vision", "translate"]


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Make the modules importable that config files of big_vision import, inside the context."""
    if "big_vision" in sys.modules:
        yield
        return
    modules = {name: types.ModuleType(name) for name in ("big_vision", "big_vision.configs")}
    for package in modules.values():
        package.__path__ = []
    modules |= {"big_vision.configs.common": arguments, "big_vision.configs.common_fewshot": arguments}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
