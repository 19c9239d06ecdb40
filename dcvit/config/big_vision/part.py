"""One dict of a config during its translation, with notes of what becomes of its keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from dcvit.config.keys import UNITS
from dcvit.errors import ConfigError

Values: TypeAlias = dict[str, Any]  # a dict of a config
MAX_SHOWN = 60  # characters of a value in a note


class Part:
    """A dict of a config: the config itself, or one of its values.

    Attributes:
      values: the keys that are not None, which the methods change.
      name: name of the dict in messages, such as "config.input".
      notes: the names of the parts in which each change was made, for the changes of all parts of a config.
    """

    def __init__(self, values: object, name: str, notes: dict[str, list[str]]):
        """Copy the dict. Raises ConfigError if `values` is neither a dict nor None."""
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"{name}={values!r} should be a dict")
        self.values: Values = {key: value for key, value in (values or {}).items() if value is not None}
        self.name, self.notes = name, notes

    def note(self, text: str) -> None:
        """Add the description of a change to the notes."""
        self.notes.setdefault(text, []).append(self.name)

    def inner(self, key: str) -> Part:
        """Remove the dict at `key` and return it as a part, which is empty if there is no such dict."""
        return Part(self.values.pop(key, None), f"{self.name}.{key}", self.notes)

    def put(self, key: str, value: object, old: str = "") -> None:
        """Set a key, and note that it replaces the key `old`, or that the value is big_vision's default."""
        self.values[key] = value
        shown = repr(value)
        shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
        self.note(f"{old} -> {key}={shown}" if old else f"{key}={shown}, big_vision's default")

    def rename(self, old: str, new: str) -> None:
        """Rename a key, if there is one."""
        if old in self.values:
            self.values[new] = self.values.pop(old)
            self.note(f"{old} -> {new}")

    def drop(self, reasons: Mapping[str, str]) -> None:
        """Remove keys that do not affect the result, and note the reason that is given for each."""
        for key, reason in reasons.items():
            if self.values.pop(key, None) is not None:
                self.note(f"{key} is dropped: {reason}")

    def refuse(self, key: str, reason: str) -> ConfigError:
        """Return the error about a key that has no equivalent."""
        return ConfigError(f"{self.name}.{key}={self.values[key]!r} of big_vision has no equivalent: {reason}")

    def expect(self, key: str, known: Collection[object], reason: str) -> None:
        """Remove a key whose value is in `known`, so that dcvit needs no key for it. ConfigError for another value."""
        if key in self.values and self.values[key] not in known:
            raise self.refuse(key, reason)
        self.values.pop(key, None)

    def durations(self, names: Mapping[str, str]) -> None:
        """Rename durations, as `names` maps them; percentages, which are fractions in big_vision, are converted."""
        for old, new in names.items():
            for unit in UNITS:
                value = self.values.pop(f"{old}_{unit}", None)
                if value is None:
                    continue
                converted = value
                if unit == "percent":
                    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                        raise ConfigError(f"{self.name}.{old}_percent={value!r} should be in [0, 1] in big_vision")
                    converted = round(100 * value, 9)
                self.values[f"{new}_{unit}"] = converted
                if old != new or unit == "percent":
                    self.note(f"{old}_{unit}={value} -> {new}_{unit}={converted}")
