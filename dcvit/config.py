"""Configs: finding, loading, overriding and checking them before anything compiles.

A config file is Python with one function, `get_config(**arguments)`, that returns an ml_collections
ConfigDict. Loading it runs its code. What may stand in it: the keys of `DEFAULTS`, and the durations
`total`, `log`, `ckpt` and `keep_ckpt`, each as `X_steps`, `X_epochs`, `X_examples` or `X_percent`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from etils import epath
from ml_collections import ConfigDict

from dcvit.errors import ConfigError, first_line, has_type, nearest, type_name

UNITS = ("steps", "epochs", "examples", "percent")
DURATIONS = ("total", "log", "ckpt", "keep_ckpt")
PACKAGE = Path(__file__).parent
Options: TypeAlias = Mapping[str, Any] | ConfigDict

# Every key that a config may hold, with its type and the value it has when a config leaves it out.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "seed": (int, 0),
    "input": (dict, {}),  # data: arguments of open_source; batch_size; pp; corrupt: "fail" or "skip", corrupt_max
    "num_classes": (int | None, 0),  # 0 leaves the head away; None takes as many as the training data names
    "vocab_size": (int | None, None),  # of a language model; None takes as many as the training data names
    "document_mask": (bool, False),  # tokens see their own document only
    "model_name": (str, "vit"),
    "model": (dict, {}),  # arguments of dcvit.models.<model_name>.Model
    "model_init": (str | None, None),  # a checkpoint to start from
    "model_load": (dict, {}),  # further arguments of the model's load()
    "loss": (str, "softmax_xent"),
    "loss_chunk": (int | None, None),  # of a row's tokens, how many have logits at a time; None: all
    "z_loss": (float, 0.0),
    "label_smoothing": (float, 0.0),
    "mixup": (float, 0.0),  # α of Beta(α, α); 0 is off
    "optax_name": (str, "scale_by_adam"),
    "optax": (dict, {}),
    "lr": (float, 1e-3),
    "schedule": (dict, {}),
    "wd": (float, 0.0),
    "wd_times_lr": (bool, False),
    "wd_mults": (Sequence, ((".*/kernel", 1.0),)),
    "lr_mults": (Sequence, ()),
    "frozen": (Sequence, ()),
    "grad_clip_norm": (float | None, None),
    "grad_accum": (int, 1),
    "ema_decay": (float, 0.0),  # 0 is off
    "mesh": (
        Sequence,
        (("data", -1),),
    ),  # pairs (axis, size) of parallel.sharding.AXES; -1 is what the others leave
    "sharding_strategy": (str | Sequence, "ddp"),  # see dcvit.parallel.sharding.shardings
    "evals": (dict, {}),  # name -> type, data, pp, batch_size, optional, how often, further arguments
    "pp_predict": (str, ""),  # from the bytes of an image file to the model's input
    "ckpt_keep": (int, 2),  # how many of the newest checkpoints stay; every `keep_ckpt` steps one stays for good
    "ckpt_best": (Sequence[str], ()),  # ("NAME/METRIC", "max" or "min"): the checkpoint best at it is made, and stays
    "on_corrupt": (str, "fail"),  # or "previous": where the newest checkpoint is damaged, go on from an intact one
    "nonfinite_skip": (int, 0),  # how many steps whose loss or gradient is not finite may be passed over
    "watchdog_seconds": (float, 1800.0),  # without progress for so long, all stacks are reported; 0 is off
    "watchdog_exit": (bool, False),  # and the run ends
    "tensorboard": (bool, True),
    "profile": (Sequence[int], ()),  # first and last step of a JAX profiler trace
}


def load(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """The locked, checked config of "NAME[:key=value,…]" with "a.b=value" overrides.

    NAME is the path of a Python file, or the bare name of a config that comes with the package.

    Raises:
      ConfigError: no such file, an error in it, an unknown key (the nearest one is named), a wrong type.
    """
    name, _, arguments = spec.partition(":")
    path = _find(name)
    config = _run(path, _parse_arguments(arguments))
    for key in config:
        if key not in DEFAULTS and not is_duration(key, DURATIONS):
            raise ConfigError(f"{path}: unknown key 'config.{key}'; {nearest(key, known_keys())}")
    config = ConfigDict({k: default for k, (_, default) in DEFAULTS.items()} | config.to_dict())
    for override in overrides:
        try:
            _override(config, override)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError) as e:  # a dict that no ConfigDict can hold
            raise ConfigError(f"--config.{override}: {first_line(e)}") from None
    check_types(config)
    return config.lock()


def read_json(path: Path | epath.Path) -> ConfigDict:
    """The config that a run wrote to its workdir, locked.

    Raises:
      ConfigError: missing or unreadable.
    """
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"expected a JSON object, not a {type(found).__name__}")
        config = ConfigDict({k: default for k, (_, default) in DEFAULTS.items()} | found)
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise ConfigError(f"cannot read {path}: {first_line(e)}") from None
    check_types(config)
    return config.lock()


def _find(name: str) -> Path:
    """The file of a config given by path or by bare name."""
    if "/" in name or name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"no config file {name}")
        return path
    known = {path.stem: path for path in _shipped()}
    if name not in known:
        raise ConfigError(f"no config named {name!r}; {nearest(name, known)}")
    return known[name]


def _run(path: Path, arguments: Mapping[str, str]) -> ConfigDict:
    """Executes a config file and calls its get_config, with arguments turned into its defaults' types."""
    try:
        get_config = _module(path).get_config
        parameters = inspect.signature(get_config).parameters
        for key in arguments:
            if key not in parameters:
                raise ConfigError(f"{path} takes no argument {key!r}; {nearest(key, parameters)}")
        config = get_config(**{k: _like(parameters[k].default, v, f"argument {k}") for k, v in arguments.items()})
    except ConfigError:
        raise
    except (Exception, SystemExit) as e:
        raise ConfigError(f"{path}: {type(e).__name__}: {first_line(e)}") from e
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"{path}: get_config returned a {type(config).__name__}, expected a ConfigDict")
    return config


def _module(path: Path) -> Any:
    """A config file, executed."""
    spec = importlib.util.spec_from_file_location(f"dcvit_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recommended() -> list[tuple[str, str]]:
    """(config, TPU topology) of all that the package's configs recommend: their `pods()`, {arguments: topology}."""
    return [
        (f"{path.stem}:{arguments}", topology)
        for path in _shipped()
        for arguments, topology in getattr(_module(path), "pods", dict)().items()
    ]


def _shipped() -> list[Path]:
    """The config files that come with the package."""
    folders = (PACKAGE / "configs", PACKAGE.parent / "configs")
    return sorted({p.stem: p for folder in folders for p in folder.glob("*.py")}.values())


def _parse_arguments(text: str) -> dict[str, str]:
    """ "a=1,b=x" as a dict of strings."""
    pairs = [item.partition("=") for item in text.split(",") if item]
    for key, equals, _ in pairs:
        if not equals or not key:
            raise ConfigError(f"config argument {key!r} is not of the form key=value")
    return {key: value for key, _, value in pairs}


def _literal(text: str) -> Any:
    """The value of a command-line word: a Python literal, true/false/none, or the word itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _like(old: Any, text: str, what: str) -> Any:
    """`text` as a value of the type of `old`. None, from or to, is left to later checks, which know all types."""
    value = _literal(text)
    if value is None:
        return None
    if isinstance(old, str):
        return text
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if old is None or old is inspect.Parameter.empty or type(value) is type(old):
        return value
    if isinstance(old, ConfigDict) and isinstance(value, dict):
        return ConfigDict(value)
    if isinstance(old, list | tuple) and isinstance(value, list | tuple):
        return value
    raise ConfigError(f"{what}={text} should be of type {type(old).__name__}, not {type(value).__name__}")


def _override(config: ConfigDict, override: str) -> None:
    """Sets "a.b=value" in `config`; a duration replaces the same duration in another unit."""
    path, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--config.{override}: expected --config.KEY=VALUE")
    *parents, last = path.split(".")
    target = config
    for i, part in enumerate(parents):
        if part not in target or not isinstance(target[part], ConfigDict):
            known = [k for k in target if isinstance(target[k], ConfigDict)]
            raise ConfigError(f"unknown key 'config.{'.'.join(parents[: i + 1])}'; {nearest(part, known)}")
        target = target[part]
    if target is config and last not in config and not is_duration(last, DURATIONS):
        raise ConfigError(f"unknown key 'config.{last}'; {nearest(last, known_keys())}")
    prefix, _, unit = last.rpartition("_")
    timed = bool(prefix) and unit in UNITS  # a number, as `duration` checks
    value = _like(None if timed else target.get(last), text, f"config.{path}")
    if timed:
        for other in [f"{prefix}_{u}" for u in UNITS if f"{prefix}_{u}" in target]:
            del target[other]
    with target.ignore_type():
        target[last] = value


def known_keys() -> list[str]:
    """Every key that a config may hold."""
    return [*DEFAULTS, *(f"{d}_{u}" for d in DURATIONS for u in UNITS)]


def is_duration(key: str, prefixes: Iterable[str]) -> bool:
    """Whether `key` is one of `prefixes` with a unit, such as "total_epochs"."""
    prefix, _, unit = key.rpartition("_")
    return prefix in prefixes and unit in UNITS


def check_types(config: ConfigDict) -> None:
    """Raises ConfigError for a top-level value of the wrong type, and for values outside their range."""
    for key, (hint, _) in DEFAULTS.items():
        value = config[key].to_dict() if isinstance(config[key], ConfigDict) else config[key]
        if not has_type(value, hint):
            expected = type_name(hint)
            raise ConfigError(f"config.{key}={value!r} should be of type {expected}, not {type(value).__name__}")
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "seed": (lambda v: 0 <= v < 2**32, "in [0, 2**32)"),
        "grad_accum": (lambda v: v >= 1, "1 or more"),
        "ckpt_keep": (lambda v: v >= 1, "1 or more"),
        "ckpt_best": (lambda v: not v or (len(v) == 2 and v[1] in ("max", "min")), '("NAME/METRIC", "max" or "min")'),
        "on_corrupt": (lambda v: v in ("fail", "previous"), "'fail' or 'previous'"),
        "nonfinite_skip": (lambda v: v >= 0, "0 or more"),
        "watchdog_seconds": (_is_rate, "finite and not negative"),
        "ema_decay": (lambda v: 0 <= v < 1, "in [0, 1)"),
        "label_smoothing": (lambda v: 0 <= v < 1, "in [0, 1)"),
        "vocab_size": (lambda v: v is None or v >= 1, "1 or more"),
        "loss_chunk": (lambda v: v is None or v >= 1, "1 or more"),
        "z_loss": (_is_rate, "finite and not negative"),
        "mixup": (_is_rate, "finite and not negative"),
        "lr": (_is_rate, "finite and not negative"),
        "wd": (_is_rate, "finite and not negative"),
        "grad_clip_norm": (lambda v: v is None or (math.isfinite(v) and v > 0), "finite and above 0"),
        "profile": (lambda v: not v or (len(v) == 2 and 0 < v[0] <= v[1]), "(first step, last step)"),
    }
    for key, (holds, expected) in rules.items():
        if not holds(config[key]):
            raise ConfigError(f"config.{key}={config[key]!r} should be {expected}")
    for key in ("wd_mults", "lr_mults"):
        if any(not (isinstance(rule, list | tuple) and len(rule) == 2 and _is_rate(rule[1])) for rule in config[key]):
            raise ConfigError(
                f"config.{key}={config[key]!r} should be pairs (regex, multiplier, finite and not negative)"
            )
    for key in ("wd_mults", "lr_mults", "frozen"):
        for rule in config[key]:
            check_regex(rule if key == "frozen" else rule[0], f"config.{key}")


def check_regex(pattern: Any, what: str) -> None:
    """Raises ConfigError where `pattern` is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as e:
        raise ConfigError(f"{what}: {pattern!r} is not a regular expression: {e}") from None


def with_classes(config: ConfigDict, num_classes: int) -> ConfigDict:
    """The config with that many classes, and the number in place of "{num_classes}" in its preprocessing strings."""
    filled = config.copy_and_resolve_references().unlock()
    with filled.ignore_type():
        filled.num_classes = num_classes
        for holder in (filled.input, *filled.evals.values()):
            if isinstance(holder, ConfigDict) and isinstance(holder.get("pp"), str):
                holder.pp = holder.pp.replace("{num_classes}", str(num_classes))
    return filled.lock()


def replaced(config: ConfigDict, **values: Any) -> ConfigDict:
    """The config with other values of some of its keys."""
    changed = config.copy_and_resolve_references().unlock()
    with changed.ignore_type():
        for key, value in values.items():
            changed[key] = value
    return changed.lock()


def _is_rate(value: Any) -> bool:
    return has_type(value, float) and math.isfinite(value) and value >= 0


def duration(
    config: Options,
    name: str,
    *,
    batch_size: int,
    examples: int,
    total_steps: int | None = None,
    default: int | None = None,
    what: str = "config",
) -> int | None:
    """A duration in steps, from the one of `name`_steps, _epochs, _examples, _percent that `config` holds.

    Args:
      config: where to look.
      name: the duration's name.
      batch_size: examples in a step.
      examples: examples in an epoch.
      total_steps: what percent refer to.
      default: the answer where none is given.
      what: how messages call `config`.

    Raises:
      ConfigError: more than one of them, a value that is no positive number, or percent of nothing.
    """
    given = [unit for unit in UNITS if config.get(f"{name}_{unit}") is not None]
    if not given:
        return default
    if len(given) > 1:
        keys = ", ".join(f"{what}.{name}_{unit}" for unit in given)
        raise ConfigError(f"{keys}: give exactly one of them")
    unit = given[0]
    key, value = f"{what}.{name}_{unit}", config[f"{name}_{unit}"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{key}={value!r} should be a number, 0 or more")
    if unit == "percent" and total_steps is None:
        raise ConfigError(f"{key}: the total cannot be a percentage of itself")
    scale = {
        "steps": 1.0,
        "epochs": examples / batch_size,
        "examples": 1 / batch_size,
        "percent": (total_steps or 0) / 100,
    }[unit]
    steps = round(value * scale)
    return max(1, steps) if value > 0 else 0
