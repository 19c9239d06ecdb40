"""Durations of a config, each given as `X_steps`, `X_epochs`, `X_examples` or `X_percent`, in steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dcvit.config.keys import UNITS, is_rate
from dcvit.errors import ConfigError

if TYPE_CHECKING:  # the optimizer is used where this library is absent
    from ml_collections import ConfigDict

STEPS_IN_EPOCH = 10_000  # assumed where durations in epochs are compared before examples are counted
MAX_STEPS = 2**31 - 1  # the number of a step is an int32 on the devices


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

    def steps(
        self, config: Mapping[str, Any] | ConfigDict, name: str, default: int | None = None, what: str = "config"
    ) -> int | None:
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


def durations_of(config: ConfigDict, examples: int) -> Durations:
    """Return the durations of a run with a number of training examples; the schedule fits into its length.

    Raises:
      ConfigError: see `Durations.steps`; the run has no length, or warm-up and cool-down are longer.
    """
    durations = Durations(max(1, config.input.batch_size), examples)  # a batch size below 1 is refused later
    total_steps = durations.steps(config, "total")
    if not total_steps:
        raise ConfigError("config: set one of total_steps, total_epochs or total_examples to a value above 0")
    durations = dataclasses.replace(durations, total_steps=total_steps)
    ramps = sum(durations.steps(config.schedule, name, 0, "config.schedule") or 0 for name in ("warmup", "cooldown"))
    if ramps > total_steps:
        total, *others = _schedule_keys(config)
        counted = f" ({ramps:,} of {total_steps:,} steps)" if _needs_examples(config) else ""
        raise ConfigError(f"{' + '.join(others)} is longer than {total}{counted}")
    return durations


def check_schedule(config: ConfigDict) -> None:
    """Raise ConfigError for a schedule that fits no number of examples, before these are counted."""
    if not _needs_examples(config):
        durations_of(config, STEPS_IN_EPOCH * max(1, config.input.batch_size))


def _needs_examples(config: ConfigDict) -> bool:
    """Return True if some durations of the schedule are in epochs and others in steps or examples."""
    units = {key.partition("=")[0].rpartition("_")[2] for key in _schedule_keys(config)} - {"percent"}
    return "epochs" in units and len(units) > 1


def _schedule_keys(config: ConfigDict) -> list[str]:
    """Return the given length of the run, warm-up and cool-down, such as "config.schedule.warmup_steps=100"."""
    keys = [("config", config, "total"), *(("config.schedule", config.schedule, n) for n in ("warmup", "cooldown"))]
    found = [(what, f"{name}_{unit}", holder) for what, holder, name in keys for unit in UNITS]
    return [f"{what}.{key}={holder[key]}" for what, key, holder in found if holder.get(key) is not None]
