"""Model of a run: its module, mesh and shapes, and its initial parameters from another model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import shlex
from collections.abc import Callable

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dcvit.config.values import defaults, run_config
from dcvit.dcmha.plan import fused_only
from dcvit.errors import CheckpointError, ConfigError, check_call, check_regex
from dcvit.hub.kinds import make_model
from dcvit.hub.open import listed
from dcvit.hub.source import find
from dcvit.models import Params
from dcvit.models.input_channels import check_rule
from dcvit.models.trees import param_shapes
from dcvit.models.upcycling import fields_that_change_the_function
from dcvit.parallel.sharding import Strategy, check_context
from dcvit.weights.families import Weights

LOG = logging.getLogger(__name__)
SIZES = ("width", "depth", "num_heads", "num_key_heads", "mlp_dim", "patch_size")  # of models, in shapes of parameters


@dataclasses.dataclass(frozen=True)
class ModelSetup:
    """The model of a run: its module, the mesh of devices, and the shapes and the source of its parameters."""

    module: nn.Module
    mesh: Mesh
    strategy: Strategy
    shapes: Params
    load_initial: Callable[[Params], Params] | None  # from parameter shapes to the parameters of `config.model_init`
    upcycle: bool  # `load_initial` upcycles: compositions that it does not load start as the identity


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


def make_loader(config: ConfigDict, model: nn.Module, shapes: Params) -> Callable[[Params], Params] | None:
    """Return the function (shapes) -> parameters that loads `config.model_init`; None if that is not set.

    The parameters are None where nothing is loaded.
    """
    if not config.model_init:
        return None
    load_params = importlib.import_module(f"dcvit.models.{config.model_name}").load
    options, fields = config.model_load.to_dict(), config.model.to_dict()
    check_call(load_params, options, "config.model_load", args=(shapes, config.model_init, {}))
    for pattern in options.get("dont_load", ()):
        check_regex(pattern, "config.model_load.dont_load")
    check_rule(options.get("channels"))

    def load_initial(shapes: Params) -> Params:
        source = _source_model(config, None) if upcycles(config) else None  # of a run
        _check_same_function(config, source, model)
        start = find(config.model_init)
        if start.stated:
            source = _source_model(config, start.stated)
            _check_same_function(config, source, model)
        try:
            loaded = load_params(shapes, start, fields, **options)
        except CheckpointError as e:
            if sizes := _other_sizes(source or _source_model(config, start.stated), model):
                raise CheckpointError(f"{e}; the model there has {sizes}") from None
            if "head/kernel (" not in str(e):
                raise
            head = "--config.model_load.dont_load=\"['head/.*']\""
            raise CheckpointError(f"{e}; to start the head from its initial values: {head}") from None
        params: Params = jax.tree.map(lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, loaded)
        return params

    return load_initial


def upcycles(config: ConfigDict) -> bool:
    """Return True if the config starts from another model's parameters and adds compositions (`model_load.upcycle`)."""
    return bool(config.model_init and config.model_load.get("upcycle"))


def _check_same_function(config: ConfigDict, source: nn.Module | None, model: nn.Module) -> None:
    """Log a warning if fields of `model`, other than compositions, change the function of the model it starts from.

    Raises:
      ConfigError: such fields differ, and the run adds compositions to the source model (upcycling).
    """
    different = {} if source is None else fields_that_change_the_function(source, model)
    if not different:
        return
    found, words = listed(different), _options({name: old for name, (old, _) in different.items()})
    if upcycles(config):
        raise ConfigError(
            f"config.model: upcycling preserves the function of {config.model_init}, but {found}; set {words}"
        )
    LOG.warning("config.model differs from the model of %s: %s; to use that: %s", config.model_init, found, words)


def _other_sizes(source: nn.Module | None, model: nn.Module) -> str:
    """Return command-line options that give `model` the sizes of `source`; "" if they are equal or `source` is None."""
    sizes = {} if source is None else {name: getattr(source, name, None) for name in SIZES}
    return _options({name: size for name, size in sizes.items() if size != getattr(model, name, None)})


def _options(fields: dict[str, object]) -> str:
    """Return the command-line options that set fields of the model."""
    return " ".join(f"--config.model.{name}={shlex.quote(repr(value))}" for name, value in fields.items())


def _source_model(config: ConfigDict, weights: Weights | None) -> nn.Module | None:
    """Return the model that `config.model_init` has parameters of; None if its `model_name` is not the config's."""
    if weights:
        fields: dict[str, object] = {
            "model_name": weights.description.model_name, "model": weights.description.fields
        }  # fmt: skip
    else:
        fields = run_config(config.model_init)
    if fields.get("model_name") != config.model_name:
        return None
    return make_model(ConfigDict({**defaults(), **fields}))
