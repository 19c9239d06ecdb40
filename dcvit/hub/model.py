"""Trained models: the model of a config, with the checkpoint of its parameters, and `dcvit.load`."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dcvit.config import load as configs
from dcvit.config import values
from dcvit.errors import CheckpointError, ConfigError, checked, nearest
from dcvit.hub import pretrained
from dcvit.hub.data import stored_tokenizer, tokenizer_of, trains_tokenizer, with_tokenizer
from dcvit.hub.evaluate import evaluation_mesh, make_evaluators, predictor
from dcvit.hub.kinds import kind_of, make_model
from dcvit.hub.source import ModelSource, load_params
from dcvit.inference.images import ImageModel, read_class_names
from dcvit.inference.model import Kind, LoadedModel, of_kind
from dcvit.inference.texts import LanguageModel, check_tokenizer, tokenizer_beside
from dcvit.models import Params
from dcvit.models.lm import LM
from dcvit.models.trees import Tensors, check_tree, param_shapes, shapes_of
from dcvit.models.upcycling import fields_that_change_the_function
from dcvit.models.vit import ViT
from dcvit.parallel.sharding import Strategy, check_model, make_mesh, with_shardings
from dcvit.runs.files import Folder, folder
from dcvit.runs.identity import is_free
from dcvit.runs.workdir import check_checkpoint
from dcvit.weights import tensors as files
from dcvit.weights.families import Weights
from dcvit.weights.family import Description
from dcvit.weights.modules import at_image_size, build, errors_name_file, example
from dcvit.weights.placement import place_params
from dcvit.weights.preprocessing import at_size
from dcvit.weights.tensors import Json
from input_pipeline.text.tokenizer import Tokenizer

LOG = logging.getLogger(__name__)
SHARDINGS = {"ddp": "data", "fsdp": "fsdp", "tensor": "tensor"}  # the mesh axis of all devices, by strategy


class TrainedModel:
    """A model as its config describes it, and the source of its parameters; `open_trained` finds both."""

    def __init__(
        self,
        config: ConfigDict,
        source: ModelSource,
        tokenizer: str | None = None,
        image_size: tuple[int, int] | None = None,
    ):
        """
        Args:
          config: must be complete: see `ModelKind.complete`.
          source: the parameters.
          tokenizer: the tokenizer.json of the run.
          image_size: height and width of images, if other than those of the config.
        """
        self._pp, self._image_size = config.pp_predict, image_size
        if image_size:
            config = _at_image_size(config, image_size)
        self._config, self._kind, self._tokenizer = config, kind_of(config), tokenizer
        self.source = source
        self.num_outputs: int = config[self._kind.outputs_key]
        self.pp_predict: str = config.pp_predict
        self.is_multilabel = config.loss == "sigmoid_xent"

    @property
    def label(self) -> str:
        """The variant or preset of the model, or else its kind: "ViT", "DCViT", "Transformer" or "DCFormer"."""
        if name := self._config.model.get(self._kind.variant_key):
            return str(name)
        plain, composed = {"vit": ("ViT", "DCViT"), "lm": ("Transformer", "DCFormer")}[self._config.model_name]
        return composed if getattr(self.model, "compose", None) else plain

    @functools.cached_property
    def model(self) -> nn.Module:
        """The linen module."""
        return make_model(self._config)

    def record(self) -> dict[str, Any]:
        """Return the config as JSON data."""
        found: dict[str, Any] = json.loads(self._config.to_json())
        return found

    def settings(self) -> dict[str, Any]:
        """Return the config keys that determine the parameters, without those that have their default."""
        config, defaults = json.loads(self._config.to_json()), json.loads(json.dumps(values.defaults()))
        return {key: value for key, value in config.items() if not is_free(key) and value != defaults.get(key)}

    def evaluator_options(self, name: str) -> dict[str, Any]:
        """Return the options of an evaluator in the config."""
        found: dict[str, Any] = json.loads(self._config.evals[name].to_json())
        return found

    def params(
        self, inputs: jax.ShapeDtypeStruct | None = None, mesh: Mesh | None = None, strategy: Strategy = "ddp"
    ) -> Params:
        """Load the parameters.

        Args:
          inputs: the shape of model inputs; by default that of `dcvit.training.model.example`.
          mesh, strategy: see `dcvit.parallel.sharding.with_shardings`.

        Raises:
          CheckpointError: the checkpoint is missing, damaged, or does not fit the model.
        """

        def make_like(tensors: Tensors) -> Params:
            description = Description(self._config.model_name, self.num_outputs, {}, self.pp_predict)
            with errors_name_file(self.source.path):
                like_inputs = inputs or example(description, tensors)
            shapes = param_shapes(self.model, like_inputs)
            like: Params = with_shardings(shapes, mesh, strategy)
            return like

        if self.source.weights:
            _warn_of_other_function(self.source.weights, self.model, self._pp)
        return load_params(self.source, make_like, self._at_size if self._image_size else None)

    def _at_size(self, tensors: Tensors) -> Tensors:
        """Return the parameters for images of the size that was asked for."""
        assert self._image_size
        description = Description(self._config.model_name, self.num_outputs, {}, self._pp)
        with errors_name_file(self.source.path):
            return at_image_size(description, tensors, self._image_size)[1]

    def check_params(self, params: Params, inputs: jax.ShapeDtypeStruct, what: str) -> None:
        """Raise CheckpointError if the parameters are not those of the model for inputs of a shape."""
        check_tree(shapes_of(params), shapes_of(param_shapes(self.model, inputs)), what)

    def language_model(self) -> tuple[LM, Params]:
        """Return the module and the parameters of a language model.

        Raises:
          ConfigError: the config is of another kind of model.
          CheckpointError: see `params`.
        """
        self._check_language_model()
        model: Any = self.model
        return model, self.params()

    def evaluators(self) -> tuple[Mesh, Strategy, dict[str, Any]]:
        """Return the mesh and the sharding strategy for evaluation, and the evaluators of `config.evals`."""
        mesh, strategy = evaluation_mesh(self._config, self.model)
        with with_tokenizer(self._config, self._tokenizer) as config:
            return mesh, strategy, make_evaluators(config, predictor(self.model), mesh)

    def tokenizer(self, path: str | None = None) -> Tokenizer:
        """Open the tokenizer at `path`, or else that of the training data; bytes if text was read as bytes.

        Raises:
          ConfigError: the training data was tokens and no path is given, or the tokenizer has more tokens than the
            model.
        """
        self._check_language_model()
        with with_tokenizer(self._config, self._tokenizer) as config:
            found = tokenizer_of(config, path)
        check_tokenizer(found, self.num_outputs)
        return found

    def _check_language_model(self) -> None:
        if self._config.model_name != "lm":
            raise ConfigError(f"config.model_name={self._config.model_name!r}: this needs a language model, 'lm'")


def _at_image_size(config: ConfigDict, size: tuple[int, int]) -> ConfigDict:
    """Return a config whose preprocessing, except that of training, yields images of a height and width.

    Raises:
      ConfigError: the model is not one of images, or a preprocessing has no size that could be changed.
    """
    if config.model_name != "vit":
        raise ConfigError(f"image_size={size[0]}x{size[1]} is for models of images, found {config.model_name!r}")
    config = config.copy_and_resolve_references()
    places = {"config.pp_predict": config} | {f"config.evals.{name}.pp": each for name, each in config.evals.items()}
    for name, place in places.items():
        key = name.rpartition(".")[2]
        if place.get(key):
            try:
                place[key] = at_size(place[key], size)
            except CheckpointError as e:
                raise ConfigError(f"{name}: {e}") from None
    return config


def open_trained(
    workdir: Folder | None,
    config: str | None = None,
    checkpoint: Folder | None = None,
    overrides: Sequence[str] = (),
    image_size: tuple[int, int] | None = None,
) -> TrainedModel:
    """Open the model that the options `--workdir`, `--config` and `--checkpoint` name together.

    Args:
      workdir: the folder of a training run; its config and its latest checkpoint are the defaults. Or the folder of a
        model of the package.
      config: "NAME[:key=value,…]", instead of the workdir's config.
      checkpoint: a checkpoint, a workdir or weights of any format, instead of the workdir's.
      overrides: "a.b=value" for `config`.
      image_size: height and width of images, if other than those of the config. Learned position embeddings are
        interpolated.

    Raises:
      ConfigError: too few options, or a config that is invalid or incomplete.
    """
    pretrained.check_options(workdir, config, checkpoint)
    run = None if workdir is None else ModelSource(workdir)
    source = run if checkpoint is None else ModelSource(checkpoint)
    assert source is not None
    return _open(source, run, None if config is None else configs.load(config, overrides), image_size)


def _open(
    source: ModelSource, run: ModelSource | None, config: ConfigDict | None, image_size: tuple[int, int] | None
) -> TrainedModel:
    """Return the model of a source with the config of a run, or another one."""
    if run and config is None and run.holds_weights and not pretrained.is_pretrained(run.path):
        raise ConfigError(f"{run} is not the folder of a training run; give --config CONFIG --checkpoint {run}")
    saved = run.config() if run else ConfigDict()
    found = saved if config is None else config
    check_checkpoint(source.path)
    tokenizer = stored_tokenizer((run or source).path) if trains_tokenizer(found) else None
    return TrainedModel(kind_of(found).complete(found, saved), source, tokenizer, image_size)


@checked
def load(
    source: str | Path,
    *,
    config: str | None = None,
    sharding: str | None = None,
    image_size: int | Sequence[int] | None = None,
) -> ImageModel | LanguageModel:
    """Load a trained model.

    Args:
      source: a workdir, one of its checkpoints, weights of another library (see `dcvit.weights.families.FAMILIES`), or
        the name of a model of the package: "digits", "tasks" or "text".
      config: "NAME[:key=value,…]", the config of a checkpoint that is in no workdir.
      sharding: splits the parameters over all devices as `config.sharding_strategy`: "fsdp", "tensor" or "ddp" (the
        whole model on each device). By default the model is on the first device.
      image_size: height and width of images, or one number for both, if other than the model was trained with. Learned
        position embeddings are interpolated, and the preprocessing is scaled.

    Raises:
      CheckpointError: the source is missing, damaged, of an unknown format, or does not fit its config.
      ConfigError: an argument or the config is invalid.
    """
    if sharding is not None and sharding not in SHARDINGS:
        raise ConfigError(f"sharding={sharding!r}; {nearest(sharding, SHARDINGS)}")
    size = None if image_size is None else _height_and_width(image_size)
    try:
        found = ModelSource(folder(pretrained.resolve(str(source))))
    except ValueError as e:
        raise ConfigError(str(e)) from None
    return _load(found, None if config is None else configs.load(config), sharding, size)


def _load(
    source: ModelSource, config: ConfigDict | None, sharding: str | None = None, size: tuple[int, int] | None = None
) -> ImageModel | LanguageModel:
    """Load the model of a source, with the config of its run or another one; see `load`."""
    workdir = source.workdir if config is None else None
    if config is None and workdir is None:
        if not isinstance(source.path, Path):
            raise CheckpointError(
                f"{source} is no run; copy weights of other libraries to a local folder, to read them"
            )
        return _load_weights(source, sharding, size)
    run = None if workdir is None else source if workdir == source.path else ModelSource(workdir)
    return _load_trained(_open(source, run, config, size), workdir, sharding)


def _height_and_width(image_size: object) -> tuple[int, int]:
    """Return the size of images as two numbers, or raise ConfigError."""
    numbers = image_size if isinstance(image_size, Sequence) else (image_size, image_size)
    with contextlib.suppress(TypeError, ValueError):
        height, width = map(operator.index, numbers)
        if min(height, width) > 0 and max(height, width) < 100_000:
            return height, width
    raise ConfigError(f"image_size={image_size!r}: expected the number of pixels, or height and width")


def open_model(
    kind: type[Kind],
    workdir: Folder | None,
    config: str | None,
    checkpoint: Folder | None,
    overrides: Sequence[str] = (),
    image_size: tuple[int, int] | None = None,
) -> Kind:
    """Load the model that the options `--workdir`, `--config` and `--checkpoint` name together.

    Args:
      kind: the class of model that the command needs.
      workdir: a training run; or, without other options, anything else that `load` opens.
      config, checkpoint, overrides, image_size: see `open_trained`.

    Raises:
      CheckpointError: see `load`.
      ConfigError: see `load` and `open_trained`; or the model is of another kind.
    """
    alone = config is None and checkpoint is None and not overrides
    source = ModelSource(workdir) if workdir is not None and alone else None
    if source and (source.workdir not in (None, source.path) or source.holds_weights):
        model: LoadedModel = _load(source, None, size=image_size)
    else:
        model = _load_trained(open_trained(workdir, config, checkpoint, overrides, image_size), workdir)
    return of_kind(model, kind, config or workdir)


def _load_trained(
    trained: TrainedModel, workdir: Folder | None, sharding: str | None = None
) -> ImageModel | LanguageModel:
    """Load the parameters of a model that a command has opened; see `load`."""
    module = trained.model
    class_names = [] if isinstance(module, LM) else read_class_names(workdir, trained.num_outputs)
    mesh = _mesh(sharding, module)
    params = trained.params(mesh=mesh, strategy=sharding or "ddp")
    common: Json = {
        "params": params, "config": trained.record(), "source": trained.source.path.name or str(trained.source),
        "mesh": mesh, "open_evaluators": lambda: trained.evaluators()[2],
    }  # fmt: skip
    if isinstance(module, LM):
        return LanguageModel(module, open_tokenizer=trained.tokenizer, **common)
    assert isinstance(module, ViT)
    return ImageModel(
        module, pp=trained.pp_predict, class_names=class_names, multilabel=trained.is_multilabel, **common
    )


def _load_weights(
    source: ModelSource, sharding: str | None, size: tuple[int, int] | None
) -> ImageModel | LanguageModel:
    """Load weights of another library."""
    path, weights = source.path, source.open_weights()
    described, tensors = weights.description, weights.params
    with errors_name_file(path):
        if size:
            described, tensors = at_image_size(described, tensors, size)
        module = build(described)
        shapes = param_shapes(module, example(described, tensors))
    mesh = _mesh(sharding, module)
    params = place_params(tensors, with_shardings(shapes, mesh, sharding or "ddp"), str(weights.path))
    config = {"model_name": described.model_name, "model": dict(described.fields), "pp_predict": described.pp}
    common: Json = {"params": params, "config": config, "source": path.name or str(path), "mesh": mesh}
    if isinstance(module, LM):
        file = files.tokenizer_of(weights.path)
        open_tokenizer = functools.partial(
            tokenizer_beside, default=str(file) if file else None, outputs=described.num_outputs
        )
        return LanguageModel(module, open_tokenizer=open_tokenizer, end_tokens=described.end_tokens, **common)
    names = described.class_names or [str(i) for i in range(described.num_outputs or 0)]
    return ImageModel(module, pp=described.pp, class_names=names, **common)


def _mesh(sharding: str | None, module: nn.Module) -> Mesh | None:
    """Return the mesh of all devices for a sharding strategy. Raise ConfigError if it does not fit the model."""
    if sharding is None:
        return None
    mesh = make_mesh([(SHARDINGS[sharding], -1)])
    check_model(mesh, module)
    return mesh


def _warn_of_other_function(weights: Weights, model: nn.Module, pp: str) -> None:
    """Log a warning if weights describe a model of another function, or other preprocessing, than a config has."""
    described = weights.description
    with errors_name_file(weights.path):
        source = build(described)
    different = fields_that_change_the_function(source, model) if type(source) is type(model) else {}
    if described.pp and described.pp != pp:
        different |= {"pp_predict": (described.pp, pp)}
    if different:
        LOG.warning("the config differs from the model of %s: %s", weights.path, listed(different))


def listed(different: Mapping[str, tuple[object, object]]) -> str:
    """Return fields with their value here and, in parentheses, that of the model elsewhere."""
    return ", ".join(f"{name}={new!r} ({old!r} there)" for name, (old, new) in different.items())
