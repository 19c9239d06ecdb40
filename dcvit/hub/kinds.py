"""Kinds of models, "vit" and "lm": the config keys and evaluators in which they differ; and the model of a config."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from ml_collections import ConfigDict

from dcvit.config.durations import Options
from dcvit.config.values import replaced, with_classes
from dcvit.errors import ConfigError, check_call, nearest
from dcvit.hub.data import image_example, require, text_example
from dcvit.models import losses


class ModelKind(NamedTuple):
    """A kind of models, "vit" or "lm", by what differs in its configs and evaluators.

    Fields:
      outputs_key: the config key of the number of outputs.
      variant_key: the argument of `Model` that names a variant.
      evaluator_types: the evaluators of such models.
      complete: function (config, config of a training run) -> the config, with missing sizes from the run's.
      evaluator_example: function (evaluator, config, name in messages) -> the shape of its model input.
    """

    outputs_key: str
    variant_key: str
    evaluator_types: tuple[str, ...]
    complete: Callable[[ConfigDict, Options], ConfigDict]
    evaluator_example: Callable[[Any, ConfigDict, str], jax.ShapeDtypeStruct]


def kind_of(config: ConfigDict) -> ModelKind:
    """Return the kind of `config.model_name`. Raise ConfigError if there is no such model."""
    if config.model_name not in KINDS:
        raise ConfigError(f"config.model_name={config.model_name!r}; {nearest(config.model_name, KINDS)}")
    return KINDS[config.model_name]


def check_loss(name: object, what: str) -> None:
    """Raise ConfigError if `name` is not a loss of image models."""
    if name not in losses.NAMES:
        raise ConfigError(f"{what}={name!r}; {nearest(str(name), losses.NAMES)}")


def with_text(config: ConfigDict, vocab_size: int | None, context: int | None, end_of_text: int | None) -> ConfigDict:
    """Return the config with `vocab_size`, `model.context` and, for a document mask, `model.end_of_text` where unset.

    Raises:
      ConfigError: one of them is not known.
    """
    model = {"context": context, **config.model.to_dict()}
    if config.document_mask:
        model = {"end_of_text": end_of_text, **model}
        require(model["end_of_text"], "model.end_of_text")
    vocab_size = require(vocab_size if config.vocab_size is None else config.vocab_size, "vocab_size")
    require(model["context"], "model.context")
    return replaced(config, vocab_size=vocab_size, model=model)


def _complete_images(config: ConfigDict, run: Options) -> ConfigDict:
    """Return `config` with the number of classes that `run`, the config of a training run, has, unless it has one.

    Raises:
      ConfigError: neither config states the number of classes.
    """
    classes = run.get("num_classes") if config.num_classes is None else config.num_classes
    if classes is None:
        raise ConfigError("config.num_classes=None: give --workdir of the training run, or --config.num_classes=NUMBER")
    return with_classes(config, classes)


def _complete_text(config: ConfigDict, run: Options) -> ConfigDict:
    """Return `config` with the vocabulary size, context and end of text that it lacks, from that of a training run.

    Raises:
      ConfigError: neither config states one of them.
    """
    model, data = run.get("model", {}), config.input.get("data", {})
    if not isinstance(model, Mapping | ConfigDict) or not isinstance(data, Mapping | ConfigDict):
        raise ConfigError("config.model and config.input.data should be dicts")
    context = model.get("context", data.get("context"))
    return with_text(config, run.get("vocab_size"), context, model.get("end_of_text"))


def _image_example(evaluator: Any, config: ConfigDict, what: str) -> jax.ShapeDtypeStruct:
    """Return the shape of the evaluator's model input; see `dcvit.hub.data.image_example`."""
    return image_example(evaluator.source, evaluator.pp, config, f"{what}.pp", evaluator.corrupt, evaluator.target)


def _text_example(evaluator: Any, config: ConfigDict, what: str) -> jax.ShapeDtypeStruct:
    """Return the shape of the evaluator's model input; see `dcvit.hub.data.text_example`."""
    return text_example(evaluator.source, config, f"{what}.data")


KINDS = {
    "vit": ModelKind(
        "num_classes", "variant", ("classification", "multilabel", "fewshot"), _complete_images, _image_example
    ),
    "lm": ModelKind("vocab_size", "preset", ("perplexity", "in_context"), _complete_text, _text_example),
}


@typing.runtime_checkable
class Device(typing.Protocol):
    """A device of JAX or of a topology. Those of GPUs also have a `compute_capability`."""

    platform: str


def make_model(config: ConfigDict, device: Device | None = None) -> nn.Module:
    """Build the linen module of `config.model`, with one output if the config leaves their number to the data.

    The value "auto" of `config.model.dtype_mm` is bfloat16 on TPUs and GPUs, and float32 on CPUs and on NVIDIA GPUs
    older than compute capability 8.0, which do not multiply bfloat16 numbers.

    Args:
      config: the config.
      device: a device of the model; by default JAX's first one.

    Raises:
      ConfigError: an unknown model, variant or field, or a value of the wrong type.
    """
    kind = kind_of(config)
    module = importlib.import_module(f"dcvit.models.{config.model_name}")
    # Tuples, because jax.jit needs a module to be hashable.
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in config.model.to_dict().items()}
    if fields.get("dtype_mm") == "auto":
        fields["dtype_mm"] = _automatic_dtype(jax.devices()[0] if device is None else device)
    variant, heads = fields.pop(kind.variant_key, None), fields.pop("heads", None)
    for key in (kind.outputs_key, "name", "parent"):
        if key in fields:
            raise ConfigError(
                f"config.model.{key} cannot be set in a config; the number of outputs is config.{kind.outputs_key}"
            )
    outputs = 1 if config[kind.outputs_key] is None else config[kind.outputs_key]
    names = {kind.variant_key: variant, "heads": heads}
    check_call(typing.get_type_hints(module.Model)["return"], fields, "config.model", args=(outputs,), also=names)
    try:
        model: nn.Module = module.Model(outputs, **names, **fields)
    except (ValueError, AttributeError) as e:
        raise ConfigError(f"config.model: {e}") from None
    return model


def _automatic_dtype(device: Device) -> str:
    """Return the dtype of the computation on a device for `dtype_mm="auto"`."""
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; AMD's are like "gfx942"
    multiplies = device.platform == "tpu" or (device.platform == "gpu" and capability[:2] not in ("5.", "6.", "7."))
    return "bfloat16" if multiplies else "float32"
