"""Trained models: the model of a config, with the checkpoint of its parameters, and `dcvit.load`."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config import load as configs
from dcvit.errors import CheckpointError, ConfigError, checked, nearest
from dcvit.inference.images import ImageModel, read_class_names
from dcvit.inference.model import Kind, LoadedModel, of_kind
from dcvit.inference.texts import LanguageModel, check_tokenizer, tokenizer_beside
from dcvit.models.lm import LM
from dcvit.models.trees import Tensors, check_tree, param_shapes, shapes_of
from dcvit.models.vit import ViT
from dcvit.parallel.sharding import Strategy, check_model, make_mesh, with_shardings
from dcvit.runs import workdir as workdirs
from dcvit.runs.files import Folder, folder
from dcvit.runs.identity import is_free
from dcvit.runs.workdir import check_checkpoint
from dcvit.training.inputs import stored_tokenizer, trains_tokenizer, with_tokenizer
from dcvit.training.model import make_model, warn_of_other_function
from dcvit.training.setup import Params, evaluation_mesh, make_evaluators, predictor
from dcvit.training.tasks import task_class
from dcvit.weights import pretrained
from dcvit.weights.families import open_weights
from dcvit.weights.family import Description
from dcvit.weights.loading import holds_weights, load_params, open_described
from dcvit.weights.modules import at_image_size, build, errors_name_file, example
from dcvit.weights.placement import place_params
from dcvit.weights.preprocessing import at_size
from dcvit.weights.tensors import Json, tokenizer_of
from input_pipeline.text.megatron_format import find_prefix, read_description
from input_pipeline.text.synthetic_tasks import WORDS
from input_pipeline.text.tokenizer import END_OF_TEXT, FileTokenizer, Tokenizer, WordTokenizer, open_tokenizer

SHARDINGS = {"ddp": "data", "fsdp": "fsdp", "tensor": "tensor"}  # the mesh axis of all devices, by strategy


class TrainedModel:
    """A model as its config describes it, and the checkpoint of its parameters; `open_trained` finds both."""

    def __init__(
        self,
        config: ConfigDict,
        checkpoint: Folder,
        tokenizer: str | None = None,
        image_size: tuple[int, int] | None = None,
    ):
        """
        Args:
          config: must be complete: see `complete` of the tasks.
          checkpoint: the parameters.
          tokenizer: the tokenizer.json of the run.
          image_size: height and width of images, if other than those of the config.
        """
        self._pp, self._image_size = config.pp_predict, image_size
        if image_size:
            config = _at_image_size(config, image_size)
        self._config, self._task, self._tokenizer = config, task_class(config), tokenizer
        self.checkpoint = checkpoint
        self.num_outputs: int = config[self._task.outputs_key]
        self.pp_predict: str = config.pp_predict
        self.is_multilabel = config.loss == "sigmoid_xent"

    @property
    def label(self) -> str:
        """The variant or preset of the model, or else its kind: "ViT", "DCViT", "Transformer" or "DCFormer"."""
        if name := self._config.model.get(self._task.variant_key):
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
        config, defaults = json.loads(self._config.to_json()), json.loads(json.dumps(configs.defaults()))
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
            with errors_name_file(self.checkpoint):
                like_inputs = inputs or example(description, tensors)
            shapes = param_shapes(self.model, like_inputs)
            like: Params = with_shardings(shapes, mesh, strategy)
            return like

        weights = open_described(self.checkpoint)
        if weights:
            warn_of_other_function(weights, self.model, self._pp)
        return load_params(weights or self.checkpoint, make_like, self._at_size if self._image_size else None)

    def _at_size(self, tensors: Tensors) -> Tensors:
        """Return the parameters for images of the size that was asked for."""
        assert self._image_size
        description = Description(self._config.model_name, self.num_outputs, {}, self._pp)
        with errors_name_file(self.checkpoint):
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
            return self._open_tokenizer(_text_options(config), path)

    def _open_tokenizer(self, options: Mapping[str, Any], path: str | None) -> Tokenizer:
        path = path or options.get("tokenizer")
        if path is None and options.get("kind") == "synthetic":
            return WordTokenizer(WORDS)
        if path is None and options.get("kind") in ("megatron", "input_ids") and "tokenizer" not in options:
            raise ConfigError("the training data came as tokens: give --tokenizer, a tokenizer.json")
        end_of_text = options.get("end_of_text", END_OF_TEXT)
        try:
            found = open_tokenizer(path, end_of_text if isinstance(end_of_text, str) else None)
        except input_pipeline.InputError:
            if "end_of_text" in options:
                raise
            found = open_tokenizer(path, None)  # the tokenizer has no END_OF_TEXT, and nothing names another one
        if isinstance(found, FileTokenizer) and isinstance(end_of_text, int):  # data of tokens states the number only
            found.end_of_text = end_of_text
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
    config: str | None,
    checkpoint: Folder | None,
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
    if pretrained.is_pretrained(workdir):
        run = configs.read_json(workdir / pretrained.RUN)
    elif workdir is not None and config is None and holds_weights(workdir):
        raise ConfigError(f"{workdir} is not the folder of a training run; give --config CONFIG --checkpoint {workdir}")
    else:
        run = configs.read_json(workdir / "config.json") if workdir else ConfigDict()
    found = configs.load(config, overrides) if config is not None else run
    folder = checkpoint or workdir
    assert folder is not None
    check_checkpoint(folder)
    return TrainedModel(
        task_class(found).complete(found, run),
        folder,
        stored_tokenizer(workdir or folder) if trains_tokenizer(found) else None,
        image_size,
    )


def _text_options(config: ConfigDict) -> Mapping[str, Any]:
    """Return the options of the training data, with those that a Megatron pair of files states itself."""
    options = {key: value for key, value in dict(config.input.get("data", {})).items() if value is not None}
    stated: Mapping[str, object] = {}
    if options.get("kind") == "megatron":
        with contextlib.suppress(input_pipeline.MissingDataError):
            stated = read_description(find_prefix(options["path"]))
    return {**stated, **options}


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
        path = folder(pretrained.resolve(str(source)))
    except ValueError as e:
        raise ConfigError(str(e)) from None
    workdir: Folder | None = None
    if config is None:
        workdir = path if pretrained.is_pretrained(path) else workdirs.find(path)
    if config is None and workdir is None:
        if not isinstance(path, Path):
            raise CheckpointError(
                f"{source} is no run; copy weights of other libraries to a local folder, to read them"
            )
        return _load_weights(path, sharding, size)
    return load_trained(open_trained(workdir, config, path, image_size=size), workdir, sharding)


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
    if workdir is not None and alone and (workdirs.find(workdir) not in (None, workdir) or holds_weights(workdir)):
        model: LoadedModel = load(str(workdir), image_size=image_size)
    else:
        model = load_trained(open_trained(workdir, config, checkpoint, overrides, image_size), workdir)
    return of_kind(model, kind, config or workdir)


def load_trained(
    trained: TrainedModel, workdir: Folder | None, sharding: str | None = None
) -> ImageModel | LanguageModel:
    """Load the parameters of a model that a command has opened; see `load`."""
    module = trained.model
    class_names = [] if isinstance(module, LM) else read_class_names(workdir, trained.num_outputs)
    mesh = _mesh(sharding, module)
    params = trained.params(mesh=mesh, strategy=sharding or "ddp")
    common: Json = {
        "params": params, "config": trained.record(), "source": trained.checkpoint.name or str(trained.checkpoint),
        "mesh": mesh, "open_evaluators": lambda: trained.evaluators()[2],
    }  # fmt: skip
    if isinstance(module, LM):
        return LanguageModel(module, open_tokenizer=trained.tokenizer, **common)
    assert isinstance(module, ViT)
    return ImageModel(
        module, pp=trained.pp_predict, class_names=class_names, multilabel=trained.is_multilabel, **common
    )


def _load_weights(path: Path, sharding: str | None, size: tuple[int, int] | None) -> ImageModel | LanguageModel:
    """Load weights of another library."""
    weights = open_weights(path)
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
        file = tokenizer_of(weights.path)
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
