"""From a checked config to the objects it names: model, optimiser, data, evaluators. What does not fit
together is a ConfigError here, before anything compiles.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.checkpoint.checkpointer import load_params
from dcvit.checkpoint.files import Folder
from dcvit.checkpoint.params import check_tree, shapes_of
from dcvit.config import UNITS, is_duration
from dcvit.errors import ConfigError, check_call, first_line, nearest
from dcvit.models import lm
from dcvit.parallel import multihost
from dcvit.parallel.sharding import DeviceCountError, check_model, check_strategy, make_mesh
from dcvit.training import optim
from dcvit.training.tasks import TrainingData, check_data, check_loss, image_example, text_example
from input_pipeline.text import megatron
from input_pipeline.text.tokenizer import END_OF_TEXT, FileTokenizer, Tokenizer, open_tokenizer

# For each model the config's key of its number of outputs, and the argument of Model that names a variant.
MODELS = {"vit": ("num_classes", "variant"), "lm": ("vocab_size", "preset")}
EVALUATORS = {"vit": ("classification", "fewshot"), "lm": ("perplexity",)}
SCHEDULE_DURATIONS = ("warmup", "cooldown")


def model_module(config: ConfigDict) -> Any:
    """The module `dcvit.models.<model_name>`."""
    if config.model_name not in MODELS:
        raise ConfigError(f"config.model_name={config.model_name!r}; {nearest(config.model_name, MODELS)}")
    return importlib.import_module(f"dcvit.models.{config.model_name}")


def model(config: ConfigDict) -> nn.Module:
    """The linen module of `config.model`, with one output where the config leaves their number to the data."""
    module = model_module(config)
    size, named = MODELS[config.model_name]
    fields = config.model.to_dict()
    variant = fields.pop(named, None)
    for key in (size, "name", "parent"):
        if key in fields:
            raise ConfigError(f"config.model.{key} is not for a config to set; the number of outputs is config.{size}")
    outputs = 1 if config[size] is None else config[size]
    check_call(typing.get_type_hints(module.Model)["return"], fields, "config.model", args=(outputs,))
    try:
        built: nn.Module = module.Model(outputs, **{named: variant}, **fields)
    except (ValueError, AttributeError) as e:
        raise ConfigError(f"config.model.{named}: {e}") from None
    return built


def mesh(config: ConfigDict, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `config.mesh` over all devices, or over the given ones; strategy and model fit it."""
    made = make_mesh(config.mesh, devices)
    check_strategy(made, config.mesh, config.sharding_strategy)
    check_model(made, model(config))
    return made


def evaluation_mesh(config: ConfigDict) -> tuple[Mesh, Any]:
    """The config's mesh and sharding strategy; where it is for another number of devices, all of them along "fsdp",
    with that strategy, and said so on stderr."""
    try:
        return mesh(config), config.sharding_strategy
    except DeviceCountError as e:
        made = make_mesh([("fsdp", -1)])
        if multihost.is_first():
            print(f"{e}: evaluating with fsdp {made.size} instead", file=sys.stderr)
        return made, "fsdp"


def param_shapes(net: nn.Module, example: jax.ShapeDtypeStruct) -> Any:
    """The tree of parameter shapes, for model inputs like `example`."""
    try:
        return jax.eval_shape(lambda x: net.init(jax.random.key(0), x), example)["params"]
    except (ValueError, TypeError) as e:
        raise ConfigError(f"config.model: {first_line(e)}") from e


def predictor(net: nn.Module) -> Callable[..., tuple[jax.Array, dict[str, Any]]]:
    """(params, model inputs) -> logits and the model's named intermediates, without dropout."""

    def predict(params: Any, inputs: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        return net.apply({"params": params}, inputs, train=False)  # type: ignore[return-value]

    return predict


def trained_params(net: nn.Module, example: jax.ShapeDtypeStruct, checkpoint: Folder) -> Any:
    """The parameters of a checkpoint. Raises CheckpointError where they are not those of `net` for such inputs."""
    params = load_params(checkpoint)
    check_tree(shapes_of(params), shapes_of(param_shapes(net, example)), str(checkpoint))
    return params


def language_model(config: ConfigDict, checkpoint: Folder) -> tuple[lm.LM, Any]:
    """A trained language model and its parameters.

    Raises:
      ConfigError: the config is of another kind of model.
      CheckpointError: see `trained_params`.
    """
    _check_language_model(config)
    net: Any = model(config)
    return net, trained_params(net, jax.ShapeDtypeStruct((1, 1), jnp.int32), checkpoint)


def _check_language_model(config: ConfigDict) -> None:
    if config.model_name != "lm":
        raise ConfigError(f"config.model_name={config.model_name!r}: this needs a language model, 'lm'")


def tokenizer(config: ConfigDict, given: str | None = None) -> Tokenizer:
    """The tokenizer at the path `given`, or else that of the training data; of bytes, where text was read as such.

    Raises:
      ConfigError: the training data was tokens already and none is given, or it has more tokens than the model.
    """
    _check_language_model(config)
    known = {key: value for key, value in dict(config.input.get("data", {})).items() if value is not None}
    about: dict[str, Any] = {}
    if known.get("kind") == "megatron":
        with contextlib.suppress(input_pipeline.MissingDataError):
            about = megatron.about(known["path"])
    known = {**about, **known}
    path = given or known.get("tokenizer")
    if path is None and known.get("kind") in ("megatron", "input_ids") and "tokenizer" not in about:
        raise ConfigError("the training data came as tokens: give --tokenizer, a tokenizer.json")
    ends = known.get("end_of_text", END_OF_TEXT)
    try:
        found = open_tokenizer(path, ends if isinstance(ends, str) else None)
    except input_pipeline.InputError:
        if "end_of_text" in known:
            raise
        found = open_tokenizer(path, None)  # one whose texts end otherwise, where nothing says how
    if isinstance(found, FileTokenizer) and isinstance(ends, int):  # tokens' data gives the number, not the name
        found.end_of_text = ends
    if found.vocab_size > config.vocab_size:
        raise ConfigError(f"the tokenizer has {found.vocab_size} tokens, the model {config.vocab_size}")
    return found


def optimiser(config: ConfigDict, params: Any, data: TrainingData) -> tuple[optax.GradientTransformation, Any]:
    """The gradient transformation of a config and its schedule."""
    known = [name for name in dir(optax) if name.startswith("scale_by_") or name == "trace"]
    if config.optax_name not in known:
        close = difflib.get_close_matches(config.optax_name, known, n=1, cutoff=0.0)
        raise ConfigError(
            f"config.optax_name={config.optax_name!r} is no scale_by_… or trace of optax; nearest: {close[0]}"
        )
    check_call(getattr(optax, config.optax_name), config.optax.to_dict(), "config.optax")
    schedule = config.schedule.to_dict()
    for name in SCHEDULE_DURATIONS:
        steps = data.duration(schedule, name, "config.schedule", default=0)
        for unit in ("epochs", "examples", "percent"):
            schedule.pop(f"{name}_{unit}", None)
        schedule[f"{name}_steps"] = steps
    check_call(optim.schedule, schedule, "config.schedule", args=(data.total_steps,))
    try:
        tx, factor = optim.make(
            params, total_steps=data.total_steps, optax_name=config.optax_name, optax_args=config.optax.to_dict(),
            lr=config.lr, schedule_args=schedule, wd=config.wd, wd_times_lr=config.wd_times_lr,
            wd_mults=config.wd_mults, lr_mults=config.lr_mults, frozen=config.frozen,
            grad_clip_norm=config.grad_clip_norm,
        )  # fmt: skip
        jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"config: {first_line(e)}") from None
    return tx, factor


def evaluators(
    config: ConfigDict, predict: Callable[..., Any], mesh: Mesh, data: TrainingData | None = None
) -> dict[str, Any]:
    """Each evaluator of `config.evals` by name, with an `example` of its model input; they must fit `data`, if given.

    An evaluator with `optional=True` whose data is missing is left out, and said so on stderr.
    """
    built = {}
    for name, options in config.evals.items():
        what = f"config.evals.{name}"
        if not isinstance(options, ConfigDict):
            raise ConfigError(f"{what}={options!r} should be a dict with type, data and pp")
        try:
            built[name] = _evaluator(config, options, what, predict, mesh)
        except input_pipeline.MissingDataError as e:
            if not options.get("optional"):
                raise
            if multihost.is_first():
                print(f"left out: evaluation {name!r}: {e}", file=sys.stderr)
            continue
        if data:
            _check_fit(built[name], data, what)
    return built


def _check_fit(evaluator: Any, data: TrainingData, what: str) -> None:
    """Raises ConfigError where an evaluator's images have another shape than those of training, or its labels
    another numbering: class names that are partly the same and not all; or where its texts end otherwise."""
    if data.config.model_name == "lm":
        ends = data.source.end_of_text, evaluator.source.end_of_text  # type: ignore[attr-defined]
        if None not in ends and ends[0] != ends[1]:
            raise ConfigError(f"{what}.data ends documents with token {ends[1]}, the training data with {ends[0]}")
        return
    shape, expected = evaluator.example.shape[1:], data.task.example.shape[1:]
    if shape != expected:
        raise ConfigError(f"{what}.pp yields images of {shape}, training of {expected}")
    ours, theirs = data.source.class_names or (), evaluator.source.class_names or ()
    if evaluator.target[1] and ours != theirs and set(ours) & set(theirs):
        differing = sorted(set(ours) ^ set(theirs)) or ["their order"]
        raise ConfigError(f"{what}.data has other classes than the training data: {', '.join(differing[:6])}")


def _evaluator(config: ConfigDict, options: ConfigDict, what: str, predict: Callable[..., Any], mesh: Mesh) -> Any:
    """One evaluator, its arguments and its first example checked."""
    kind = options.get("type")
    known = EVALUATORS[config.model_name]
    if kind not in known:
        raise ConfigError(f"{what}.type={kind!r}; {nearest(str(kind), known)}")
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
    built = evaluator(predict, mesh, **kwargs)
    if config.model_name == "lm":
        built.example = text_example(built.source, config, f"{what}.data")
    else:
        built.example = image_example(built.source, built.pp, config, f"{what}.pp", built.corrupt, evaluator.target)
    return built
