"""One dict of a config during its translation, with notes of what becomes of its keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

from dcvit.errors import ConfigError

Values: TypeAlias = dict[str, Any]  # a dict of a config


class Part:
    """A dict of a config: the config itself, or one of its values.

    Attributes:
      values: the keys that are not None, which the methods change.
      name: name of the dict in messages, such as "config.input".
      notes: a line for each change, for the changes of all parts of a config.
    """

    def __init__(self, values: object, name: str, notes: list[str]):
        """Copy the dict. Raises ConfigError if `values` is neither a dict nor None."""
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"{name}={values!r} should be a dict")
        self.values: Values = {key: value for key, value in (values or {}).items() if value is not None}
        self.name, self.notes = name, notes

    def note(self, text: str) -> None:
        """Add the description of a change to the notes."""
        self.notes.append(f"{self.name}: {text}")

    def inner(self, key: str) -> Part:
        """Remove the dict at `key` and return it as a part, which is empty if there is no such dict."""
        return Part(self.values.pop(key, None), f"{self.name}.{key}", self.notes)

    def put(self, key: str, value: object, old: str) -> None:
        """Set a key, and note what it replaces."""
        self.values[key] = value
        self.note(f"{old} -> {key}={value!r}")

    def rename(self, old: str, new: str) -> None:
        """Rename a key, if there is one."""
        if old in self.values:
            self.values[new] = self.values.pop(old)
            self.note(f"{old} -> {new}")

    def drop(self, keys: Iterable[str]) -> None:
        """Remove keys that do not affect the result."""
        for key in keys:
            if self.values.pop(key, None) is not None:
                self.note(f"{key} is dropped: it has no effect on the result")

    def expect(self, key: str, known: Collection[object]) -> None:
        """Remove a key whose value is in `known`, so that dcvit needs no key for it. ConfigError for another value."""
        if key in self.values and self.values[key] not in known:
            raise ConfigError(f"{self.name}.{key}={self.values[key]!r} of big_vision has no equivalent")
        self.values.pop(key, None)

    def durations(self, names: Iterable[str]) -> None:
        """Convert durations in percent, which are fractions from 0 to 1 in big_vision."""
        for key in (f"{name}_percent" for name in names):
            if (fraction := self.values.get(key)) is not None:
                if not 0 <= fraction <= 1:
                    raise ConfigError(f"{self.name}.{key}={fraction!r} should be in [0, 1] in big_vision")
                self.put(key, round(100 * fraction, 9), f"{key}={fraction}")
