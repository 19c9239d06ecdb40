"""Kinds of models, "vit" and "lm": the config keys in which they differ, and the model of a config."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import flax.linen as nn
import jax
from ml_collections import ConfigDict

from dcvit.config.values import replaced, with_classes
from dcvit.errors import ConfigError, check_call, nearest

T = TypeVar("T")


class ModelKind(NamedTuple):
    """A kind of models, "vit" or "lm", by what differs in its configs.

    Fields:
      outputs_key: the config key of the number of outputs.
      variant_key: the argument of `Model` that names a variant.
      labels: the names of plain and of composed models without a variant.
    """

    outputs_key: str
    variant_key: str
    labels: tuple[str, str]


KINDS = {
    "vit": ModelKind("num_classes", "variant", ("ViT", "DCViT")),
    "lm": ModelKind("vocab_size", "preset", ("Transformer", "DCFormer")),
}


def kind_of(config: ConfigDict) -> ModelKind:
    """Return the kind of `config.model_name`. Raise ConfigError if there is no such model."""
    if config.model_name not in KINDS:
        raise ConfigError(f"config.model_name={config.model_name!r}; {nearest(config.model_name, KINDS)}")
    return KINDS[config.model_name]


def require(value: T | None, key: str) -> T:
    """Return `value`, that of the config's `key`, which may also come from the data or from a workdir.

    Raises:
      ConfigError: the value is None.
    """
    if value is None:
        raise ConfigError(f"config.{key} is not known: set it, or give the data or the --workdir that determines it")
    return value


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


def completed(config: ConfigDict, run: ConfigDict) -> ConfigDict:
    """Return `config` with what it lacks from `run`, the config of a training run, which may be empty.

    It is the number of classes of a model of images, and the vocabulary size, context and end of text of one of text.

    Raises:
      ConfigError: there is no such model, or one of them is not known.
    """
    if kind_of(config) is KINDS["vit"]:
        classes = run.get("num_classes") if config.num_classes is None else config.num_classes
        return with_classes(config, require(classes, "num_classes"))
    model, data = run.get("model", {}), config.input.get("data", {})
    if not isinstance(model, Mapping | ConfigDict) or not isinstance(data, Mapping | ConfigDict):
        raise ConfigError("config.model and config.input.data should be dicts")
    context = model.get("context", data.get("context"))
    return with_text(config, run.get("vocab_size"), context, model.get("end_of_text"))


@typing.runtime_checkable
class Device(typing.Protocol):
    """A device of JAX or of a topology. Those of GPUs also have a `compute_capability`."""

    platform: str


def make_model(config: ConfigDict, device: Device | None = None) -> nn.Module:
    """Build the linen module of `config.model`, with one output if the config leaves their number to the data.

    The value "auto" of `config.model.dtype_mm` is bfloat16 on TPUs and GPUs, and float32 on CPUs and on NVIDIA GPUs
    older than compute capability 8.0, which do not multiply bfloat16 numbers. That of `config.model.remat` is "none" on
    CPUs, which have more memory, and "full_but_attention" on all other devices.

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
    if "auto" in (fields.get("dtype_mm"), fields.get("remat")):
        fields = _with_automatic(fields, jax.devices()[0] if device is None else device)
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


def _with_automatic(fields: Mapping[str, object], device: Device) -> dict[str, object]:
    """Return the fields of a model with the values for a device in place of "auto"."""
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; AMD's are like "gfx942"
    multiplies = device.platform == "tpu" or (device.platform == "gpu" and capability[:2] not in ("5.", "6.", "7."))
    chosen = {
        "dtype_mm": "bfloat16" if multiplies else "float32",
        "remat": "none" if device.platform == "cpu" else "full_but_attention",
    }
    return {name: chosen.get(name, value) if value == "auto" else value for name, value in fields.items()}
