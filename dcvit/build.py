"""From a checked config to the objects it names: model, optimiser, data, evaluators. What does not fit
together is a ConfigError here, before anything compiles.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Generator, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit import losses, optim, pixels
from dcvit.config import ConfigError, Options, check_call, duration, is_duration, with_classes
from input_pipeline.errors import first_line, nearest

MODELS = ("vit",)
EVALUATORS = ("classification", "fewshot")
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
        raise ConfigError(f"config.model: {first_line(e)}") from e


def predictor(net: nn.Module) -> Callable[..., tuple[jax.Array, dict[str, Any]]]:
    """(params, images B H W C) -> logits B C and the model's named intermediates, without dropout."""

    def predict(params: Any, images: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        return net.apply({"params": params}, images, train=False)  # type: ignore[return-value]

    return predict


class TrainingData:
    """The training source of a config, and what follows from it: image shape, classes and the total of steps.

    `config` is the given one with the number of classes filled in, where it was None, and its pp strings with it
    in place of "{num_classes}".
    """

    def __init__(self, config: ConfigDict):
        known = {"data": dict, "batch_size": int, "pp": str, "corrupt": str, "corrupt_max": int}
        for key in config.input:
            if key not in known:
                raise ConfigError(f"config.input has no key {key!r}; {nearest(key, known)}")
        options = {"corrupt": "fail", "corrupt_max": 100, **config.input.to_dict()}
        for key, expected in known.items():
            value = options.get(key)
            if not isinstance(value, expected) or isinstance(value, bool):
                raise ConfigError(f"config.input.{key}={value!r} should be of type {expected.__name__}")
        self.batch_size, self.seed = options["batch_size"], config.seed
        if self.batch_size < 1 or self.batch_size % (config.grad_accum * jax.device_count()):
            raise ConfigError(
                f"config.input.batch_size={self.batch_size} is no multiple of "
                f"grad_accum {config.grad_accum} × {jax.device_count()} devices"
            )
        self.corrupt = input_pipeline.Corrupt(options["corrupt"], options["corrupt_max"])
        self.source = open_source(config.input.data, "config.input.data")
        if len(self.source) < self.batch_size:
            raise ConfigError(f"config.input: {len(self.source)} examples do not fill one batch of {self.batch_size}")
        self.config = with_classes(config, _num_classes(config, self.source.class_names))
        pp = self.config.input.pp
        self.image_shape = example_shape(self.source, pp, self.config, "config.input.pp", self.corrupt)
        self.pp, self.on_device = pixels.split(pp)  # what the host does, and what is done to its images after
        self._check_predict(self.config.pp_predict)
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

    def _check_predict(self, pp: str) -> None:
        """Raises ConfigError where `pp_predict` does not make a stored image what the model was trained on."""
        preprocess = input_pipeline.Preprocess(pp)
        if not pp or self.corrupt.policy == "skip" or not isinstance(image := self.source[0]["image"], bytes):
            return
        found = preprocess({"image": image}, np.random.default_rng(0))["image"]
        if found.shape != self.image_shape or found.dtype != np.float32:
            expected = f"config.input.pp float32 of {self.image_shape}"
            raise ConfigError(f"config.pp_predict yields {found.dtype} of {found.shape}, {expected}")

    def batches(self, start_step: int) -> Generator[dict[str, np.ndarray], None, None]:
        """The training stream from a step on."""
        return input_pipeline.train_batches(
            self.source, self.pp, self.batch_size, self.seed, start_step, corrupt=self.corrupt
        )


def _num_classes(config: ConfigDict, class_names: tuple[str, ...] | None) -> int:
    """`config.num_classes`, or where it is None as many as the data names."""
    if config.num_classes is None and not class_names:
        raise ConfigError("config.num_classes=None, but the training data does not name its classes: give the number")
    return len(class_names or ()) if config.num_classes is None else int(config.num_classes)


def open_source(data: Options, what: str) -> input_pipeline.Source:
    """`input_pipeline.open_source` of a config's `data`."""
    check_data(data, what)
    return input_pipeline.open_source(**dict(data))


def check_data(data: Any, what: str) -> None:
    """Raises ConfigError where `data` does not name a kind, or what every kind takes is of another type."""
    if not isinstance(data, Mapping | ConfigDict) or not isinstance(data.get("kind"), str):
        raise ConfigError(f"{what}.kind names the kind of data; known: {', '.join(input_pipeline.KINDS)}")
    own = {key: data[key] for key in ("kind", "limit", "cache") if key in data}
    check_call(input_pipeline.open_source, own, what)


def example_shape(
    source: input_pipeline.Source,
    pp: str,
    config: ConfigDict,
    what: str,
    corrupt: input_pipeline.Corrupt,
    target: tuple[str, int] = ("labels", 1),
) -> tuple[int, ...]:
    """The shape of a preprocessed image; checks that `pp` yields what the model and the loss take.

    `target` is the name and rank of what stands beside the image: "labels", a vector over the classes, or "label".
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
    classes = len(example["labels"]) if target[1] else config.num_classes
    if classes != config.num_classes:
        raise ConfigError(f"{what} yields {classes} classes, config.num_classes={config.num_classes}")
    if target[1] and len(source.class_names or ()) > classes:
        raise ConfigError(f"{what}: the data has {len(source.class_names or ())} classes, config.num_classes={classes}")
    return tuple(example["image"].shape)


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
    """Each evaluator of `config.evals` by name, with its `image_shape`; they must fit the training data, if given.

    An evaluator with `optional=True` whose data is missing is left out, and said so on stderr.
    """
    check_loss(config.loss, "config.loss")
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
            print(f"left out: evaluation {name!r}: {e}", file=sys.stderr)
            continue
        if data:
            _check_fit(built[name], data, what)
    return built


def _check_fit(evaluator: Any, data: TrainingData, what: str) -> None:
    """Raises ConfigError where an evaluator's images have another shape than those of training, or its labels
    another numbering: class names that are partly the same and not all."""
    if evaluator.image_shape != data.image_shape:
        raise ConfigError(f"{what}.pp yields images of {evaluator.image_shape}, training of {data.image_shape}")
    ours, theirs = data.source.class_names or (), evaluator.source.class_names or ()
    if evaluator.target[1] and ours != theirs and set(ours) & set(theirs):
        differing = sorted(set(ours) ^ set(theirs)) or ["their order"]
        raise ConfigError(f"{what}.data has other classes than the training data: {', '.join(differing[:6])}")


def _evaluator(config: ConfigDict, options: ConfigDict, what: str, predict: Callable[..., Any], mesh: Mesh) -> Any:
    """One evaluator, its arguments and its first example checked."""
    kind = options.get("type")
    if kind not in EVALUATORS:
        raise ConfigError(f"{what}.type={kind!r}; {nearest(str(kind), EVALUATORS)}")
    kwargs = {
        k: v for k, v in options.to_dict().items() if k not in ("type", "optional") and not is_duration(k, ("log",))
    }
    for key in ("data", "test_data") if "test_data" in kwargs else ("data",):
        check_data(kwargs.get(key), f"{what}.{key}")
    if isinstance(kwargs.get("batch_size"), int) and kwargs["batch_size"] < 1:
        raise ConfigError(f"{what}.batch_size={kwargs['batch_size']} should be 1 or more")
    evaluator = importlib.import_module(f"dcvit.evaluators.{kind}").Evaluator
    if "loss" in inspect.signature(evaluator).parameters:
        check_loss(kwargs.setdefault("loss", config.loss), f"{what}.loss")
    check_call(evaluator, kwargs, what, args=(predict, mesh))
    built = evaluator(predict, mesh, **kwargs)
    built.image_shape = example_shape(built.source, built.pp, config, f"{what}.pp", built.corrupt, evaluator.target)
    return built


def check_loss(name: Any, what: str) -> None:
    """Raises ConfigError where there is no such loss."""
    if name not in losses.NAMES:
        raise ConfigError(f"{what}={name!r}; {nearest(str(name), losses.NAMES)}")
