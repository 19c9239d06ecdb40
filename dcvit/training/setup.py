"""Setup of a training run: the objects that a checked config describes, built once.

`make_setup` returns a frozen `Setup`; training reads nothing else. It builds one value after the other: what the config
determines alone, the data and its task, the model for that data (`build_model`), and the length and the optimizer
(`dcvit.training.plan.make_plan`). Objects that do not fit each other raise ConfigError here, before anything compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.load import load
from dcvit.dcmha.plan import fused_only
from dcvit.hub.kinds import make_model
from dcvit.hub.tokenizers import with_tokenizer
from dcvit.models import Params
from dcvit.models.packed_images import check_packed
from dcvit.models.trees import param_shapes
from dcvit.parallel.sharding import Strategy, check_context
from dcvit.runs.files import Folder
from dcvit.training.evaluation import make_evaluators, mesh_of, open_source, predictor
from dcvit.training.inputs import TrainingData, check_batch, own_tokenizer, read_input
from dcvit.training.model import make_loader, upcycles
from dcvit.training.plan import Plan, RunOptions, make_options, make_plan
from dcvit.training.tasks import Task, task_class


@dataclasses.dataclass(frozen=True)
class ModelSetup:
    """The model of a run: its module, the mesh of devices, and the shapes and the source of its parameters."""

    module: nn.Module
    mesh: Mesh
    strategy: Strategy
    shapes: Params
    load_initial: Callable[[Params], Params] | None  # from parameter shapes to the parameters of `config.model_init`
    upcycle: bool  # `load_initial` upcycles: compositions that it does not load start as the identity


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
    tokenizer = own_tokenizer(config, workdir) if source is None else None
    with with_tokenizer(config, tokenizer) as located:
        module = make_model(located, devices[0] if devices else None)
        mesh = mesh_of(located, module, devices)
        batch_size, corrupt = read_input(located, mesh)
        source = open_source(located.input.data, "config.input.data") if source is None else source
        task, completed = task_class(located).create(located, source, corrupt)  # names missing libraries
        check_batch(source, batch_size)
        if sizes := input_pipeline.patch_sizes(task.pp):
            check_packed(module, sizes[0] ** 2)
        data = TrainingData(source, task.pp, batch_size, completed.seed, corrupt, task.packing)
        model = build_model(completed, module.clone(**task.model_fields), mesh, task.example)
        if task.distillation:
            task.distillation.check_student(model.module, mesh)
        evaluators = _evaluators_of_training(completed, task, source, model) if evaluate else {}
        plan = make_plan(completed, data, model.shapes, evaluators, module.depth)
        options = make_options(completed, evaluators, plan.total_steps, model.module)
    record = json.loads(completed.to_json())
    if tokenizer is not None:  # without the path of a temporary file
        record |= {key: json.loads(config[key].to_json()) for key in ("input", "evals")}
    return Setup(record, config.seed, task, data, model, plan, evaluators, options, tokenizer)


def build_model(config: ConfigDict, module: nn.Module, mesh: Mesh, example: jax.ShapeDtypeStruct) -> ModelSetup:
    """Return the model with its parameter shapes; `example` has the shape and dtype of a training input.

    Raises:
      ConfigError: the model's fields do not fit each other or the data, its attention is not fused although
        `config.require_fused`, or `config.model_load` is invalid.
    """
    check_context(mesh, module, example.shape[1] if len(example.shape) == 2 else None)
    fused = fused_only() if config.require_fused else contextlib.nullcontext()
    # The devices of the mesh determine the implementations of attention. Verdicts on kernels come later, in training.
    with jax.set_mesh(mesh), fused:
        shapes = param_shapes(module, example, "trust" if config.require_fused else "off")
    load_initial = make_loader(config, module, shapes)
    return ModelSetup(module, mesh, config.sharding_strategy, shapes, load_initial, upcycles(config))


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
