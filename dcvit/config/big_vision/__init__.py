"""Config files of big_vision: the modules that they import, and the translation of their keys."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator

from dcvit.config.big_vision import arguments
from dcvit.config.big_vision.part import Values
from dcvit.config.big_vision.translation import is_big_vision, translate

__all__ = ["Values", "importable", "is_big_vision", "translate"]


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Make the modules importable that config files of big_vision import, inside the context.

    A big_vision that can be imported is used: configs below `proj` import more of it.
    """
    is_there = "big_vision" in sys.modules
    with contextlib.suppress(ImportError):
        importlib.import_module("big_vision.configs.common")
        is_there = True
    if is_there:
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
        for name in [name for name in sys.modules if name.partition(".")[0] == "big_vision"]:
            del sys.modules[name]
