"""Trained models: the model of a config, with the source (file or folder) of its parameters."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dcvit.config import load as configs
from dcvit.config import values
from dcvit.errors import CheckpointError, ConfigError
from dcvit.hub import pretrained
from dcvit.hub.data import check_tokenizer, stored_tokenizer, tokenizer_of, trains_tokenizer, with_tokenizer
from dcvit.hub.evaluate import check_thresholds, evaluation_mesh, make_evaluators, predictor
from dcvit.hub.kinds import kind_of, make_model
from dcvit.hub.source import ModelSource, load_params
from dcvit.models import Params
from dcvit.models.lm import LM
from dcvit.models.trees import param_shapes
from dcvit.models.upcycling import fields_that_change_the_function
from dcvit.models.vit import with_grid
from dcvit.parallel.sharding import Strategy, with_shardings
from dcvit.parallel.trees import Tensors, check_tree, shapes_of
from dcvit.runs import thresholds
from dcvit.runs.files import Folder, absolute, folder
from dcvit.runs.identity import is_free
from dcvit.runs.steps import is_step, step_folder
from dcvit.runs.thresholds import Thresholds
from dcvit.runs.workdir import check_checkpoint, read_class_names
from dcvit.weights.families import Weights, verified
from dcvit.weights.family import Description, build, errors_name_file, example
from dcvit.weights.preprocessing import at_size
from input_pipeline.text.tokenizer import Tokenizer

LOG = logging.getLogger(__name__)


class TrainedModel:
    """A model as its config describes it, and the source of its parameters; `open_trained` finds both."""

    def __init__(
        self,
        config: ConfigDict,
        source: ModelSource,
        tokenizer: str | None = None,
        image_size: tuple[int, int] | None = None,
        workdir: Folder | None = None,
    ):
        """
        Args:
          config: must be complete: see `ModelKind.complete`.
          source: the parameters.
          tokenizer: the tokenizer.json of the run.
          image_size: height and width of images, if other than those of the config.
          workdir: the folder of the run, with its class names and thresholds.
        """
        self._pp, self.image_size = config.pp_predict, image_size
        if image_size:
            config = _at_image_size(config, image_size)
        self._config, self._kind, self._tokenizer = config, kind_of(config), tokenizer
        self.source, self.workdir = source, workdir
        self.num_outputs: int = config[self._kind.outputs_key]
        self.pp_predict: str = config.pp_predict
        self.is_multilabel = config.loss == "sigmoid_xent"

    @property
    def label(self) -> str:
        """The name of the model's variant or preset, or else "ViT", "DCViT", "Transformer" or "DCFormer"."""
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
        """Return the entries of the config that determine the parameters, except those with the default value."""
        config, defaults = json.loads(self._config.to_json()), json.loads(json.dumps(values.defaults()))
        return {key: value for key, value in config.items() if not is_free(key) and value != defaults.get(key)}

    def evaluator_options(self, name: str) -> dict[str, Any]:
        """Return the options of the evaluator `name` of `config.evals`."""
        found: dict[str, Any] = json.loads(self._config.evals[name].to_json())
        return found

    @property
    def step(self) -> int | None:
        """The step of the checkpoint, or None."""
        name = step_folder(self.source.path).name if self.source.is_checkpoint else ""
        return int(name) if is_step(name) else None

    @functools.cached_property
    def class_names(self) -> list[str]:
        """The names of the classes in the run's data, or their numbers."""
        return read_class_names(self.workdir, self.num_outputs)

    @functools.cached_property
    def thresholds(self) -> Thresholds | None:
        """The thresholds that the run's workdir stores for its multi-label evaluators; None without any."""
        if self.workdir is None or not has_run_thresholds(self) or not _multilabel_options(self._config):
            return None
        found = thresholds.read(self.workdir, self.class_names)
        if found and found.step != self.step:
            LOG.warning("%s is of step %s, the model of step %s", self.workdir / thresholds.NAME, found.step, self.step)
        return found

    def params(
        self, inputs: jax.ShapeDtypeStruct | None = None, mesh: Mesh | None = None, strategy: Strategy = "ddp"
    ) -> Params:
        """Load the parameters.

        Args:
          inputs: the shape of model inputs; by default that of `dcvit.weights.family.example`.
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
        return load_params(self.source, make_like, self._at_size if self.image_size else None)

    def _at_size(self, tensors: Tensors) -> Tensors:
        """Return `tensors`, the parameters, with position embeddings interpolated to images of `image_size`."""
        assert self.image_size
        description = Description(self._config.model_name, self.num_outputs, {}, self._pp)
        with errors_name_file(self.source.path):
            return at_image_size(description, tensors, self.image_size)[1]

    def check_params(self, params: Params, inputs: jax.ShapeDtypeStruct, what: str) -> None:
        """Raise CheckpointError if names or shapes of parameters do not fit the model for inputs of this shape."""
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
        """Return mesh, sharding strategy and evaluators of `config.evals`, with the workdir's thresholds."""
        mesh, strategy = evaluation_mesh(self._config, self.model)
        with with_tokenizer(self._config, self._tokenizer) as config:
            evaluators = make_evaluators(config, predictor(self.model), mesh)
        for name in _multilabel_options(self._config).keys() & evaluators.keys():
            if self.thresholds:
                evaluators[name].set_thresholds(self.thresholds.values, self.thresholds.origin)
        return mesh, strategy, evaluators

    def tokenizer(self, path: str | None = None) -> Tokenizer:
        """Open the tokenizer at `path`, or else that of the training data, which may be the tokenizer of bytes.

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


def has_run_thresholds(trained: TrainedModel) -> bool:
    """Return True for a checkpoint of the run in `trained.workdir` with its image size, which has its thresholds."""
    place, workdir = trained.source.workdir, trained.workdir
    is_inside = place is not None and workdir is not None and absolute(place) == absolute(workdir)
    return is_inside and trained.image_size is None


def thresholds_of(trained: TrainedModel) -> float | Sequence[float] | None:
    """Return the probability from which a class is predicted, stored or that of the config.

    None for a model without a multi-label evaluator, whose classes exclude each other.

    Raises:
      ConfigError: there is not one threshold for each class, or the stored file is damaged.
    """
    options = _multilabel_options(trained._config)
    default = next((each.get("thresholds", 0.5) for each in options.values()), None)
    check_thresholds(default, trained.num_outputs, "thresholds")
    return trained.thresholds.values if trained.thresholds else default


def _multilabel_options(config: ConfigDict) -> dict[str, ConfigDict]:
    """Return the options of a config's multi-label evaluators by name."""
    evals = config.evals.items()
    return {name: e for name, e in evals if isinstance(e, ConfigDict) and e.get("type") == "multilabel"}


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


def at_image_size(description: Description, params: Tensors, size: tuple[int, int]) -> tuple[Description, Tensors]:
    """Return a described model, and its parameters, for images of another height and width.

    Learned position embeddings are interpolated, and the preprocessing is that of `at_size`.

    Raises:
      ConfigError: the model is not one of images, or its patches do not divide the size.
      CheckpointError: see `dcvit.weights.family.example` and `dcvit.weights.preprocessing.at_size`.
    """
    if description.model_name != "vit":
        raise ConfigError(f"image_size={size[0]}x{size[1]} is for models of images, found a language model")
    old, patch = example(description, params).shape[1:3], params["embedding/kernel"].shape[:2]
    if any(side < 1 or side % p for side, p in zip(size, patch, strict=True)):
        raise ConfigError(f"image_size={size[0]}x{size[1]}: patches of {patch[0]}x{patch[1]} do not divide it")
    grids = [(height // patch[0], width // patch[1]) for height, width in (old, size)]
    pp = at_size(description.pp, size) if description.pp else ""
    return description._replace(pp=pp), with_grid(params, *grids)


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
    return open_run(source, run, config, overrides, image_size)


def open_run(
    source: ModelSource,
    run: ModelSource | None,
    config: str | None = None,
    overrides: Sequence[str] = (),
    image_size: tuple[int, int] | None = None,
) -> TrainedModel:
    """Return the model of `source` with the config of `run`, or `config` if it is given; see `open_trained`."""
    if run and config is None and run.holds_weights and not pretrained.is_pretrained(run.path):
        raise ConfigError(f"{run} is not the folder of a training run; give --config CONFIG --checkpoint {run}")
    saved = run.config() if run else ConfigDict()
    found = saved if config is None else configs.load(config, overrides)
    check_checkpoint(source.path)
    tokenizer = stored_tokenizer((run or source).path) if trains_tokenizer(found) else None
    workdir = run and (run.workdir or run.path)
    return TrainedModel(kind_of(found).complete(found, saved), source, tokenizer, image_size, workdir)


def open_alone(name: str, image_size: tuple[int, int] | None = None) -> tuple[TrainedModel, Sequence[str]]:
    """Open a model by anything that `dcvit.load` takes, without the evaluators of its run.

    Args:
      name: a run, a checkpoint, a model of the package or weights of another library.
      image_size: height and width of images, if other than the model's.

    Returns:
      The model, and a name for each class; no names if they are not known.

    Raises:
      CheckpointError: the source is missing, damaged or of an unknown format.
      ConfigError: the name or the config of the run is invalid, or the model is not one of images of this size.
    """
    try:
        source = ModelSource(folder(pretrained.resolve(name)))
    except ValueError as e:
        raise ConfigError(str(e)) from None
    workdir = source.workdir
    if workdir is not None:
        check_checkpoint(source.path)
        config = ModelSource(workdir).config()
        if source.is_checkpoint:
            source = ModelSource(step_folder(source.path))  # a running training may save a later one meanwhile
        names = read_class_names(workdir, config[kind_of(config).outputs_key])
        names = [] if names == [str(i) for i in range(len(names))] else names
    else:
        described = verified(source.open_weights())
        config = ConfigDict(values.defaults() | described.config())
        config[kind_of(config).outputs_key] = described.description.num_outputs or 0
        names = [*described.description.class_names]
    if image_size and config.model_name != "vit":
        raise ConfigError("it is a language model, not one of images")
    return TrainedModel(values.replaced(config, evals=ConfigDict()), source, image_size=image_size), names


def _warn_of_other_function(weights: Weights, model: nn.Module, pp: str) -> None:
    """Log a warning if weights describe another function or preprocessing than `model` and `pp`, those of a config."""
    described = weights.description
    with errors_name_file(weights.path):
        source = build(described)
    different = fields_that_change_the_function(source, model) if type(source) is type(model) else {}
    if described.pp and described.pp != pp:
        different |= {"pp_predict": (described.pp, pp)}
    if different:
        LOG.warning("the config differs from the model of %s: %s", weights.path, listed(different))


def listed(different: Mapping[str, tuple[object, object]]) -> str:
    """Return "NAME=NEW (OLD there), …" for fields and their (value in another model, value here)."""
    return ", ".join(f"{name}={new!r} ({old!r} there)" for name, (old, new) in different.items())
