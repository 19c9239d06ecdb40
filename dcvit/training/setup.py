"""Setup of a training run: the objects that a checked config describes, built once.

`make_setup` returns a frozen `Setup`; training reads nothing else. It builds one value after the other: the data and
its task, which complete the config (number of classes, vocabulary), the model and the evaluators for that data, and the
plan: length, optimizer and intervals. Objects that do not fit each other raise ConfigError here, before anything
compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.durations import Durations, check_schedule, durations_of
from dcvit.config.keys import METRICS
from dcvit.config.load import load
from dcvit.config.values import replaced
from dcvit.errors import ConfigError, matches, nearest
from dcvit.hub.kinds import make_model
from dcvit.hub.tokenizers import with_tokenizer
from dcvit.models import Params
from dcvit.models.packed_images import check_packed
from dcvit.models.trees import param_shapes
from dcvit.parallel.trees import by_name
from dcvit.runs import trackers
from dcvit.runs.files import Folder
from dcvit.training.evaluation import make_evaluators, mesh_of, open_source, predictor
from dcvit.training.inputs import TrainingData, check_batch, check_input, own_tokenizer
from dcvit.training.model import ModelSetup, build_model
from dcvit.training.optim import Schedule, make_optimizer
from dcvit.training.tasks import Task, task_class


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Steps between two rows of metrics, checkpoints, kept checkpoints and evaluations; 0 or None: never."""

    log: int | None
    ckpt: int | None
    keep_ckpt: int | None
    evals: Mapping[str, int | None]  # by the evaluator's name


@dataclasses.dataclass(frozen=True)
class Plan:
    """Length, optimization and intervals of a run."""

    total_steps: int
    optimizer: optax.GradientTransformation
    schedule: Schedule
    frozen: Params  # masks of `dcvit.training.optim.frozen_parts`
    intervals: Intervals


@dataclasses.dataclass(frozen=True)
class Setup:
    """All objects of a training run; `make_setup` builds them from a config."""

    config: ConfigDict  # complete: with the number of classes, the vocabulary and the context of the data
    task: Task
    data: TrainingData
    model: ModelSetup
    plan: Plan
    evaluators: Mapping[str, Any]
    tokenizer: str | None = None  # the tokenizer.json of a run that trains its tokenizer, for its workdir

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """The complete config as JSON data, as written to config.json."""
        found: dict[str, Any] = json.loads(self.config.to_json())
        return found

    @property
    def trackers(self) -> dict[str, Any]:
        """The options of the trackers that the config enables, by name; see `dcvit.runs.trackers`."""
        return {name: self.record[name] for name in trackers.NAMES if self.record[name]}


def make_setup(
    config: ConfigDict,
    *,
    workdir: Folder | None = None,
    devices: Sequence[jax.Device] | None = None,
    source: input_pipeline.Source | None = None,
    evaluate: bool = True,
) -> Setup:
    """Build the objects of a training run from its config.

    Args:
      config: a config of `dcvit.config.load.load`.
      workdir: the folder of the run, whose tokenizer is used if the run trained one before.
      devices: the devices of the mesh; by default all.
      source: the training data; by default that of `config.input.data`.
      evaluate: also build the evaluators.

    Raises:
      ConfigError: a value is invalid, or parts of the config do not fit each other.
      InputError: the data is missing or unusable.
    """
    corrupt, device = check_input(config), devices[0] if devices else None
    check_schedule(config)
    tokenizer = own_tokenizer(config, workdir) if source is None else None
    with with_tokenizer(config, tokenizer) as located:
        mesh = mesh_of(located, make_model(located, device), devices)  # checked before data is read
        source = open_source(located.input.data, "config.input.data") if source is None else source
        durations = durations_of(located, len(source))
        task, complete = task_class(located).create(located, source, corrupt)  # names missing libraries
        module = make_model(complete, device)
        check_batch(complete, source, mesh, task.packing)
        if sizes := input_pipeline.patch_sizes(task.pp):
            check_packed(module, sizes[0] ** 2)
        data = TrainingData(source, task.pp, complete.input.batch_size, complete.seed, corrupt, task.packing)
        model = build_model(complete, module, mesh, task.example)
        if task.distillation:
            task.distillation.check_student(module, mesh)
        evaluators = _evaluators_of_training(complete, task, source, model) if evaluate else {}
        plan = _make_plan(complete, durations, model, evaluators)
        _check_keys(complete, evaluators, plan.total_steps)
    if tokenizer is not None:  # without the path of a temporary file
        complete = replaced(complete, input=config.input, evals=config.evals)
    return Setup(complete, task, data, model, plan, evaluators, tokenizer)


def load_setup(
    spec: str, overrides: Sequence[str] = (), *, devices: Sequence[jax.Device] | None = None, stand_in: bool = False
) -> Setup:
    """Load a config, see `dcvit.config.load.load`, and build its setup without evaluators.

    Args:
      spec: "NAME[:key=value,…]".
      overrides: "a.b=value" for single keys.
      devices: the devices of the mesh; by default all.
      stand_in: use stand-in examples if the training data, or a library that reads it, is missing.
    """
    config = load(spec, overrides)
    try:
        return make_setup(config, devices=devices, evaluate=False)
    except (input_pipeline.MissingDataError, input_pipeline.MissingLibraryError):
        if not stand_in:
            raise
    source, config = task_class(config).stand_in(config)
    return make_setup(config, devices=devices, source=source, evaluate=False)


def _evaluators_of_training(
    config: ConfigDict, task: Task, source: input_pipeline.Source, model: ModelSetup
) -> dict[str, Any]:
    """Return the evaluators by name, after checking that they fit the training data and the model."""
    evaluators = make_evaluators(config, predictor(model.module), model.mesh)
    for name, evaluator in evaluators.items():
        task.check_evaluator(evaluator, source, f"config.evals.{name}")
    for example in {evaluator.data.example for evaluator in evaluators.values()} - {task.example}:
        param_shapes(model.module, example)  # rows may be longer than those of training, or too long
    return evaluators


def _make_plan(config: ConfigDict, durations: Durations, model: ModelSetup, evaluators: Iterable[str]) -> Plan:
    """Return the plan of a run; ConfigError for an invalid interval, optimizer, schedule or average."""
    if config.ema_warmup and not config.ema_decay:
        raise ConfigError(
            "config.ema_warmup=True needs an average of the weights: set config.ema_decay, such as 0.9999"
        )
    total_steps = durations.total_steps or 0
    optimizer, schedule, frozen = make_optimizer(config, model.shapes, durations, model.module.depth)
    _check_frozen(config, frozen)
    intervals = Intervals(
        log=durations.steps(config, "log", 50),
        ckpt=durations.steps(config, "ckpt", total_steps),
        keep_ckpt=durations.steps(config, "keep_ckpt"),
        evals={n: durations.steps(config.evals[n], "log", total_steps, f"config.evals.{n}") for n in evaluators},
    )
    return Plan(total_steps, optimizer, schedule, frozen, intervals)


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


def _check_keys(config: ConfigDict, evaluators: Mapping[str, Any], total_steps: int) -> None:
    """Raise ConfigError if `ckpt_best` or `early_stop` names no metric, `profile` no step, or a tracker is invalid."""
    known = [f"{name}/{metric}" for name, evaluator in evaluators.items() for metric in evaluator.metrics]
    if (config.num_classes or 0) <= 5:
        known = [metric for metric in known if not metric.endswith("/top5")]
    for key in ("ckpt_best", "early_stop"):
        if config[key] and (metric := config[key][0]) not in known:
            evaluation, _, last = metric.rpartition("/")
            meant = f"{evaluation}/{METRICS.get(last, last)}"
            hint = f"did you mean {meant!r}?" if meant in known else nearest(metric, known)
            raise ConfigError(f"config.{key}: no evaluation yields {metric!r}; {hint}")
    if config.profile and config.profile[0] > total_steps:
        raise ConfigError(f"config.profile={tuple(config.profile)}: the run has {total_steps} steps")
    if config.wandb:
        trackers.check({"wandb": config.wandb.to_dict()})
