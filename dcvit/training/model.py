"""Model of a config, and its initial parameters from a checkpoint."""

from __future__ import annotations

import importlib
import logging
import shlex
import typing
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
from ml_collections import ConfigDict

from dcvit.config.keys import is_rate
from dcvit.config.load import defaults, run_config
from dcvit.errors import CheckpointError, ConfigError, check_call, check_regex, first_line
from dcvit.models import Params
from dcvit.models.lora import Adaptation
from dcvit.models.trees import shapes_of
from dcvit.models.upcycling import fields_that_change_the_function
from dcvit.runs.workdir import check_checkpoint
from dcvit.training.tasks import task_class
from dcvit.weights import pretrained
from dcvit.weights.families import Weights
from dcvit.weights.loading import open_described
from dcvit.weights.modules import build, errors_name_file
from dcvit.weights.placement import period_of
from input_pipeline.files import expand

LOG = logging.getLogger(__name__)
SIZES = ("width", "depth", "num_heads", "num_key_heads", "mlp_dim", "patch_size")  # of models, in shapes of parameters


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
    task = task_class(config)
    module = importlib.import_module(f"dcvit.models.{config.model_name}")
    # Tuples, because jax.jit needs a module to be hashable.
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in config.model.to_dict().items()}
    if fields.get("dtype_mm") == "auto":
        fields["dtype_mm"] = _automatic_dtype(jax.devices()[0] if device is None else device)
    variant = fields.pop(task.variant_key, None)
    for key in (task.outputs_key, "name", "parent"):
        if key in fields:
            raise ConfigError(
                f"config.model.{key} cannot be set in a config; the number of outputs is config.{task.outputs_key}"
            )
    outputs = 1 if config[task.outputs_key] is None else config[task.outputs_key]
    check_call(typing.get_type_hints(module.Model)["return"], fields, "config.model", args=(outputs,))
    try:
        model: nn.Module = module.Model(outputs, **{task.variant_key: variant}, **fields)
    except (ValueError, AttributeError) as e:
        raise ConfigError(f"config.model: {e}") from None
    return model


def _automatic_dtype(device: Device) -> str:
    """Return the dtype of the computation of a device where the config leaves it open."""
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; AMD's are like "gfx942"
    multiplies = device.platform == "tpu" or (device.platform == "gpu" and capability[:2] not in ("5.", "6.", "7."))
    return "bfloat16" if multiplies else "float32"


def make_loader(config: ConfigDict, model: nn.Module, shapes: Params) -> Callable[[Params], Params] | None:
    """Return the function that loads the parameters of `config.model_init`, or None if training starts fresh.

    Its result has None for each parameter that is not loaded.
    """
    if not config.model_init:
        return None
    load_params = importlib.import_module(f"dcvit.models.{config.model_name}").load
    options, fields = config.model_load.to_dict(), config.model.to_dict()
    check_call(load_params, options, "config.model_load", args=(shapes, config.model_init, {}))
    for pattern in options.get("dont_load", ()):
        check_regex(pattern, "config.model_load.dont_load")

    def load_initial(shapes: Params) -> Params:
        start = expand(pretrained.resolve(config.model_init))
        check_checkpoint(start)
        weights = open_described(start)
        source = _source_model(config, weights) if weights or upcycles(config) else None
        _check_same_function(config, source, model)
        try:
            loaded = load_params(shapes, config.model_init, fields, **options)
        except CheckpointError as e:
            if sizes := _other_sizes(source or _source_model(config, weights), model):
                raise CheckpointError(f"{e}; the model there has {sizes}") from None
            if "head/kernel (" not in str(e):
                raise
            head = "--config.model_load.dont_load=\"['head/.*']\""
            raise CheckpointError(f"{e}; to start the head from its initial values: {head}") from None
        params: Params = jax.tree.map(lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, loaded)
        return params

    return load_initial


def make_adaptation(config: ConfigDict, shapes: Params) -> tuple[Adaptation | None, Params]:
    """Return the adaptation of `config.lora`, if there is one, and the shapes of the parameters that are trained.

    Raises:
      ConfigError: an option is invalid, or there is nothing that could be adapted.
    """
    options = config.lora.to_dict()
    if not options:
        return None, shapes
    whole = tuple(config.model_load.get("dont_load", ()))
    if "whole" in options:
        raise ConfigError(
            "config.lora has no option 'whole': parameters of model_load.dont_load are trained as a whole"
        )
    check_call(Adaptation, options, "config.lora")
    check_regex(options["targets"], "config.lora.targets")
    if not is_rate(options.get("alpha") or 0.0):
        raise ConfigError(f"config.lora.alpha={options['alpha']!r} should be finite and not negative")
    if not config.model_init or upcycles(config):
        raise ConfigError("config.lora adapts the parameters of config.model_init: set it, without model_load.upcycle")
    found = Adaptation(**options, whole=whole)
    try:
        trained = jax.eval_shape(lambda params: found.trained(params, jax.random.key(0)), shapes)
    except ValueError as e:
        raise ConfigError(f"config.lora: {first_line(e)}") from None
    if period_of(shapes_of(trained)) not in (0, period := period_of(shapes_of(shapes))):
        raise ConfigError(
            f"config.lora.targets={found.targets!r} matches none of the last of the {period} layers that a scan "
            "repeats, from which a checkpoint's layers are numbered: match one, or set config.model.scan=False"
        )
    return found, trained


def upcycles(config: ConfigDict) -> bool:
    """Return True if a run starts from the parameters of a model with fewer compositions."""
    return bool(config.model_init and config.model_load.get("upcycle"))


def _check_same_function(config: ConfigDict, source: nn.Module | None, model: nn.Module) -> None:
    """Compare the function of a model, without compositions, with that of the model it starts from.

    Raises:
      ConfigError: they differ, and the run upcycles. Otherwise a warning is logged.
    """
    different = {} if source is None else fields_that_change_the_function(source, model)
    if not different:
        return
    found = _listed(different)
    words = " ".join(f"--config.model.{name}={shlex.quote(repr(old))}" for name, (old, _) in different.items())
    if upcycles(config):
        raise ConfigError(
            f"config.model: upcycling preserves the function of {config.model_init}, but {found}; set {words}"
        )
    LOG.warning("config.model differs from the model of %s: %s; to use that: %s", config.model_init, found, words)


def warn_of_other_function(weights: Weights, model: nn.Module, pp: str) -> None:
    """Log a warning if weights describe a model of another function, or other preprocessing, than a config has."""
    described = weights.description
    with errors_name_file(weights.path):
        source = build(described)
    different = fields_that_change_the_function(source, model) if type(source) is type(model) else {}
    if described.pp and described.pp != pp:
        different |= {"pp_predict": (described.pp, pp)}
    if different:
        LOG.warning("the config differs from the model of %s: %s", weights.path, _listed(different))


def _listed(different: Mapping[str, tuple[object, object]]) -> str:
    """Return fields with their value here and, in parentheses, that of the model elsewhere."""
    return ", ".join(f"{name}={new!r} ({old!r} there)" for name, (old, new) in different.items())


def _other_sizes(source: nn.Module | None, model: nn.Module) -> str:
    """Return the options that give a model the sizes of the one it starts from; "" if it has them, or none is known."""
    pairs = {name: (getattr(source, name, None), getattr(model, name, None)) for name in SIZES}
    return " ".join(
        f"--config.model.{name}={shlex.quote(repr(old))}"
        for name, (old, new) in pairs.items()
        if source is not None and old != new
    )


def _source_model(config: ConfigDict, weights: Weights | None) -> nn.Module | None:
    """Return the model of the run or of the weights `config.model_init`; None if it is another kind, or unknown."""
    if weights:
        fields: dict[str, object] = {
            "model_name": weights.description.model_name, "model": weights.description.fields
        }  # fmt: skip
    else:
        fields = run_config(config.model_init)
    if fields.get("model_name") != config.model_name:
        return None
    return make_model(ConfigDict({**defaults(), **fields}))
