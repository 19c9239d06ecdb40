"""Values of a config: defaults, checks, config.json of a run, and changed copies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from etils import epath
from ml_collections import ConfigDict

from dcvit.config.keys import DURATIONS, INPUT_KEYS, KEYS, RANGES, UNITS, is_rate
from dcvit.errors import REMOVED, ConfigError, check_regex, first_line, has_type, nearest, type_name
from input_pipeline.files import expand

Json: TypeAlias = dict[str, Any]
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


def fold_evaluator(config: ConfigDict) -> str:
    """Return the name of the evaluator that reads the fold which a run holds out: `val`, or the only one.

    Raises:
      ConfigError: there is none.
    """
    name = "val" if "val" in config.evals or len(config.evals) != 1 else next(iter(config.evals))
    if not isinstance(config.evals.get(name), ConfigDict):
        names = ", ".join(config.evals) or "none"
        raise ConfigError(f"--folds needs the evaluator config.evals.val, which reads the fold held out; found {names}")
    return name


def with_fold(config: ConfigDict, fold: str) -> ConfigDict:
    """Return a copy of a config that trains on the training data without a fold, such as "fold 1 of 5".

    The evaluator of `fold_evaluator` reads this fold instead of its own data. The folds of image folders are those of
    all images, or of the folder train; `val_fraction` holds out no others.

    Raises:
      ConfigError: the config has no such evaluator, or already trains on a part of the data.
    """
    name, data = fold_evaluator(config), config.input.data.to_dict()
    part = data.get("part")
    if part is not None and not isinstance(part, str):
        raise ConfigError(f"config.input.data.part={part!r} and --folds choose the training data: omit one of them")
    if data.get("kind") == "folder":
        data |= {"split": None, "val_fraction": None}
    changed = replaced(config, input={**config.input.to_dict(), "data": {**data, "part": f"all but {fold}"}}).unlock()
    changed.evals[name].data = ConfigDict({**data, "part": fold})
    return changed.lock()


def _checked(found: Json, path: Path | epath.Path) -> ConfigDict:
    """Return the content of a config.json as a checked and locked config."""
    try:
        config = ConfigDict(defaults() | _with_moved_keys(found))
        check_types(config)
    except (ValueError, TypeError, RecursionError) as e:
        raise ConfigError(f"cannot read {path}: {first_line(e)}") from None
    return config.lock()


def _with_moved_keys(found: Json) -> Json:
    """Move `corrupt` of the evaluators of a config.json of 0.2.0 to `input`, where it is a key for all; return it."""
    evals, data = found.get("evals"), found.get("input")
    if not isinstance(evals, dict) or not isinstance(data, dict):
        return found
    options = [each for each in evals.values() if isinstance(each, dict)]
    if "skip" in [each.pop("corrupt", None) for each in options]:
        data["corrupt"] = "skip"
    for each in options:
        each.pop("corrupt_max", None)
    return found


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
