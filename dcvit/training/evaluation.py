"""Evaluators of a config, and data that a config names: opened, and checked against its model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit import evaluators
from dcvit.config.keys import UNITS
from dcvit.config.values import Options, is_duration
from dcvit.errors import ConfigError, check_call, nearest
from dcvit.evaluators import ModelInputs, Predict
from dcvit.hub.kinds import kind_of
from dcvit.hub.open import Opened, check_thresholds, multilabel_options
from dcvit.hub.tokenizers import with_tokenizer
from dcvit.models import Outputs, Params, losses
from dcvit.models.packed_images import image_shape
from dcvit.parallel import multihost
from dcvit.parallel.sharding import DeviceCountError, Strategy, check_model, check_strategy, make_mesh
from input_pipeline import CorruptPolicy, Source, TokenSource

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

    An evaluator with `optional=True` whose data is missing is skipped with a warning.

    Args:
      config: the config.
      predict: a function of `predictor`.
      mesh: the devices that share a batch.

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
                raise
            if multihost.is_first():
                LOG.warning("skipped evaluation %r: %s", name, e)
    return found


def _make_evaluator(config: ConfigDict, given: ConfigDict, what: str, predict: Predict, mesh: Mesh) -> Any:
    """Build one evaluator from its options, called `what` in messages; check them and its first example."""
    module = evaluators.module_of(given.get("type"), what)
    if (needs := module.Evaluator.model_name) != config.model_name:
        raise ConfigError(f"{what}.type={given.type!r} is for model_name={needs!r}, found {config.model_name!r}")
    kwargs = _options_of(given, what)
    if any(field.name == "loss" for field in dataclasses.fields(module.Options)):
        check_loss(kwargs.setdefault("loss", config.loss), f"{what}.loss")
    check_call(module.Options, kwargs, what, also=[f"log_{unit}" for unit in UNITS])
    options = module.Options(**kwargs)
    check_thresholds(kwargs.get("thresholds"), config[kind_of(config).outputs_key], f"{what}.thresholds")
    source = open_source(options.data, f"{what}.data")
    if needs == "lm":
        text = check_text(source, config, f"{what}.data")
        return module.Evaluator(predict, evaluators.EvaluationData(source, mesh, text_example(text)), options)
    corrupt = CorruptPolicy(options.corrupt, options.corrupt_max, corrupt_hint(what))
    example = image_example(source, options.pp, config, f"{what}.pp", corrupt, module.Evaluator.target)
    return module.Evaluator(predict, evaluators.EvaluationData(source, mesh, example, corrupt), options)


def _options_of(options: ConfigDict, what: str) -> dict[str, Any]:
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


def check_loss(name: object, what: str) -> None:
    """Raise ConfigError if `name` is not a loss of image models."""
    if name not in losses.NAMES:
        raise ConfigError(f"{what}={name!r}; {nearest(str(name), losses.NAMES)}")


def open_source(data: Options, what: str) -> Source:
    """Return the source of a config's `data`, opened; `what` is the name of `data` in error messages."""
    check_data(data, what)
    return input_pipeline.open_source(**dict(data))


def check_data(data: object, what: str) -> None:
    """Raise ConfigError if `data` has no known `kind`, such as "text", or an option of all kinds has a wrong type."""
    if not isinstance(data, Mapping | ConfigDict) or not isinstance(data.get("kind"), str):
        raise ConfigError(f"{what}.kind names the kind of data; known: {', '.join(input_pipeline.KINDS)}")
    common = {key: data[key] for key in ("kind", "part", "limit", "cache") if key in data}
    check_call(input_pipeline.open_source, common, what)


def corrupt_hint(what: str) -> str:
    """Return the end of messages about damaged examples of the input `what`, such as "config.input"."""
    return f"; --{what}.corrupt=skip skips damaged examples, and `dcvit check-data` lists them"


def check_text(source: Source, config: ConfigDict, what: str) -> TokenSource:
    """Return the source. Raise ConfigError if it holds no text, or more tokens than the model's vocabulary."""
    if not isinstance(source, TokenSource):
        raise ConfigError(f"{what} holds no text, which config.model_name={config.model_name!r} reads")
    if source.vocab_size is None:
        raise ConfigError(f"{what} does not state its vocabulary size: give {what}.vocab_size")
    if config.vocab_size is not None and source.vocab_size > config.vocab_size:
        raise ConfigError(f"{what} has {source.vocab_size} tokens, config.vocab_size={config.vocab_size}")
    return source


def text_example(source: TokenSource) -> jax.ShapeDtypeStruct:
    """Return the shape of one row of tokens as a model input, (1, T) int32."""
    return jax.ShapeDtypeStruct((1, source.context), np.int32)


def image_example(
    source: Source,
    pp: str,
    config: ConfigDict,
    what: str,
    corrupt: CorruptPolicy,
    target: tuple[str, int] = ("labels", 1),
) -> jax.ShapeDtypeStruct:
    """Return the shape of one preprocessed image as a model input, (1, height, width, channels) float32.

    See `image_shape` for images of different sizes.

    Args:
      source: the images; the first readable one is preprocessed.
      pp: the preprocessing string.
      config: the config, for its number of classes.
      what: the name of `pp` in error messages.
      corrupt: the policy for damaged examples.
      target: name and rank of the label: ("labels", 1) for a vector over the classes, ("label", 0) for an index.

    Raises:
      ConfigError: `pp` does not yield a float32 image and the target.
    """
    batches = input_pipeline.eval_batches(source, pp, 1, corrupt=corrupt, threads=0)
    example = next(({k: v[0] for k, v in batch.items()} for batch in batches if batch["_mask"][0]), {})
    for key, ndim in (("image", 3), target):
        if key not in example or example[key].ndim != ndim:
            raise ConfigError(
                f"{what} yields {', '.join(k for k in example if k != '_mask')}; expected image (height, width, "
                f"channels) and {target[0]}"
            )
    if example["image"].dtype != np.float32:
        raise ConfigError(f"{what} yields {example['image'].dtype} images; add value_range(-1, 1)")
    if target[1]:
        classes = len(example["labels"])
        if classes != config.num_classes:
            raise ConfigError(f"{what} yields {classes} classes, config.num_classes={config.num_classes}")
        if (named := len(source.class_names or ())) > classes:
            raise ConfigError(f"{what}: the data has {named} classes, config.num_classes={classes}")
    return jax.ShapeDtypeStruct((1, *image_shape(example)), np.float32)
