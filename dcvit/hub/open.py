"""Opening of a model, the one path from a place that a user names to a config, a module, parameters and the rest.

A place is a run, one of its checkpoints, weights of another library (a file or a folder), the name of a model of the
package, or `hf:OWNER/NAME`, a repository of the Hugging Face Hub.
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dcvit.config import values
from dcvit.config.keys import OWN_TOKENIZER
from dcvit.errors import CheckpointError, ConfigError, first_line
from dcvit.hub import pretrained
from dcvit.hub.kinds import completed, kind_of, make_model
from dcvit.hub.source import Source, find, located
from dcvit.models import Params
from dcvit.models.trees import param_shapes
from dcvit.models.upcycling import fields_that_change_the_function
from dcvit.models.vit import with_grid
from dcvit.parallel.sharding import Strategy, with_shardings
from dcvit.parallel.trees import Tensors
from dcvit.runs import workdir
from dcvit.runs.files import Folder, absolute
from dcvit.runs.steps import is_step
from dcvit.runs.workdir import THRESHOLDS, Thresholds, read_thresholds
from dcvit.weights.families import Weights, verified
from dcvit.weights.family import Description, build, errors_name_file, example
from dcvit.weights.placement import place_params
from dcvit.weights.preprocessing import at_size
from dcvit.weights.tensors import tokenizer_of
from input_pipeline import huggingface
from input_pipeline.preprocess.builder import parsed

LOG = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"  # file in the workdir of a run that trained its tokenizer


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model that `open_model` found. Its parameters are read when `load_params` puts them on devices.

    Fields:
      place: the folder or file that was named: of a run, the workdir or the checkpoint.
      path: the folder of the checkpoint, or the file or folder of the weights.
      config: the config, complete: that of the run, the given one, or what follows from the weights.
      module: the linen module.
      params: the parameters by path, as single or stacked layers.
      classes: a name for each class, or its number; empty for a language model.
      tokenizer: the content of the tokenizer.json that the run trained, or the path of the one beside the weights; None
        for that of the config's data.
      weights: the weights whose description the config follows; None for the config of a run, or a given one.
      workdir: the folder of the run whose config it is, or of the model of the package.
      step: the step of the checkpoint; None for weights.
      is_of_run: True for a checkpoint of the run in `workdir` at the image size of the run.
      thresholds: those that the workdir stores for this checkpoint, or that are beside the weights.
    """

    place: Folder
    path: Folder
    config: ConfigDict
    module: nn.Module
    params: Tensors
    classes: Sequence[str] = ()
    tokenizer: str | Path | None = None
    weights: Weights | None = None
    workdir: Folder | None = None
    step: int | None = None
    is_of_run: bool = False
    thresholds: Thresholds | None = None

    def __str__(self) -> str:
        """Return the name of the place."""
        return str(huggingface.cached(self.place) or self.place)

    @property
    def preprocessing(self) -> str:
        """The preprocessing of an image file."""
        return str(self.config.pp_predict)

    @property
    def num_outputs(self) -> int:
        """The number of classes or tokens; 0 without a head."""
        return int(self.config[kind_of(self.config).outputs_key])

    @property
    def is_multilabel(self) -> bool:
        """True if probabilities are sigmoids of the logits, independent of each other."""
        return bool(self.config.loss == "sigmoid_xent")

    @property
    def label(self) -> str:
        """The name of the model's variant or preset, or else "ViT", "DCViT", "Transformer" or "DCFormer"."""
        kind = kind_of(self.config)
        return str(self.config.model.get(kind.variant_key) or kind.labels[bool(getattr(self.module, "compose", None))])

    def load_params(
        self, mesh: Mesh | None = None, strategy: Strategy = "ddp", inputs: jax.ShapeDtypeStruct | None = None
    ) -> Params:
        """Load the parameters onto devices.

        Args:
          mesh, strategy: see `dcvit.parallel.sharding.with_shardings`.
          inputs: the shape of model inputs; by default that of `dcvit.weights.family.example`.

        Raises:
          CheckpointError: a file is damaged, or the parameters are not those of the model.
        """
        with errors_name_file(self.path):
            inputs = inputs or example(described(self.config), self.params)
        shapes = param_shapes(self.module, inputs)
        return place_params(self.params, with_shardings(shapes, mesh, strategy), str(self))


def open_model(
    place: str | Folder | None,
    *,
    config: ConfigDict | None = None,
    checkpoint: Folder | None = None,
    overrides: Sequence[str] | None = None,
    image_size: tuple[int, int] | None = None,
    usual_pp: bool = False,
) -> Opened:
    """Open a model.

    Args:
      place: where the model is. A string may be a name; a path means itself. None stands for `checkpoint`.
      config: a loaded config, instead of that of the run or of the weights; the run's completes it.
      checkpoint: the place of the parameters, if other than `place`.
      overrides: the "a.b=value" with which `config` was loaded: these keys hold where weights state another model. It
        is a warning, and no error, if they are None or there is no `config`.
      image_size: height and width of images, if other than those of the config. Learned position embeddings are
        interpolated.
      usual_pp: an image model whose weights state no preprocessing gets big_vision's usual one, which is logged.

    Raises:
      CheckpointError: the model is missing, damaged or of an unknown format.
      ConfigError: the config is invalid or incomplete, or weights state another model than the config; or the model is
        not one of images of this size.
    """
    place, checkpoint = (checkpoint, None) if place is None else (place, checkpoint)
    assert place is not None
    path = located(place)
    run = _run_of(path, config is not None, checkpoint is not None)
    if run is None and config is None:
        return at_image_size(_of_weights(find(path), usual_pp), image_size)
    source = find(path if checkpoint is None else checkpoint)
    saved = ConfigDict() if run is None else record_of(run)
    found = saved if config is None else config
    found = completed(found, saved)
    opened = Opened(
        source.place, source.path, found, make_model(found), source.params, workdir=run,
        tokenizer=stored_tokenizer(run or path) if trains_tokenizer(found) else None,
        step=int(source.path.name) if source.file is None and is_step(source.path.name) else None,
        is_of_run=run is not None and absolute(run) in (absolute(source.path), workdir.find(source.path)),
    )  # fmt: skip
    if source.stated:
        _check_same_function(source.stated, opened, None if config is None else overrides)
    return at_image_size(_with_classes(opened), image_size)


def _run_of(path: Folder, has_config: bool, has_checkpoint: bool) -> Folder | None:
    """Return the folder of the run at a place, or of the model of the package; None for other weights.

    Raises:
      ConfigError: there is no config: neither a given one, nor that of a run.
    """
    if pretrained.is_pretrained(path):
        return path
    run = workdir.find(path)
    if run is None and has_checkpoint and values.run_config(str(path)):
        run = path  # without a checkpoint of its own
    if run is not None and not (run / "config.json").is_file():
        if has_config:
            run = None
        elif run != path:
            raise ConfigError(f"{path} is a checkpoint without the config.json of its run in {run}")
    if run is None and has_checkpoint and not has_config:
        raise ConfigError(f"{huggingface.cached(path) or path} is not the folder of a training run; give --config")
    return run


def record_of(run: Folder) -> ConfigDict:
    """Return the config of a run, or of the run of a model of the package. Raise ConfigError if it is damaged."""
    return values.read_json(run / (pretrained.RUN if pretrained.is_pretrained(run) else "config.json"))


def _of_weights(source: Source, usual_pp: bool) -> Opened:
    """Return the model of weights with the config that follows from them."""
    weights = verified(source.weights()) if usual_pp else source.weights()
    about = weights.description
    config = ConfigDict(values.defaults() | weights.config())
    config[kind_of(config).outputs_key] = about.num_outputs or 0
    with errors_name_file(source.path):
        module = build(about)
    names = workdir.numbered(about.class_names, (about.num_outputs or 0) if about.model_name == "vit" else 0)
    has_thresholds = about.multilabel and weights.path.is_dir()  # a single file may lie beside those of another model
    return Opened(
        source.place, source.path, config.lock(), module, weights.params, names, tokenizer_of(weights.path), weights,
        thresholds=read_thresholds(weights.path, names) if has_thresholds else None,
    )  # fmt: skip


def _with_classes(opened: Opened) -> Opened:
    """Return the model with the names of its classes and, if it has some, the thresholds that its workdir stores."""
    if opened.config.model_name != "vit":
        return opened
    classes, found = workdir.read_class_names(opened.workdir, opened.num_outputs), None
    if opened.workdir is not None and opened.is_of_run and multilabel_options(opened.config):
        found = read_thresholds(opened.workdir, classes)
        if found and found.step != opened.step:
            file = opened.workdir / THRESHOLDS
            LOG.warning("%s is of step %s, the model of step %s", file, found.step, opened.step)
    return dataclasses.replace(opened, classes=classes, thresholds=found)


def described(config: ConfigDict) -> Description:
    """Return the description of the inputs of a config's model."""
    return Description(config.model_name, config[kind_of(config).outputs_key], {}, config.pp_predict)


def at_image_size(opened: Opened, size: tuple[int, int] | None) -> Opened:
    """Return an image model for images of another height and width; for None, the model itself.

    Learned position embeddings are interpolated, and all preprocessing, except that of training, yields the size.

    Raises:
      ConfigError: the model is not one of images, its patches do not divide the size, or a preprocessing has no size
        that could be changed.
    """
    if size is None:
        return opened
    config, params = opened.config.copy_and_resolve_references(), opened.params
    if config.model_name != "vit":
        raise ConfigError(f"image_size={size[0]}x{size[1]} is for models of images, found {config.model_name!r}")
    with errors_name_file(opened.path):
        old, patch = example(described(config), params).shape[1:3], params["embedding/kernel"].shape[:2]
    if any(side % p for side, p in zip(size, patch, strict=True)):
        raise ConfigError(f"image_size={size[0]}x{size[1]}: patches of {patch[0]}x{patch[1]} do not divide it")
    grids = [(height // patch[0], width // patch[1]) for height, width in (old, size)]
    places = {"config.pp_predict": config} | {f"config.evals.{name}.pp": each for name, each in config.evals.items()}
    for name, place in places.items():
        key = name.rpartition(".")[2]
        if place.get(key):
            try:
                place[key] = at_size(place[key], size)
            except CheckpointError as e:
                raise ConfigError(f"{name}: {e}") from None
    params = with_grid(params, *grids)
    return dataclasses.replace(opened, config=config, params=params, is_of_run=False, thresholds=None)


def multilabel_options(config: ConfigDict) -> dict[str, ConfigDict]:
    """Return the options of a config's multi-label evaluators by name."""
    evals = config.evals.items()
    return {name: e for name, e in evals if isinstance(e, ConfigDict) and e.get("type") == "multilabel"}


def thresholds_of(opened: Opened) -> float | Sequence[float] | None:
    """Return the probability from which a class is predicted, stored or that of the config.

    None for a model without either, whose most probable classes are predicted.

    Raises:
      ConfigError: there is not one threshold for each class.
    """
    options = multilabel_options(opened.config)
    default = next((each.get("thresholds", 0.5) for each in options.values()), None)
    check_thresholds(default, opened.num_outputs, "thresholds")
    return opened.thresholds.values if opened.thresholds else default


def check_thresholds(thresholds: object, classes: int | None, what: str) -> None:
    """Raise ConfigError, which names them `what`, if several thresholds are not one for each class of the model."""
    if isinstance(thresholds, list | tuple) and len(thresholds) != classes:
        raise ConfigError(f"{what} has {len(thresholds)} number(s), but there are {classes} classes")


def trains_tokenizer(config: ConfigDict) -> bool:
    """Return True if the config's data has the tokenizer `OWN_TOKENIZER`, which the run trains and stores itself."""
    data = config.input.get("data")
    return isinstance(data, Mapping | ConfigDict) and data.get("tokenizer") == OWN_TOKENIZER


def stored_tokenizer(run: Folder) -> str:
    """Return the tokenizer.json that a run has trained and stored in its workdir.

    Raises:
      ConfigError: the file is missing or damaged.
    """
    try:
        return (run / TOKENIZER).read_bytes().decode()
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {run / TOKENIZER}, the run's tokenizer: {first_line(e)}") from None


def _check_same_function(weights: Weights, opened: Opened, overrides: Sequence[str] | None) -> None:
    """Raise ConfigError if weights state another function or preprocessing than the config has without an override.

    Without a list of overrides, log a warning instead.
    """
    with errors_name_file(weights.path):
        theirs = build(weights.description)
    same_kind = type(theirs) is type(opened.module)
    fields = fields_that_change_the_function(theirs, opened.module) if same_kind else {}
    different = {f"model.{name}": both for name, both in fields.items()}
    pp = weights.description.pp
    if pp and opened.preprocessing and _ops(pp) != _ops(opened.preprocessing):
        different["pp_predict"] = (pp, opened.preprocessing)
    said = tuple(f"{override.partition('=')[0]}." for override in overrides or ())
    unsaid = {key: both for key, both in different.items() if not f"{key}.".startswith(said)}
    if unsaid and overrides is None:
        LOG.warning("the config differs from the model of %s: %s", weights.path, listed(unsaid))
    elif unsaid:
        words = " ".join(f"--config.{key}={shlex.quote(repr(old))}" for key, (old, _) in unsaid.items())
        raise ConfigError(
            f"the config differs from the model of {weights.path}: {listed(unsaid)}; say which holds: {words}, or the "
            "config's value in the same way"
        )


def _ops(pp: str) -> list[tuple[str, object]]:
    """Return the ops of a preprocessing string with all their arguments, however these are written."""
    return [(step.op, step.arguments) for step in parsed(pp)]


def listed(different: Mapping[str, tuple[object, object]]) -> str:
    """Return "NAME=NEW (OLD there), …" for fields and their (value in another model, value here)."""
    return ", ".join(f"{name}={new!r} ({old!r} there)" for name, (old, new) in different.items())
