"""Values of a config: defaults, checks, durations in steps, config.json of a run, and changed copies."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from etils import epath
from ml_collections import ConfigDict

from dcvit.config.keys import DURATIONS, INPUT_KEYS, KEYS, RANGES, UNITS, is_rate
from dcvit.errors import REMOVED, ConfigError, check_regex, first_line, has_type, nearest, type_name
from input_pipeline.files import expand

Json: TypeAlias = dict[str, Any]
MAX_STEPS = 2**31 - 1  # the number of a step is an int32 on the devices
Options: TypeAlias = Mapping[str, Any] | ConfigDict


def defaults() -> Json:
    """Return the default value of each key of `KEYS`, the keys of a config except durations."""
    return {name: key.default for name, key in KEYS.items()}


def known_keys() -> list[str]:
    """Return every top-level key that a config may hold, durations included."""
    return [*KEYS, *(f"{d}_{u}" for d in DURATIONS for u in UNITS)]


def describe_keys() -> list[tuple[str, str, str, str]]:
    """Return (key, type, default, meaning) of every key of a config, with durations first."""
    units = "|".join(UNITS)
    rows = [(f"{name}_({units})", "number", "", text) for name, text in DURATIONS.items()]
    for prefix, keys in (("", KEYS), ("input.", INPUT_KEYS)):
        rows += [(f"{prefix}{name}", type_name(key.type), repr(key.default), key.doc) for name, key in keys.items()]
    return rows


def check_types(config: ConfigDict) -> None:
    """Raise ConfigError for a top-level value of the wrong type or outside its range."""
    for key, (hint, _, _) in KEYS.items():
        value = config[key].to_dict() if isinstance(config[key], ConfigDict) else config[key]
        if not has_type(value, hint):
            expected = type_name(hint)
            raise ConfigError(f"config.{key}={value!r} should be of type {expected}, not {type(value).__name__}")
    for key, (holds, expected) in RANGES.items():
        if not holds(config[key]):
            name = f"config.{key}={config[key]}"
            removed = f"; {nearest(name, ())}" if name in REMOVED else ""
            raise ConfigError(f"config.{key}={config[key]!r} should be {expected}{removed}")
    for key in ("wd_mults", "lr_mults", "frozen"):
        paired = key != "frozen"
        for rule in config[key]:
            if paired and not (isinstance(rule, list | tuple) and len(rule) == 2 and is_rate(rule[1])):
                raise ConfigError(f"config.{key}={config[key]!r} should be pairs (regex, finite multiplier, 0 or more)")
            check_regex(rule[0] if paired else rule, f"config.{key}")


def read_json(path: Path | epath.Path) -> ConfigDict:
    """Read the config.json of a workdir and return the checked and locked config.

    Raises:
      ConfigError: the file is missing or unreadable.
    """
    return _checked(_json_object(path), path)


def run_config(checkpoint: str) -> Json:
    """Return the config of a run, given by its workdir or a checkpoint folder as `checkpoint`; {} for another path.

    The config.json of another library has no `model_name`.
    """
    if not checkpoint or "://" in checkpoint:
        return {}
    place = expand(checkpoint).absolute()
    for folder in (place, place.parent.parent) if place.parent.name == "checkpoints" else (place,):
        if (folder / "config.json").is_file():
            found = _json_object(folder / "config.json")
            return _checked(found, folder / "config.json").to_dict() if "model_name" in found else {}
    return {}


def _checked(found: Json, path: Path | epath.Path) -> ConfigDict:
    """Return the content of a config.json as a checked and locked config."""
    try:
        config = ConfigDict(defaults() | found)
        check_types(config)
    except (ValueError, TypeError, RecursionError) as e:
        raise ConfigError(f"cannot read {path}: {first_line(e)}") from None
    return config.lock()


def _json_object(path: Path | epath.Path) -> Json:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"expected a JSON object, not a {type(found).__name__}")
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"cannot read {path}: {first_line(e)}") from None
    return found


def replaced(config: ConfigDict, **values: Any) -> ConfigDict:
    """Return a copy of a config with the keys given as keyword arguments replaced."""
    changed = config.copy_and_resolve_references().unlock()
    with changed.ignore_type():
        for key, value in values.items():
            changed[key] = value
    return changed.lock()


def with_classes(config: ConfigDict, num_classes: int) -> ConfigDict:
    """Return a copy of a config with `num_classes`, also in place of "{num_classes}" in preprocessing strings."""
    filled = replaced(config, num_classes=num_classes).unlock()
    for holder in (filled.input, *filled.evals.values()):
        if isinstance(holder, ConfigDict) and isinstance(holder.get("pp"), str):
            holder.pp = holder.pp.replace("{num_classes}", str(num_classes))
    return filled.lock()


def is_duration(key: str, prefixes: Iterable[str]) -> bool:
    """Return True if `key` is one of `prefixes` with a unit, such as "total_epochs"."""
    prefix, _, unit = key.rpartition("_")
    return prefix in prefixes and unit in UNITS


@dataclasses.dataclass(frozen=True)
class Durations:
    """Conversion of the durations of a run to steps.

    Fields:
      batch_size: examples in a step.
      examples: examples in an epoch.
      total_steps: the length of training, to which percentages refer; None if it is not known yet.
    """

    batch_size: int
    examples: int
    total_steps: int | None = None

    def steps(self, config: Options, name: str, default: int | None = None, what: str = "config") -> int | None:
        """Return a duration in steps, given in `config` as `name`_steps, _epochs, _examples or _percent.

        Args:
          config: the config, or a part of it.
          name: the duration's name.
          default: the result if the duration is not given.
          what: the name of `config` in error messages.

        Raises:
          ConfigError: the duration is given in several units, is not a non-negative number, or is a percentage of
            itself.
        """
        units = [unit for unit in UNITS if config.get(f"{name}_{unit}") is not None]
        if not units:
            return default
        if len(units) > 1:
            keys = ", ".join(f"{what}.{name}_{unit}={config[f'{name}_{unit}']!r}" for unit in units)
            deletions = " or ".join(f"`del {what}.{name}_{unit}`" for unit in units)
            raise ConfigError(f"{keys}: give exactly one of them; a file that changes another config needs {deletions}")
        key, value = f"{what}.{name}_{units[0]}", config[f"{name}_{units[0]}"]
        if not is_rate(value):
            raise ConfigError(f"{key}={value!r} should be a number, 0 or more")
        if units[0] == "percent" and self.total_steps is None:
            raise ConfigError(f"{key}: the total cannot be a percentage of itself")
        per_unit = {
            "steps": 1.0, "epochs": self.examples / self.batch_size, "examples": 1 / self.batch_size,
            "percent": (self.total_steps or 0) / 100,
        }  # fmt: skip
        steps = value * per_unit[units[0]]
        if steps > MAX_STEPS:
            raise ConfigError(f"{key}={value!r} is more than {MAX_STEPS:,} steps")
        return max(1, round(steps)) if value > 0 else 0
