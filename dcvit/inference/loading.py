"""`dcvit.load`, and models for commands: an opened model with its parameters, as a model of images or of language."""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Sequence

from ml_collections import ConfigDict

from dcvit.errors import ConfigError, nearest
from dcvit.hub import open as hub
from dcvit.hub.open import Opened
from dcvit.inference.model import Kind, LoadedModel
from dcvit.parallel.sharding import check_model, make_mesh
from dcvit.runs.files import Folder

SHARDINGS = {"ddp": "data", "fsdp": "fsdp", "tensor": "tensor"}  # the mesh axis of all devices, by strategy
# Module here and its class, by `model_name`.
CLASSES = {"vit": ("images", "ImageModel"), "lm": ("texts", "LanguageModel")}


def load(
    source: str | Folder,
    *,
    config: ConfigDict | None = None,
    sharding: str | None = None,
    image_size: int | Sequence[int] | None = None,
) -> LoadedModel:
    """Load a trained model; see `dcvit.load`.

    Raises:
      CheckpointError: the source is missing, damaged, of an unknown format, or does not fit its config.
      ConfigError: an argument or the config is invalid.
    """
    if sharding is not None and sharding not in SHARDINGS:
        raise ConfigError(f"sharding={sharding!r}; {nearest(sharding, SHARDINGS)}")
    size = None if image_size is None else _height_and_width(image_size)
    return _loaded(hub.open_model(source, config=config, image_size=size), sharding)


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
    config: ConfigDict | None,
    checkpoint: Folder | None,
    overrides: Sequence[str] = (),
    image_size: tuple[int, int] | None = None,
) -> Kind:
    """Load the model that the options `--workdir`, `--config` and `--checkpoint` name together.

    Args:
      kind: the class of model that the command needs.
      workdir, config, checkpoint, overrides, image_size: see `dcvit.hub.open.open_model`.

    Raises:
      CheckpointError: see `load`.
      ConfigError: see `load`; or the model is not of the class `kind`.
    """
    opened = hub.open_model(workdir, config=config, checkpoint=checkpoint, overrides=overrides, image_size=image_size)
    found = _class_of(opened)
    if found is not kind:
        raise ConfigError(f"{opened} is {found.kind}")
    return _loaded(opened)  # type: ignore[return-value]


def _loaded(opened: Opened, sharding: str | None = None) -> LoadedModel:
    """Load the parameters of an opened model, split over all devices by a strategy of `SHARDINGS` or on the first."""
    mesh = None
    if sharding is not None:
        mesh = make_mesh([(SHARDINGS[sharding], -1)])
        check_model(mesh, opened.module)
    return _class_of(opened).of(opened, opened.load_params(mesh, sharding or "ddp"), mesh)


def _class_of(opened: Opened) -> type[LoadedModel]:
    """Import and return the class of loaded models of an opened model's kind."""
    module, name = CLASSES[opened.config.model_name]
    found: type[LoadedModel] = getattr(importlib.import_module(f"dcvit.inference.{module}"), name)
    return found
