"""Optimizer and learning-rate schedule of a config of big_vision."""

from __future__ import annotations

from collections.abc import Sequence

from dcvit.config.big_vision.part import Part, Values
from dcvit.errors import ConfigError, check_regex

CONSTANT = "stair"  # the default `decay_type` of big_vision, without steps a constant


def translate_optimizer(config: Part) -> None:
    """Translate the optimizers of big_vision.

    Raises:
      ConfigError: the optimizer or an argument has no equivalent.
    """
    name = config.values.get("optax_name")
    arguments = config.inner("optax")
    if name in ("big_vision.sgd", "identity"):
        config.put("optax_name", "trace", f"optax_name={name!r}")
        arguments.put("decay", 0.0, "no momentum")
    elif name == "big_vision.momentum_hp":
        config.put("optax_name", "trace", f"optax_name={name!r}")
        for old, new, default in (("momentum", "decay", 0.9), ("dtype", "accumulator_dtype", "bfloat16")):
            arguments.put(new, arguments.values.pop(old, default), old)
    elif isinstance(name, str) and name.startswith("big_vision."):
        config.put("optax_name", name.removeprefix("big_vision."), f"optax_name={name!r}")
    config.values["optax"] = arguments.values
    if not config.values.get("grad_clip_norm"):  # 0 and False also mean no clipping
        config.values.pop("grad_clip_norm", None)
    config.expect("weight_decay_decouple", (True,), "the weight decay is always decoupled")


def translate_schedule(config: Part) -> None:
    """Translate the schedule, and the parameters that it freezes.

    Raises:
      ConfigError: a schedule that dcvit has no equivalent of.
    """
    found = config.values.pop("schedule", None)
    if isinstance(found, list | tuple):
        found = _single_schedule(config, found)
    schedule = Part(found, "config.schedule", config.notes)
    schedule.durations({name: name for name in ("warmup", "cooldown")})
    kind = schedule.values.setdefault("decay_type", CONSTANT)
    if kind == CONSTANT:
        for key in ("steps", "mults"):
            schedule.expect(key, ([], ()), "decay_type='stair' is only known as a constant")
        schedule.put("decay_type", "constant", "decay_type='stair' without steps")
    elif kind == "polynomial":
        schedule.put("decay_type", "linear", "decay_type='polynomial'")
    schedule.expect("power", (1,), "a linear decay has power 1")
    schedule.expect("shift", (0,), "decay_type='rsqrt' has no shift")
    schedule.rename("linear_end", "end")
    if kind not in ("linear", "polynomial"):
        schedule.drop({"end": f"decay_type={kind!r} of big_vision ends at its own value"})
    if "timescale_examples" in schedule.values:
        examples = schedule.values.pop("timescale_examples")
        schedule.put("timescale", examples / _batch_size(config), f"timescale_examples={examples}")
    if schedule.values.pop("scale_with_batchsize", False):
        _scale(config, schedule, _batch_size(config) / 256)
    config.values["schedule"] = schedule.values


def _single_schedule(config: Part, rules: Sequence[object]) -> Values | None:
    """Return the only schedule of pairs (regex, schedule or None), and freeze the parameters without one.

    The first regex that matches counts. Raises ConfigError if there are several different schedules.
    """
    schedules, others, frozen, last = list[Values](), list[str](), list[str](), ""
    for rule in rules:
        if not isinstance(rule, list | tuple) or len(rule) != 2 or not isinstance(rule[1], dict | None):
            raise ConfigError(f"config.schedule: {rule!r} is not a pair of a regex and a schedule or None")
        check_regex(last := rule[0], "config.schedule")
        if rule[1] is None:
            earlier = "".join(rf"(?!(?:{pattern})\Z)" for pattern in others)
            frozen.append(f"{earlier}(?:{rule[0]})")
        else:
            others.append(rule[0])
            schedules += [rule[1]] if rule[1] not in schedules else []
    if last != ".*":
        raise ConfigError(f"config.schedule={rules!r}: the last regex should be '.*', so that it covers all parameters")
    if len(schedules) > 1:
        raise ConfigError(f"config.schedule has {len(schedules)} different schedules, dcvit has one, and `lr_mults`")
    if frozen:
        config.put("frozen", ["|".join(frozen)], "schedule None")
    return schedules[0] if schedules else None


def _batch_size(config: Part) -> int:
    """Return the batch size of the translated `input`. Raises ConfigError if it is not given."""
    size = config.values["input"].get("batch_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"config.input.batch_size={size!r} should be an integer, 1 or more")
    return size


def _scale(config: Part, schedule: Part, factor: float) -> None:
    """Multiply learning rate and weight decay by the factor of `scale_with_batchsize`."""
    for key in ("lr", "wd"):
        if config.values.get(key):
            config.put(key, config.values[key] * factor, f"{key}={config.values[key]} times batch_size / 256")
    if schedule.values.get("end"):
        schedule.put("end", schedule.values["end"] / factor, f"end={schedule.values['end']}")
