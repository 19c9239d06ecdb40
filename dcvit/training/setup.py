"""Setup of a run: from a checked config to the objects it names, built once.

`make_setup` returns a frozen `Setup`; training reads nothing else. Objects that do not fit each other raise ConfigError
here, before anything compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.keys import is_rate
from dcvit.config.load import UNITS, Options, duration, is_duration, load
from dcvit.dcmha import dispatch
from dcvit.errors import ConfigError, check_call, first_line, nearest
from dcvit.models.trees import param_shapes
from dcvit.parallel import multihost
from dcvit.parallel.sharding import DeviceCountError, Strategy, check_model, check_strategy, make_mesh
from dcvit.runs.files import Folder
from dcvit.runs.tracking import check_wandb
from dcvit.training import optim
from dcvit.training.inputs import (
    TrainingData,
    check_batch,
    check_data,
    corrupt_hint,
    explained,
    open_source,
    own_tokenizer,
    read_input,
    with_tokenizer,
)
from dcvit.training.model import make_loader, make_model, upcycles
from dcvit.training.tasks import Task, check_loss, task_class

LOG = logging.getLogger(__name__)
SCHEDULE_DURATIONS = ("warmup", "cooldown")
RATES = ("b1", "b2", "b3", "decay", "eps", "eps_root", "momentum")  # of `config.optax`: numbers that are not negative
Params = Mapping[str, Any]
Predict = Callable[..., tuple[jax.Array, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Intervals between repeated work, in steps; 0 or None: never."""

    log: int | None
    ckpt: int | None
    keep_ckpt: int | None
    evals: Mapping[str, int | None]  # by the evaluator's name


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The keys of a config that control a run without changing what a step computes; see `dcvit.config.load.KEYS`."""

    ckpt_keep: int
    ckpt_best: Sequence[str]
    early_stop: Sequence[Any]
    on_corrupt: str
    nonfinite_skip: int
    watchdog_seconds: float
    watchdog_exit: bool
    tensorboard: bool
    wandb: Mapping[str, object]
    profile: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Setup:
    """All objects of a training run; `make_setup` builds them from a config."""

    record: Mapping[str, Any]  # the complete config as JSON data, as written to config.json
    seed: int
    mesh: Mesh
    sharding_strategy: Strategy
    model: nn.Module
    load_initial: Callable[[Params], Params] | None  # from parameter shapes to the parameters of `config.model_init`
    upcycle: bool  # `load_initial` upcycles: compositions that it does not load start as the identity
    task: Task
    data: TrainingData
    total_steps: int
    lr: float
    schedule: optim.Schedule
    optimizer: optax.GradientTransformation
    grad_accum: int
    ema_decay: float
    evaluators: Mapping[str, Any]
    intervals: Intervals
    options: RunOptions
    tokenizer: str | None = None  # the tokenizer.json of a run that trains its tokenizer, for its workdir


def make_setup(
    config: ConfigDict,
    *,
    workdir: Folder | None = None,
    devices: Sequence[jax.Device] | None = None,
    source: input_pipeline.Source | None = None,
    evaluate: bool = True,
) -> Setup:
    """Build the objects of a training run.

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
    tokenizer = own_tokenizer(config, workdir) if source is None else None
    with with_tokenizer(config, tokenizer) as located:
        setup = _build(located, devices, source, evaluate)
    if tokenizer is None:
        return setup
    unlocated = {key: json.loads(config[key].to_json()) for key in ("input", "evals")}
    return dataclasses.replace(setup, record={**setup.record, **unlocated}, tokenizer=tokenizer)


def _build(
    config: ConfigDict,
    devices: Sequence[jax.Device] | None,
    source: input_pipeline.Source | None,
    evaluate: bool,
) -> Setup:
    """Build a setup; see `make_setup`."""
    model = make_model(config, devices[0].platform if devices else None)
    mesh = _make_mesh(config, model, devices)
    batch_size, corrupt = read_input(config, mesh)
    source = open_source(config.input.data, "config.input.data") if source is None else source
    check_batch(source, batch_size)
    task, config = task_class(config).create(config, source, corrupt)
    model = model.clone(**task.model_fields)
    data = TrainingData(source, task.pp, batch_size, config.seed, corrupt)
    total_steps = duration(config, "total", batch_size=batch_size, examples=len(source))
    if not total_steps:
        raise ConfigError("config: set one of total_steps, total_epochs or total_examples to a value above 0")
    in_steps = functools.partial(duration, batch_size=batch_size, examples=len(source), total_steps=total_steps)
    fused = dispatch.fused_only() if config.require_fused else contextlib.nullcontext()
    with jax.set_mesh(mesh), fused:  # the devices of the mesh determine the implementations of attention
        shapes = param_shapes(model, task.example)
    optimizer, schedule = make_optimizer(config, shapes, total_steps, in_steps)
    evaluators = make_evaluators(config, predictor(model), mesh, task, source) if evaluate else {}
    for example in {evaluator.example for evaluator in evaluators.values()} - {task.example}:
        param_shapes(model, example)  # rows may be longer than those of training, or too long
    options = RunOptions(**{field.name: config.to_dict()[field.name] for field in dataclasses.fields(RunOptions)})
    _check_options(options, evaluators, total_steps, model)
    check_wandb(options.wandb)
    return Setup(
        record=json.loads(config.to_json()), seed=config.seed, mesh=mesh, sharding_strategy=config.sharding_strategy,
        model=model, load_initial=make_loader(config, model, shapes), upcycle=upcycles(config), task=task, data=data,
        total_steps=total_steps, lr=config.lr, schedule=schedule, optimizer=optimizer, grad_accum=config.grad_accum,
        ema_decay=config.ema_decay, evaluators=evaluators, options=options,
        intervals=_make_intervals(config, evaluators, total_steps, in_steps),
    )  # fmt: skip


def load_setup(
    spec: str, overrides: Sequence[str] = (), *, devices: Sequence[jax.Device] | None = None, stand_in: bool = False
) -> Setup:
    """Load a config, see `dcvit.config.load.load`, and build its setup without evaluators.

    Args:
      spec: "NAME[:key=value,…]".
      overrides: "a.b=value" for single keys.
      devices: the devices of the mesh; by default all.
      stand_in: use stand-in examples if the training data is missing.
    """
    config = load(spec, overrides)
    try:
        return make_setup(config, devices=devices, evaluate=False)
    except input_pipeline.MissingDataError:
        if not stand_in:
            raise
        return make_setup(config, devices=devices, source=task_class(config).stand_in(config), evaluate=False)


def evaluation_mesh(config: ConfigDict, model: nn.Module) -> tuple[Mesh, Strategy]:
    """Return the config's mesh and sharding strategy, for evaluation on this host's devices.

    If the mesh is for another number of devices, all devices form the axis "fsdp", and a warning is logged.
    """
    try:
        return _make_mesh(config, model), config.sharding_strategy
    except DeviceCountError as e:
        mesh = make_mesh([("fsdp", -1)])
        if multihost.is_first():
            LOG.warning("%s: evaluating with fsdp %d instead", e, mesh.size)
        return mesh, "fsdp"


def predictor(model: nn.Module) -> Predict:
    """Return the function (params, model inputs) -> (logits, named intermediates), without dropout."""

    def predict(params: Params, inputs: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        outputs: tuple[jax.Array, dict[str, Any]] = model.apply({"params": params}, inputs, train=False)  # type: ignore[assignment]
        return outputs

    return predict


def make_optimizer(
    config: ConfigDict, params: Params, total_steps: int, in_steps: Callable[..., int | None]
) -> tuple[optax.GradientTransformation, optim.Schedule]:
    """Build the gradient transformation of a config and its learning-rate schedule.

    Args:
      config: the config.
      params: the parameters, or their shapes.
      total_steps: the length of training.
      in_steps: `dcvit.config.load.duration` for this run.

    Raises:
      ConfigError: an unknown transformation or schedule, or an argument that does not fit.
    """
    if config.optax_name not in optim.TRANSFORMATIONS:
        raise ConfigError(_unknown_transformation(config.optax_name, list(optim.TRANSFORMATIONS)))
    check_call(optim.TRANSFORMATIONS[config.optax_name], config.optax.to_dict(), "config.optax")
    for name, value in config.optax.items():
        if name in RATES and isinstance(value, int | float) and not is_rate(float(value)):
            raise ConfigError(f"config.optax.{name}={value!r} should be finite and not negative")
    schedule = config.schedule.to_dict()
    for name in SCHEDULE_DURATIONS:
        steps = in_steps(schedule, name, what="config.schedule", default=0)
        for unit in ("epochs", "examples", "percent"):
            schedule.pop(f"{name}_{unit}", None)
        schedule[f"{name}_steps"] = steps
    check_call(optim.schedule, schedule, "config.schedule", args=(total_steps,))
    try:
        optimizer, factor = optim.make(
            params, total_steps=total_steps, optax_name=config.optax_name, optax_args=config.optax.to_dict(),
            lr=config.lr, schedule_args=schedule, wd=config.wd, wd_times_lr=config.wd_times_lr,
            wd_mults=config.wd_mults, lr_mults=config.lr_mults, frozen=config.frozen,
            grad_clip_norm=config.grad_clip_norm,
        )  # fmt: skip
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"config: {first_line(e)}") from None
    return optimizer, factor


def make_evaluators(
    config: ConfigDict,
    predict: Predict,
    mesh: Mesh,
    task: Task | None = None,
    source: input_pipeline.Source | None = None,
) -> dict[str, Any]:
    """Build the evaluators of `config.evals`, by name; each has an `example` of its model input.

    An evaluator with `optional=True` whose data is missing is skipped with a warning.

    Args:
      config: the config.
      predict: a function of `predictor`.
      mesh: the devices that share a batch.
      task, source: the task and data of training; if given, evaluators are checked against them.

    Raises:
      ConfigError: an unknown type or option, or data that does not fit the model.
      MissingDataError: the data of an evaluator that is not optional is missing.
    """
    evaluators = {}
    for name, options in config.evals.items():
        what = f"config.evals.{name}"
        if not isinstance(options, ConfigDict):
            raise ConfigError(f"{what}={options!r} should be a dict with type, data and pp")
        try:
            evaluators[name] = _make_evaluator(config, options, what, predict, mesh)
        except input_pipeline.MissingDataError as e:
            if not options.get("optional"):
                raise
            if multihost.is_first():
                LOG.warning("skipped evaluation %r: %s", name, e)
            continue
        if task and source:
            task.check_evaluator(evaluators[name], source, what)
    return evaluators


def _unknown_transformation(name: str, known: Sequence[str]) -> str:
    """Return the message about an unknown `config.optax_name`, which may be the name of a complete optimizer."""
    if name == "sgd":
        return "config.optax_name='sgd' is an optimizer; use the transformation 'trace' with --config.optax.decay=0.9"
    for short in (name, name.removesuffix("w")):
        if f"scale_by_{short}" in known:
            return (
                f"config.optax_name={name!r} is an optimizer; use the transformation 'scale_by_{short}', with the "
                "learning rate in config.lr and the weight decay in config.wd"
            )
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"config.optax_name={name!r} is not a scale_by_… or trace of optax; nearest: {close[0]}"


def _make_evaluator(config: ConfigDict, options: ConfigDict, what: str, predict: Predict, mesh: Mesh) -> Any:
    """Build one evaluator, and check its arguments and its first example."""
    task, kind = task_class(config), options.get("type")
    if kind not in task.evaluator_types:
        raise ConfigError(f"{what}.type={kind!r}; {nearest(str(kind), task.evaluator_types)}")
    kwargs = {
        k: v for k, v in options.to_dict().items() if k not in ("type", "optional") and not is_duration(k, ("log",))
    }
    for key in ("data", "test_data") if "test_data" in kwargs else ("data",):
        check_data(kwargs.get(key), f"{what}.{key}")
    for key in ("batch_size", "loss_chunk"):
        if isinstance(kwargs.get(key), int) and kwargs[key] < 1:
            raise ConfigError(f"{what}.{key}={kwargs[key]} should be 1 or more")
    evaluator = importlib.import_module(f"dcvit.evaluators.{kind}").Evaluator
    if "loss" in inspect.signature(evaluator).parameters:
        check_loss(kwargs.setdefault("loss", config.loss), f"{what}.loss")
    check_call(evaluator, kwargs, what, args=(predict, mesh), also=[f"log_{unit}" for unit in UNITS])
    with explained(kwargs["data"]):
        built = evaluator(predict, mesh, **kwargs)
    if policy := getattr(built, "corrupt", None):
        policy.hint = corrupt_hint(what)
    built.example = task.evaluator_example(built, config, what)
    return built


def _make_mesh(config: ConfigDict, model: nn.Module, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the mesh of `config.mesh`, and check that the sharding strategy and the model fit it."""
    mesh = make_mesh(config.mesh, devices)
    check_strategy(mesh, config.mesh, config.sharding_strategy)
    check_model(mesh, model)
    return mesh


def _make_intervals(
    config: ConfigDict, evaluators: Mapping[str, Any], total_steps: int, in_steps: Callable[..., int | None]
) -> Intervals:
    def interval(options: Options, name: str, default: int | None, what: str = "config") -> int | None:
        return in_steps(options, name, default=default, what=what)

    return Intervals(
        log=interval(config, "log", 50),
        ckpt=interval(config, "ckpt", total_steps),
        keep_ckpt=interval(config, "keep_ckpt", None),
        evals={n: interval(config.evals[n], "log", total_steps, f"config.evals.{n}") for n in evaluators},
    )


def _check_options(options: RunOptions, evaluators: Mapping[str, Any], total_steps: int, model: nn.Module) -> None:
    """Raise ConfigError if `ckpt_best` or `early_stop` names no metric, or `profile` no step of the run."""
    known = [f"{name}/{metric}" for name, evaluator in evaluators.items() for metric in evaluator.metrics]
    if (getattr(model, "num_classes", 0) or 0) <= 5:
        known = [metric for metric in known if not metric.endswith("/top5")]
    for key, value in (("ckpt_best", options.ckpt_best), ("early_stop", options.early_stop)):
        if value and value[0] not in known:
            raise ConfigError(f"config.{key}: no evaluation yields {value[0]!r}; {nearest(value[0], known)}")
    if options.profile and options.profile[0] > total_steps:
        raise ConfigError(f"config.profile={tuple(options.profile)}: the run has {total_steps} steps")
