"""Plan of a run: how long it trains, how it optimizes, and when it logs, evaluates and saves."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import optax
from ml_collections import ConfigDict

from dcvit.config.durations import Durations
from dcvit.config.keys import is_rate
from dcvit.dcmha.plan import Policy
from dcvit.errors import ConfigError, check_call, first_line, matches, nearest
from dcvit.models import Params
from dcvit.parallel.trees import by_name
from dcvit.runs import trackers
from dcvit.training import optim
from dcvit.training.inputs import TrainingData

SCHEDULE_DURATIONS = ("warmup", "cooldown")
RATES = (  # of `config.optax`: numbers that are not negative
    "b1", "b2", "b3", "decay", "eps", "eps_root", "momentum", "beta", "consistent_rms", "adam_b1", "adam_b2",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Steps between two rows of metrics, checkpoints, kept checkpoints and evaluations; 0 or None: never."""

    log: int | None
    ckpt: int | None
    keep_ckpt: int | None
    evals: Mapping[str, int | None]  # by the evaluator's name


@dataclasses.dataclass(frozen=True)
class Plan:
    """Length, optimization and intervals of a run; `make_plan` builds it."""

    total_steps: int
    lr: float
    schedule: optim.Schedule
    optimizer: optax.GradientTransformation
    frozen: Params  # masks of `dcvit.training.optim.frozen_parts`
    grad_accum: int
    ema_decay: float
    ema_warmup: bool
    intervals: Intervals


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The keys of a config that control a run without changing what a step computes; see `dcvit.config.keys.KEYS`."""

    ckpt_keep: int
    ckpt_best: Sequence[str]
    early_stop: Sequence[Any]
    on_corrupt: str
    nonfinite_skip: int
    watchdog_seconds: float
    tensorboard: bool
    wandb: Mapping[str, object]
    profile: Sequence[int]
    kernels: Policy | None
    require_fused: bool
    check_memory: bool

    @property
    def trackers(self) -> dict[str, object]:
        """The options of the trackers that the config enables, by name; see `dcvit.runs.trackers`."""
        return {name: getattr(self, name) for name in trackers.NAMES if getattr(self, name)}


def make_plan(config: ConfigDict, data: TrainingData, params: Params, evaluators: Iterable[str], depth: int) -> Plan:
    """Return the plan of a run: its length, optimizer, averaging and intervals.

    Args:
      config: the config.
      data: the training data, whose size determines the length of an epoch.
      params: the parameters, or their shapes.
      evaluators: the names of the evaluators.
      depth: number of blocks of the model.

    Raises:
      ConfigError: an invalid duration, optimizer, schedule or average.
    """
    if config.ema_warmup and not config.ema_decay:
        raise ConfigError(
            "config.ema_warmup=True needs an average of the weights: set config.ema_decay, such as 0.9999"
        )
    durations = Durations(data.batch_size, len(data.source))
    total_steps = durations.steps(config, "total")
    if not total_steps:
        raise ConfigError("config: set one of total_steps, total_epochs or total_examples to a value above 0")
    durations = dataclasses.replace(durations, total_steps=total_steps)
    optimizer, schedule, frozen = make_optimizer(config, params, durations, depth)
    _check_frozen(config, frozen)
    intervals = Intervals(
        log=durations.steps(config, "log", 50),
        ckpt=durations.steps(config, "ckpt", total_steps),
        keep_ckpt=durations.steps(config, "keep_ckpt"),
        evals={n: durations.steps(config.evals[n], "log", total_steps, f"config.evals.{n}") for n in evaluators},
    )
    return Plan(
        total_steps, config.lr, schedule, optimizer, frozen, config.grad_accum, config.ema_decay, config.ema_warmup,
        intervals,
    )  # fmt: skip


def _check_frozen(config: ConfigDict, frozen: Params) -> None:
    """Raise ConfigError if a parameter is frozen that `config.model_init` does not set."""
    if not config.model_init:
        return
    names = [name for name, mask in by_name(frozen).items() if mask.any()]
    for pattern in config.model_load.get("dont_load", ()):
        if found := sorted(matches(pattern, names, "config.model_load.dont_load")):
            raise ConfigError(
                f"config.freeze_layers or config.frozen freezes {found[0]}, which model_load.dont_load leaves at its "
                "initial value: choose one of them"
            )
    if config.model_load.get("upcycle") and config.freeze_layers:
        raise ConfigError(
            f"config.freeze_layers={config.freeze_layers} would keep the compositions that model_load.upcycle adds to "
            "these blocks at the identity: choose one of them"
        )


def make_optimizer(
    config: ConfigDict, params: Params, durations: Durations, depth: int = 0
) -> tuple[optax.GradientTransformation, optim.Schedule, Params]:
    """Return the optimizer of a config, its learning-rate schedule and its masks of frozen parts; see `optim.make`.

    Args:
      config: the config.
      params: the parameters, or their shapes.
      durations: the run's length and sizes, which convert epochs and examples to steps.
      depth: number of blocks of the model.

    Raises:
      ConfigError: an unknown transformation or schedule, or an argument that does not fit.
    """
    keys = config.to_dict()
    options = optim.Options(**{field.name: keys[field.name] for field in dataclasses.fields(optim.Options)})
    if options.optax_name not in optim.TRANSFORMATIONS:
        raise ConfigError(_unknown_transformation(options.optax_name, list(optim.TRANSFORMATIONS)))
    check_call(optim.TRANSFORMATIONS[options.optax_name], options.optax, "config.optax")
    for name, value in options.optax.items():
        if name in RATES and isinstance(value, int | float) and not is_rate(float(value)):
            raise ConfigError(f"config.optax.{name}={value!r} should be finite and not negative")
    options = dataclasses.replace(options, schedule=_schedule_in_steps(options.schedule, durations))
    check_call(optim.schedule, options.schedule, "config.schedule", args=(durations.total_steps,))
    try:
        optimizer, factor, frozen = optim.make(params, durations.total_steps or 0, options, depth)
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"config: {first_line(e)}") from None
    return optimizer, factor, frozen


def make_options(config: ConfigDict, evaluators: Mapping[str, Any], total_steps: int, model: nn.Module) -> RunOptions:
    """Return the options of a run that `config` gives, after checking them.

    Raises:
      ConfigError: `ckpt_best` or `early_stop` names no metric, `profile` no step of the run, or a tracker is invalid.
    """
    keys = config.to_dict()
    options = RunOptions(**{field.name: keys[field.name] for field in dataclasses.fields(RunOptions)})
    known = [f"{name}/{metric}" for name, evaluator in evaluators.items() for metric in evaluator.metrics]
    if (getattr(model, "num_classes", 0) or 0) <= 5:
        known = [metric for metric in known if not metric.endswith("/top5")]
    for key, value in (("ckpt_best", options.ckpt_best), ("early_stop", options.early_stop)):
        if value and value[0] not in known:
            raise ConfigError(f"config.{key}: no evaluation yields {value[0]!r}; {nearest(value[0], known)}")
    if options.profile and options.profile[0] > total_steps:
        raise ConfigError(f"config.profile={tuple(options.profile)}: the run has {total_steps} steps")
    trackers.check(options.trackers)
    return options


def _schedule_in_steps(schedule: Mapping[str, object], durations: Durations) -> dict[str, Any]:
    """Return the arguments of `optim.schedule`: the durations of `config.schedule` in steps, and its other keys."""
    found = dict(schedule)
    for name in SCHEDULE_DURATIONS:
        steps = durations.steps(schedule, name, default=0, what="config.schedule")
        for unit in ("epochs", "examples", "percent"):
            found.pop(f"{name}_{unit}", None)
        found[f"{name}_steps"] = steps
    return found


def _unknown_transformation(name: str, known: Sequence[str]) -> str:
    """Return an error message about an unknown `config.optax_name`, which may name a complete optimizer of optax."""
    if name == "sgd":
        return "config.optax_name='sgd' is an optimizer; use the transformation 'trace' with --config.optax.decay=0.9"
    for short in (name, name.removesuffix("w")):
        if f"scale_by_{short}" in known:
            return (
                f"config.optax_name={name!r} is an optimizer; use the transformation 'scale_by_{short}', with the "
                "learning rate in config.lr and the weight decay in config.wd"
            )
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"config.optax_name={name!r} is not muon, or a scale_by_… or trace of optax; nearest: {close[0]}"
