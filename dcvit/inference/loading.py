"""`dcvit.load`, and models for commands: an opened model with its parameters, as a model of images or of language."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Sequence
from pathlib import Path

import flax.linen as nn
from jax.sharding import Mesh

from dcvit.errors import CheckpointError, ConfigError, nearest
from dcvit.hub import pretrained
from dcvit.hub.model import TrainedModel, at_image_size, open_run, open_trained, thresholds_of
from dcvit.hub.source import ModelSource
from dcvit.inference.images import ImageModel
from dcvit.inference.model import Kind, LoadedModel, of_kind
from dcvit.inference.texts import LanguageModel, tokenizer_beside
from dcvit.models.lm import LM
from dcvit.models.trees import param_shapes
from dcvit.models.vit import ViT
from dcvit.parallel.sharding import check_model, make_mesh, with_shardings
from dcvit.runs.files import Folder, folder
from dcvit.runs.workdir import read_class_names
from dcvit.weights import tensors as files
from dcvit.weights.family import build, errors_name_file, example
from dcvit.weights.placement import place_params
from dcvit.weights.tensors import Json
from input_pipeline import huggingface

SHARDINGS = {"ddp": "data", "fsdp": "fsdp", "tensor": "tensor"}  # the mesh axis of all devices, by strategy


def load(
    source: str | Path,
    *,
    config: str | None = None,
    sharding: str | None = None,
    image_size: int | Sequence[int] | None = None,
) -> ImageModel | LanguageModel:
    """Load a trained model.

    Args:
      source: a workdir, one of its checkpoints, weights of another library (see `dcvit.weights.families.FAMILIES`),
        the name of a model of the package: "digits", "tasks" or "text", or "hf:OWNER/NAME" with an optional /FOLDER and
        @REVISION, a repository of the Hugging Face Hub (see `dcvit.hub.repository`).
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
    name = pretrained.resolve(str(source))
    try:
        found = ModelSource(folder(name))
    except ValueError as e:
        raise ConfigError(str(e)) from None
    return _load(found, config, sharding, size)


def _load(
    source: ModelSource, config: str | None, sharding: str | None = None, size: tuple[int, int] | None = None
) -> ImageModel | LanguageModel:
    """Load the model of a source, with the config of its run or, if given, `config`; see `load`."""
    workdir = source.workdir if config is None else None
    if config is None and workdir is None:
        if not isinstance(source.path, Path):
            raise CheckpointError(
                f"{source} is no run; copy weights of other libraries to a local folder, to read them"
            )
        return _load_weights(source, sharding, size)
    run = None if workdir is None else source if workdir == source.path else ModelSource(workdir)
    return _load_trained(open_run(source, run, config, image_size=size), workdir, sharding)


def _height_and_width(image_size: object) -> tuple[int, int]:
    """Return `image_size`, one number or two, as (height, width). Raise ConfigError if it is invalid."""
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
      ConfigError: see `load` and `open_trained`; or the model is not of the class `kind`.
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
    """Return the model of an opened checkpoint with its parameters; see `load`."""
    module = trained.model
    class_names = [] if isinstance(module, LM) else read_class_names(workdir, trained.num_outputs)
    thresholds = None if isinstance(module, LM) else thresholds_of(trained)
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
        module, pp=trained.pp_predict, class_names=class_names, multilabel=trained.is_multilabel,
        thresholds=thresholds, **common,
    )  # fmt: skip


def _load_weights(
    source: ModelSource, sharding: str | None, size: tuple[int, int] | None
) -> ImageModel | LanguageModel:
    """Return the model of another library's weights, with its parameters; see `load`."""
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
    common: Json = {"params": params, "config": config, "source": huggingface.title(path), "mesh": mesh}
    if isinstance(module, LM):
        file = files.tokenizer_of(weights.path)
        open_tokenizer = functools.partial(
            tokenizer_beside, default=str(file) if file else None, outputs=described.num_outputs
        )
        return LanguageModel(module, open_tokenizer=open_tokenizer, end_tokens=described.end_tokens, **common)
    names = described.class_names or [str(i) for i in range(described.num_outputs or 0)]
    return ImageModel(module, pp=described.pp, class_names=names, multilabel=described.multilabel, **common)


def _mesh(sharding: str | None, module: nn.Module) -> Mesh | None:
    """Return the mesh of all devices for `sharding`, None for None. Raise ConfigError if it does not fit the model."""
    if sharding is None:
        return None
    mesh = make_mesh([(SHARDINGS[sharding], -1)])
    check_model(mesh, module)
    return mesh
