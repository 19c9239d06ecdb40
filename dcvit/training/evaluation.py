"""Evaluators of a config, opened and checked against its model, and the mesh that evaluates it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit import evaluators
from dcvit.config.keys import UNITS
from dcvit.errors import ConfigError, check_call
from dcvit.evaluators import ModelInputs, Predict
from dcvit.hub.kinds import kind_of
from dcvit.hub.open import Opened, check_thresholds, multilabel_options
from dcvit.hub.tokenizers import with_tokenizer
from dcvit.models import Outputs, Params
from dcvit.parallel import multihost
from dcvit.parallel.sharding import DeviceCountError, Strategy, check_model, check_strategy, make_mesh
from dcvit.training.inputs import check_data, check_loss, corrupt_policy, image_example, open_source, text_example

LOG = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """The evaluators of a model by name, with the mesh and the sharding strategy for its parameters."""

    mesh: Mesh
    strategy: Strategy
    evaluators: dict[str, Any]


def open_evaluators(opened: Opened) -> Evaluation:
    """Open the data of `config.evals` on this host's devices; multi-label evaluators get the workdir's thresholds.

    Raises:
      ConfigError, MissingDataError: see `make_evaluators`.
    """
    if not opened.config.evals and opened.weights:
        raise ConfigError(f"{opened} is not the folder of a training run; give --config CONFIG --checkpoint {opened}")
    mesh, strategy = evaluation_mesh(opened.config, opened.module)
    with with_tokenizer(opened.config, opened.tokenizer) as config:
        found = make_evaluators(config, predictor(opened.module), mesh)
    if opened.thresholds:
        for name in multilabel_options(opened.config).keys() & found.keys():
            found[name].set_thresholds(opened.thresholds.values, opened.thresholds.origin)
    return Evaluation(mesh, strategy, found)


def mesh_of(config: ConfigDict, model: nn.Module, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the mesh of `config.mesh`, and check that the sharding strategy and the model fit it."""
    mesh = make_mesh(config.mesh, devices)
    check_strategy(mesh, config.mesh, config.sharding_strategy)
    check_model(mesh, model)
    return mesh


def evaluation_mesh(config: ConfigDict, model: nn.Module) -> tuple[Mesh, Strategy]:
    """Return the config's mesh and sharding strategy, for evaluation on this host's devices.

    If the mesh is for another number of devices, all devices form the axis "fsdp", and a warning is logged.
    """
    try:
        return mesh_of(config, model), config.sharding_strategy
    except DeviceCountError as e:
        mesh = make_mesh([("fsdp", -1)])
        if multihost.is_first():
            LOG.warning("%s: evaluating with fsdp %d instead", e, mesh.size)
        return mesh, "fsdp"


def predictor(model: nn.Module) -> Predict:
    """Return the function (params, model inputs) -> (logits, named intermediates), without dropout."""

    def predict(params: Params, inputs: ModelInputs) -> tuple[jax.Array, Outputs]:
        outputs: tuple[jax.Array, Outputs] = model.apply({"params": params}, inputs, train=False)  # type: ignore[assignment]
        return outputs

    return predict


def make_evaluators(config: ConfigDict, predict: Predict, mesh: Mesh) -> dict[str, Any]:
    """Build the evaluators of `config.evals`, by name.

    An evaluator with `optional=True` whose data is missing is skipped with a warning. The mesh has the devices that
    share a batch; `predict` is a function of `predictor`.

    Raises:
      ConfigError: an unknown type or option, or data that does not fit the model.
      MissingDataError: the data of an evaluator that is not optional is missing.
    """
    found = {}
    for name, options in config.evals.items():
        what = f"config.evals.{name}"
        if not isinstance(options, ConfigDict):
            raise ConfigError(f"{what}={options!r} should be a dict with type, data and pp")
        try:
            found[name] = _make_evaluator(config, options, what, predict, mesh)
        except input_pipeline.MissingDataError as e:
            if not options.get("optional"):
                raise input_pipeline.MissingDataError(f"{what}: {e}; {what}.optional=True skips it") from None
            if multihost.is_first():
                LOG.warning("%s: skipped, %s", what, e)
    return found


def _make_evaluator(config: ConfigDict, given: ConfigDict, what: str, predict: Predict, mesh: Mesh) -> Any:
    """Build one evaluator from its options, called `what` in messages; check them and its first example."""
    module = evaluators.module_of(given.get("type"), what)
    if (needs := module.Evaluator.model_name) != config.model_name:
        raise ConfigError(f"{what}.type={given.type!r} is for model_name={needs!r}, found {config.model_name!r}")
    kwargs = {k: v for k, v in given.to_dict().items() if k not in ("type", "optional", *(f"log_{u}" for u in UNITS))}
    if "test_data" in kwargs:
        check_data(kwargs["test_data"], f"{what}.test_data")
    if moved := [key for key in ("corrupt", "corrupt_max") if key in kwargs]:
        raise ConfigError(f"{what}.{moved[0]}: moved in 0.3.0; config.input.{moved[0]} is for training and evaluation")
    for key in ("batch_size", "loss_chunk"):
        if isinstance(kwargs.get(key), int) and kwargs[key] < 1:
            raise ConfigError(f"{what}.{key}={kwargs[key]} should be 1 or more")
    if any(field.name == "loss" for field in dataclasses.fields(module.Options)):
        check_loss(kwargs.setdefault("loss", config.loss), f"{what}.loss")
    check_call(module.Options, kwargs, what, also=[f"log_{unit}" for unit in UNITS])
    options = module.Options(**kwargs)
    check_thresholds(kwargs.get("thresholds"), config[kind_of(config).outputs_key], f"{what}.thresholds")
    source, corrupt = open_source(options.data, f"{what}.data"), None
    if needs == "lm":
        example = text_example(source, config, f"{what}.data")
    else:
        corrupt = corrupt_policy(config)
        example = image_example(source, options.pp, config, f"{what}.pp", corrupt, module.Evaluator.target)
    return module.Evaluator(predict, evaluators.EvaluationData(source, mesh, example, corrupt), options)
