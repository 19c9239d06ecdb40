"""Evaluators of a config: their devices, the function of a model that they call, and their construction."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.durations import is_duration
from dcvit.config.keys import UNITS
from dcvit.errors import ConfigError, check_call, nearest
from dcvit.hub.data import check_data, corrupt_hint, image_example, text_example, with_tokenizer
from dcvit.hub.kinds import kind_of
from dcvit.hub.open import Opened, check_thresholds, multilabel_options
from dcvit.models import Params, losses
from dcvit.models.packed_images import PackedImages
from dcvit.parallel import multihost
from dcvit.parallel.sharding import DeviceCountError, Strategy, check_model, check_strategy, make_mesh

LOG = logging.getLogger(__name__)
Predict = Callable[..., tuple[jax.Array, dict[str, Any]]]
# The evaluators of each kind of models.
TYPES = {"vit": ("classification", "multilabel", "fewshot"), "lm": ("perplexity", "in_context")}


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
        evaluators = make_evaluators(config, predictor(opened.module), mesh)
    if opened.thresholds:
        for name in multilabel_options(opened.config).keys() & evaluators.keys():
            evaluators[name].set_thresholds(opened.thresholds.values, opened.thresholds.origin)
    return Evaluation(mesh, strategy, evaluators)


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

    def predict(params: Params, inputs: jax.Array | PackedImages) -> tuple[jax.Array, dict[str, Any]]:
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
    """Build one evaluator from its `options`, called `what` in messages; check its arguments and its first example."""
    kind, types = options.get("type"), TYPES[config.model_name]
    if kind not in types:
        raise ConfigError(f"{what}.type={kind!r}; {nearest(str(kind), types)}")
    module = importlib.import_module(f"dcvit.evaluators.{kind}")
    kwargs = _evaluator_options(options, what)
    if any(field.name == "loss" for field in dataclasses.fields(module.Options)):
        check_loss(kwargs.setdefault("loss", config.loss), f"{what}.loss")
    check_call(module.Options, kwargs, what, also=[f"log_{unit}" for unit in UNITS])
    built = module.Evaluator(predict, mesh, module.Options(**kwargs))
    check_thresholds(kwargs.get("thresholds"), config[kind_of(config).outputs_key], f"{what}.thresholds")
    if policy := getattr(built, "corrupt", None):
        policy.hint = corrupt_hint(what)
    if config.model_name == "vit":
        built.example = image_example(built.source, built.pp, config, f"{what}.pp", built.corrupt, built.target)
    else:
        built.example = text_example(built.source, config, f"{what}.data")
    return built


def check_loss(name: object, what: str) -> None:
    """Raise ConfigError if `name` is not a loss of image models."""
    if name not in losses.NAMES:
        raise ConfigError(f"{what}={name!r}; {nearest(str(name), losses.NAMES)}")


def _evaluator_options(options: ConfigDict, what: str) -> dict[str, Any]:
    """Return an evaluator's arguments: its options without `type`, `optional` and `log_…`; ConfigError if invalid."""
    kwargs = {
        k: v for k, v in options.to_dict().items() if k not in ("type", "optional") and not is_duration(k, ("log",))
    }
    for key in ("data", "test_data") if "test_data" in kwargs else ("data",):
        check_data(kwargs.get(key), f"{what}.{key}")
    for key in ("batch_size", "loss_chunk"):
        if isinstance(kwargs.get(key), int) and kwargs[key] < 1:
            raise ConfigError(f"{what}.{key}={kwargs[key]} should be 1 or more")
    return kwargs
