"""From a checked config to the objects it names: model, optimiser, data, evaluators. What does not fit
together is a ConfigError here, before anything compiles.
"""

from __future__ import annotations

import difflib
import importlib
import typing
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit import losses, optim
from dcvit.config import ConfigError, Options, check_call, duration, is_duration
from input_pipeline.errors import nearest

MODELS = ("vit",)
EVALUATORS = ("classification",)
SCHEDULE_DURATIONS = ("warmup", "cooldown")


def model_module(config: ConfigDict) -> Any:
    """The module `dcvit.models.<model_name>`."""
    if config.model_name not in MODELS:
        raise ConfigError(f"config.model_name={config.model_name!r}; {nearest(config.model_name, MODELS)}")
    return importlib.import_module(f"dcvit.models.{config.model_name}")


def model(config: ConfigDict) -> nn.Module:
    """The linen module of `config.model`."""
    module = model_module(config)
    fields = config.model.to_dict()
    variant = fields.pop("variant", None)
    for key in ("num_classes", "name", "parent"):
        if key in fields:
            raise ConfigError(f"config.model.{key} is not for a config to set; the classes are config.num_classes")
    check_call(typing.get_type_hints(module.Model)["return"], fields, "config.model")
    try:
        built: nn.Module = module.Model(config.num_classes or None, variant=variant, **fields)
    except (ValueError, AttributeError) as e:
        raise ConfigError(f"config.model.variant: {e}") from None
    return built


def param_shapes(net: nn.Module, image_shape: tuple[int, ...]) -> Any:
    """The tree of parameter shapes for images of `image_shape` (height, width, channels)."""
    images = jax.ShapeDtypeStruct((1, *image_shape), np.float32)
    try:
        return jax.eval_shape(net.init, jax.random.key(0), images)["params"]
    except (ValueError, TypeError) as e:
        raise ConfigError(f"config.model: {str(e).splitlines()[0]}") from e


def predictor(net: nn.Module) -> Callable[..., jax.Array]:
    """(params, images B H W C) -> logits B C, without dropout."""

    def predict(params: Any, images: jax.Array) -> jax.Array:
        logits: jax.Array = net.apply({"params": params}, images, train=False)[0]
        return logits

    return predict


class TrainingData:
    """The training source of a config, and what follows from it: image shape and the total of steps."""

    def __init__(self, config: ConfigDict):
        known = {"data": dict, "batch_size": int, "pp": str}
        for key in config.input:
            if key not in known:
                raise ConfigError(f"config.input has no key {key!r}; {nearest(key, known)}")
        for key, expected in known.items():
            value = config.input.get(key)
            value = value.to_dict() if isinstance(value, ConfigDict) else value
            if not isinstance(value, expected) or isinstance(value, bool):
                raise ConfigError(f"config.input.{key}={value!r} should be of type {expected.__name__}")
        self.batch_size, self.pp, self.seed = config.input.batch_size, config.input.pp, config.seed
        if self.batch_size < 1 or self.batch_size % (config.grad_accum * jax.device_count()):
            raise ConfigError(
                f"config.input.batch_size={self.batch_size} is no multiple of "
                f"grad_accum {config.grad_accum} × {jax.device_count()} devices"
            )
        self.source = open_source(config.input.data, "config.input.data")
        if len(self.source) < self.batch_size:
            raise ConfigError(f"config.input: {len(self.source)} examples do not fill one batch of {self.batch_size}")
        self.image_shape = example_shape(self.source, self.pp, config, "config.input.pp")
        total = duration(config, "total", batch_size=self.batch_size, examples=len(self.source))
        if not total:
            raise ConfigError("config: give total_epochs, total_steps or total_examples, above 0")
        self.total_steps = total

    def duration(self, config: Options, name: str, what: str, default: int | None = None) -> int | None:
        """A duration of the config in steps; see `dcvit.config.duration`."""
        return duration(
            config, name, batch_size=self.batch_size, examples=len(self.source),
            total_steps=self.total_steps, default=default, what=what,
        )  # fmt: skip

    def batches(self, start_step: int) -> Any:
        return input_pipeline.train_batches(self.source, self.pp, self.batch_size, self.seed, start_step)


def open_source(data: Options, what: str) -> input_pipeline.Source:
    """`input_pipeline.open_source` of a config's `data`."""
    check_data(data, what)
    return input_pipeline.open_source(**dict(data))


def check_data(data: Any, what: str) -> None:
    """Raises ConfigError where `data` does not name a kind."""
    if not isinstance(data, Mapping | ConfigDict) or not isinstance(data.get("kind"), str):
        raise ConfigError(f"{what}.kind names the kind of data; known: {', '.join(input_pipeline.KINDS)}")


def example_shape(source: input_pipeline.Source, pp: str, config: ConfigDict, what: str) -> tuple[int, ...]:
    """The shape of a preprocessed image; checks that `pp` yields what the model and the loss take."""
    example = input_pipeline.Preprocess(pp)(source[0], np.random.default_rng(0))
    for key, ndim in (("image", 3), ("labels", 1)):
        if np.ndim(example.get(key, 0)) != ndim:
            raise ConfigError(
                f"{what} yields {', '.join(example)}; expected image (height, width, channels) and labels"
            )
    if example["image"].dtype != np.float32:
        raise ConfigError(f"{what} yields {example['image'].dtype} images; add value_range(-1, 1)")
    if len(example["labels"]) != config.num_classes:
        raise ConfigError(f"{what} yields {len(example['labels'])} classes, config.num_classes={config.num_classes}")
    return tuple(example["image"].shape)


def optimiser(config: ConfigDict, params: Any, data: TrainingData) -> tuple[optax.GradientTransformation, Any]:
    """The gradient transformation of a config and its schedule."""
    if not config.optax_name.startswith("scale_by_") or not hasattr(optax, config.optax_name):
        known = [name for name in dir(optax) if name.startswith("scale_by_")]
        close = difflib.get_close_matches(config.optax_name, known, n=1, cutoff=0.0)
        raise ConfigError(f"config.optax_name={config.optax_name!r} is no scale_by_… of optax; nearest: {close[0]}")
    check_call(getattr(optax, config.optax_name), config.optax.to_dict(), "config.optax")
    schedule = config.schedule.to_dict()
    for name in SCHEDULE_DURATIONS:
        steps = data.duration(schedule, name, "config.schedule", default=0)
        for unit in ("epochs", "examples", "percent"):
            schedule.pop(f"{name}_{unit}", None)
        schedule[f"{name}_steps"] = steps
    check_call(optim.schedule, schedule, "config.schedule", args=(data.total_steps,))
    if config.loss not in losses.NAMES:
        raise ConfigError(f"config.loss={config.loss!r}; {nearest(config.loss, losses.NAMES)}")
    try:
        tx, factor = optim.make(
            params, total_steps=data.total_steps, optax_name=config.optax_name, optax_args=config.optax.to_dict(),
            lr=config.lr, schedule_args=schedule, wd=config.wd, wd_times_lr=config.wd_times_lr,
            wd_mults=config.wd_mults, lr_mults=config.lr_mults, frozen=config.frozen,
            grad_clip_norm=config.grad_clip_norm,
        )  # fmt: skip
        jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"config: {str(e).splitlines()[0]}") from None
    return tx, factor


def evaluators(
    config: ConfigDict, predict: Callable[..., Any], mesh: Mesh, image_shape: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Each evaluator of `config.evals` by name; their images must have `image_shape` where it is given."""
    built = {}
    for name, options in config.evals.items():
        what = f"config.evals.{name}"
        if not isinstance(options, ConfigDict):
            raise ConfigError(f"{what}={options!r} should be a dict with type, data and pp")
        kwargs = {k: v for k, v in options.to_dict().items() if k != "type" and not is_duration(k, ("log",))}
        kind = options.get("type")
        if kind not in EVALUATORS:
            raise ConfigError(f"{what}.type={kind!r}; {nearest(str(kind), EVALUATORS)}")
        kwargs.setdefault("loss", config.loss)
        check_data(kwargs.get("data"), f"{what}.data")
        if isinstance(kwargs.get("batch_size"), int) and kwargs["batch_size"] < 1:
            raise ConfigError(f"{what}.batch_size={kwargs['batch_size']} should be 1 or more")
        if kwargs["loss"] not in losses.NAMES:
            raise ConfigError(f"{what}.loss={kwargs['loss']!r}; {nearest(str(kwargs['loss']), losses.NAMES)}")
        evaluator = importlib.import_module(f"dcvit.evaluators.{kind}").Evaluator
        check_call(evaluator, kwargs, what, args=(predict, mesh))
        built[name] = evaluator(predict, mesh, **kwargs)
        found = example_shape(built[name].source, kwargs["pp"], config, f"{what}.pp")
        if image_shape not in (None, found):
            raise ConfigError(f"{what}.pp yields images of {found}, training of {image_shape}")
    return built
