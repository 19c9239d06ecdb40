"""Sources of models: the place that a user named, and what is there, recognized and opened once."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dcvit.config import values
from dcvit.errors import CheckpointError, ConfigError
from dcvit.hub import pretrained
from dcvit.runs import restoring, steps, workdir
from dcvit.runs.files import Folder
from dcvit.weights import big_vision_files, preprocessing
from dcvit.weights.families import Weights, is_weights, open_weights
from input_pipeline.files import expand


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A run, one of its checkpoints, a model of the package, weights of another library, or none of these.

    Fields:
      path: the file or folder, in which names of models and `~` are resolved; see `find`.
    """

    path: Folder

    def __str__(self) -> str:
        return str(self.path)

    @functools.cached_property
    def is_checkpoint(self) -> bool:
        """True for a checkpoint of a run, and for a workdir with one."""
        return restoring.is_checkpoint(self.path)

    @functools.cached_property
    def workdir(self) -> Folder | None:
        """The run that this is, or is a checkpoint of, or the model of the package; None for others.

        Raises:
          CheckpointError, ConfigError: see `dcvit.runs.workdir.find`.
        """
        return self.path if pretrained.is_pretrained(self.path) else workdir.find(self.path)

    @functools.cached_property
    def is_described(self) -> bool:
        """True for weights that describe their model, unless a checkpoint is there."""
        return isinstance(self.path, Path) and not self.is_checkpoint and is_weights(self.path)

    @functools.cached_property
    def holds_weights(self) -> bool:
        """True for weights in any format, also of big_vision without description, unless a checkpoint is there."""
        if not isinstance(self.path, Path) or self.is_checkpoint:
            return False
        return self.is_described or big_vision_files.locate(self.path) is not None

    @functools.cached_property
    def weights(self) -> Weights | None:
        """The weights that describe their model, opened; None if there are none.

        Raises:
          CheckpointError: see `dcvit.weights.families.open_weights`.
        """
        return open_weights(self.path) if self.is_described else None

    def open_weights(self) -> Weights:
        """Return the weights of another library.

        Raises:
          CheckpointError: there are none, or they are damaged or unsupported; see `dcvit.weights.families`.
        """
        try:
            return self.weights or open_weights(self.path)
        except CheckpointError as e:
            is_absent = not self.path.exists() and not big_vision_files.locate(Path(self.path))
            raise CheckpointError(f"{e}{pretrained.hint(self.path)}" if is_absent else str(e)) from None

    def config(self) -> ConfigDict:
        """Return the config of the run.

        Raises:
          ConfigError: it is missing or damaged.
        """
        is_pretrained = pretrained.is_pretrained(self.path)
        return values.read_json(self.path / (pretrained.RUN if is_pretrained else "config.json"))


def find(name: str) -> ModelSource:
    """Return the source of a name: a path, or a model of the package."""
    return ModelSource(expand(pretrained.resolve(name)))


def init_config(name: str) -> dict[str, Any]:
    """Return the config of a run, or the keys that weights of another library determine; {} if the name is neither's.

    `input.pp` is the preprocessing of training, with an inception crop if the model has only one of prediction.

    Raises:
      ConfigError: the config or the weights are damaged or unsupported.
    """
    if not name:
        return {}
    found, source = values.run_config(name), find(name)
    try:
        if not found and source.path.exists() and not (source.path / steps.ABOUT).is_dir():
            found = source.open_weights().config()
        if found.get("pp_predict") and "pp" not in found.get("input", {}):
            found["input"] = {**found.get("input", {}), **preprocessing.training(found["pp_predict"])}
    except CheckpointError as e:
        raise ConfigError(f"init={name}: {e}") from None
    return found
