"""Setup of a run: from a checked config to the objects it names, built once.

`make_setup` returns a frozen `Setup`; training reads nothing else. It builds one value after the other: `parse` returns
what the config determines alone, `open_data` the data and its task, `build_model` the model for that data, and
`dcvit.training.plan.make_plan` the length and the optimizer. Objects that do not fit each other raise ConfigError here,
before anything compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.load import load
from dcvit.dcmha.plan import fused_only
from dcvit.hub.data import open_source, with_tokenizer
from dcvit.hub.evaluate import make_evaluators, mesh_of, predictor
from dcvit.hub.kinds import make_model
from dcvit.models import Params
from dcvit.models.lora import Adaptation
from dcvit.models.trees import param_shapes
from dcvit.parallel.sharding import Strategy, check_context
from dcvit.runs.files import Folder
from dcvit.training.inputs import TrainingData, check_batch, own_tokenizer, read_input
from dcvit.training.memory import check_layers
from dcvit.training.model import make_adaptation, make_loader, upcycles
from dcvit.training.plan import Plan, RunOptions, make_options, make_plan
from dcvit.training.tasks import Task, task_class

LOG = logging.getLogger(__name__)


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
    mesh = mesh_of(config, module, devices)
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


def _evaluators_of_training(found: TaskData, model: ModelSetup) -> dict[str, Any]:
    """Build the evaluators, and check that they fit the training data and the model."""
    evaluators = make_evaluators(found.config, predictor(model.module), model.mesh)
    for name, evaluator in evaluators.items():
        found.task.check_evaluator(evaluator, found.data.source, f"config.evals.{name}")
    for example in {evaluator.example for evaluator in evaluators.values()} - {found.task.example}:
        param_shapes(model.module, example)  # rows may be longer than those of training, or too long
    return evaluators
