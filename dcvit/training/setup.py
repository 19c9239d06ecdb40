"""Setup of a run: from a checked config to the objects it names, built once.

`make_setup` returns a frozen `Setup`; training reads nothing else. It builds one value after the other: `parse` returns
what the config determines alone, `open_data` the data and its task, `build_model` the model for that data, and
`dcvit.training.plan.make_plan` the length and the optimizer. Objects that do not fit each other raise ConfigError here,
before anything compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.durations import is_duration
from dcvit.config.keys import UNITS
from dcvit.config.load import load
from dcvit.dcmha.plan import fused_only
from dcvit.errors import ConfigError, check_call, nearest
from dcvit.models.lora import Adaptation
from dcvit.models.trees import param_shapes
from dcvit.parallel import multihost
from dcvit.parallel.sharding import DeviceCountError, Strategy, check_context, check_model, check_strategy, make_mesh
from dcvit.runs.files import Folder
from dcvit.training.inputs import (
    TrainingData,
    check_batch,
    check_data,
    corrupt_hint,
    open_source,
    own_tokenizer,
    read_input,
    with_hints,
    with_tokenizer,
)
from dcvit.training.memory import check_layers
from dcvit.training.model import make_adaptation, make_loader, make_model, upcycles
from dcvit.training.plan import Plan, RunOptions, make_options, make_plan
from dcvit.training.tasks import Task, check_loss, task_class

LOG = logging.getLogger(__name__)
Params = Mapping[str, Any]
Predict = Callable[..., tuple[jax.Array, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Parsed:
    """The objects that a config determines without its data."""

    config: ConfigDict
    module: nn.Module  # without the fields that follow from the data
    mesh: Mesh
    batch_size: int
    corrupt: input_pipeline.CorruptPolicy


@dataclasses.dataclass(frozen=True)
class TaskData:
    """The training data and the task that it is for."""

    config: ConfigDict  # completed with the properties of the data
    task: Task
    data: TrainingData


@dataclasses.dataclass(frozen=True)
class ModelSetup:
    """The model of a run: its module, the devices that hold its parameters, and where these come from."""

    module: nn.Module
    mesh: Mesh
    strategy: Strategy
    shapes: Params
    load_initial: Callable[[Params], Params] | None  # from parameter shapes to the parameters of `config.model_init`
    upcycle: bool  # `load_initial` upcycles: compositions that it does not load start as the identity
    lora: Adaptation | None  # of the parameters that `load_initial` loads
    trained: Params  # shapes of the parameters that are trained: all of `shapes` without `lora`


@dataclasses.dataclass(frozen=True)
class Setup:
    """All objects of a training run; `make_setup` builds them from a config."""

    record: Mapping[str, Any]  # the complete config as JSON data, as written to config.json
    seed: int
    task: Task
    data: TrainingData
    model: ModelSetup
    plan: Plan
    evaluators: Mapping[str, Any]
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
        parsed = parse(located, devices)
        found = open_data(parsed, source)
        model = build_model(parsed, found)
        evaluators = _evaluators_of_training(found, model) if evaluate else {}
        plan = make_plan(found.config, found.data, model.trained, evaluators)
        options = make_options(found.config, evaluators, plan.total_steps, model.module)
    record = json.loads(found.config.to_json())
    if tokenizer is not None:  # without the path of a temporary file
        record |= {key: json.loads(config[key].to_json()) for key in ("input", "evals")}
    return Setup(record, config.seed, found.task, found.data, model, plan, evaluators, options, tokenizer)


def parse(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Parsed:
    """Build the module and the mesh of a config, and check its batch size.

    Raises:
      ConfigError: a value is invalid, or model, mesh and batch do not fit each other.
    """
    module = make_model(config, devices[0] if devices else None)
    mesh = _make_mesh(config, module, devices)
    batch_size, corrupt = read_input(config, mesh)
    return Parsed(config, module, mesh, batch_size, corrupt)


def open_data(parsed: Parsed, source: input_pipeline.Source | None = None) -> TaskData:
    """Open the training data, by default that of `config.input.data`, and complete the config with its properties.

    Raises:
      ConfigError: task, preprocessing and data do not fit each other.
      InputError: the data is missing or unusable.
    """
    source = open_source(parsed.config.input.data, "config.input.data") if source is None else source
    task, config = task_class(parsed.config).create(parsed.config, source, parsed.corrupt)  # names missing libraries
    check_batch(source, parsed.batch_size)
    return TaskData(config, task, TrainingData(source, task.pp, parsed.batch_size, config.seed, parsed.corrupt))


def build_model(parsed: Parsed, found: TaskData) -> ModelSetup:
    """Build the model for the training data.

    Raises:
      ConfigError: the model's fields do not fit each other or the data, its attention is not fused although
        `config.require_fused`, or `config.model_load` is invalid.
    """
    config, module = found.config, parsed.module.clone(**found.task.model_fields)
    example = found.task.example
    check_context(parsed.mesh, module, example.shape[1] if len(example.shape) == 2 else None)
    fused = fused_only() if config.require_fused else contextlib.nullcontext()
    # The devices of the mesh determine the implementations of attention. Verdicts on kernels come later, in training.
    with jax.set_mesh(parsed.mesh), fused:
        if config.check_memory:
            check_layers(parsed.mesh, module, example, trained=not config.lora)
        shapes = param_shapes(module, found.task.example, "trust" if config.require_fused else "off")
    load_initial = make_loader(config, module, shapes)
    lora, trained = make_adaptation(config, shapes)
    strategy = config.sharding_strategy
    return ModelSetup(module, parsed.mesh, strategy, shapes, load_initial, upcycles(config), lora, trained)


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


def make_evaluators(config: ConfigDict, predict: Predict, mesh: Mesh) -> dict[str, Any]:
    """Build the evaluators of `config.evals`, by name; each has an `example` of its model input.

    An evaluator with `optional=True` whose data is missing is skipped with a warning.

    Args:
      config: the config.
      predict: a function of `predictor`.
      mesh: the devices that share a batch.

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
    return evaluators


def _make_evaluator(config: ConfigDict, options: ConfigDict, what: str, predict: Predict, mesh: Mesh) -> Any:
    """Build one evaluator, and check its arguments and its first example."""
    task, kind = task_class(config), options.get("type")
    if kind not in task.evaluator_types:
        raise ConfigError(f"{what}.type={kind!r}; {nearest(str(kind), task.evaluator_types)}")
    module = importlib.import_module(f"dcvit.evaluators.{kind}")
    kwargs = _evaluator_options(options, what)
    if any(field.name == "loss" for field in dataclasses.fields(module.Options)):
        check_loss(kwargs.setdefault("loss", config.loss), f"{what}.loss")
    check_call(module.Options, kwargs, what, also=[f"log_{unit}" for unit in UNITS])
    with with_hints(kwargs["data"]):
        built = module.Evaluator(predict, mesh, module.Options(**kwargs))
    if policy := getattr(built, "corrupt", None):
        policy.hint = corrupt_hint(what)
    built.example = task.evaluator_example(built, config, what)
    return built


def _evaluator_options(options: ConfigDict, what: str) -> dict[str, Any]:
    """Return the options that an evaluator reads itself."""
    kwargs = {
        k: v for k, v in options.to_dict().items() if k not in ("type", "optional") and not is_duration(k, ("log",))
    }
    for key in ("data", "test_data") if "test_data" in kwargs else ("data",):
        check_data(kwargs.get(key), f"{what}.{key}")
    for key in ("batch_size", "loss_chunk"):
        if isinstance(kwargs.get(key), int) and kwargs[key] < 1:
            raise ConfigError(f"{what}.{key}={kwargs[key]} should be 1 or more")
    return kwargs


def _evaluators_of_training(found: TaskData, model: ModelSetup) -> dict[str, Any]:
    """Build the evaluators, and check that they fit the training data and the model."""
    evaluators = make_evaluators(found.config, predictor(model.module), model.mesh)
    for name, evaluator in evaluators.items():
        found.task.check_evaluator(evaluator, found.data.source, f"config.evals.{name}")
    for example in {evaluator.example for evaluator in evaluators.values()} - {found.task.example}:
        param_shapes(model.module, example)  # rows may be longer than those of training, or too long
    return evaluators


def _make_mesh(config: ConfigDict, model: nn.Module, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the mesh of `config.mesh`, and check that the sharding strategy and the model fit it."""
    mesh = make_mesh(config.mesh, devices)
    check_strategy(mesh, config.mesh, config.sharding_strategy)
    check_model(mesh, model)
    return mesh
