"""Sources of models: a place that a user named, recognition of what is there, and loading of its parameters."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dcvit.config import values
from dcvit.errors import CheckpointError, ConfigError
from dcvit.hub import pretrained
from dcvit.models import Params
from dcvit.models.upcycling import gained_compositions, has_compositions, identity_compositions
from dcvit.parallel.trees import Tensors, shapes_of
from dcvit.runs import restoring, steps, workdir
from dcvit.runs.files import Folder
from dcvit.weights import big_vision_files, preprocessing
from dcvit.weights.families import Weights, family_of, recognized
from dcvit.weights.placement import check_finite, in_layout, place_params
from dcvit.weights.tensors import WeightsFile, has_files, is_npz, open_file
from input_pipeline import huggingface
from input_pipeline.files import expand

UPCYCLE_HINT = "to start its compositions as the identity: --config.model_load.upcycle=True"


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A place where a model may be: a run, one of its checkpoints, a model of the package, weights of another library.

    Fields:
      path: the file or folder, after names of models and `~` were resolved; see `find`.
    """

    path: Folder

    def __str__(self) -> str:
        return str(huggingface.cached(self.path) or self.path)

    @functools.cached_property
    def is_checkpoint(self) -> bool:
        """True for a checkpoint of a run, and for a workdir with one."""
        return restoring.is_checkpoint(self.path)

    @functools.cached_property
    def workdir(self) -> Folder | None:
        """The workdir of the run (or of its checkpoint) that this is, or the folder of the package's model; else None.

        Raises:
          CheckpointError, ConfigError: see `dcvit.runs.workdir.find`.
        """
        return self.path if pretrained.is_pretrained(self.path) else workdir.find(self.path)

    @functools.cached_property
    def file(self) -> WeightsFile:
        """The file or folder of weights, opened. Raises CheckpointError: see `dcvit.weights.tensors.open_file`."""
        return open_file(Path(self.path))

    @functools.cached_property
    def is_described(self) -> bool:
        """True for weights that describe their model, unless the path is, or has, a checkpoint of a run.

        In big_vision's format, whose names are those of this project, few files do.
        """
        if not isinstance(self.path, Path) or self.is_checkpoint or not self.path.exists():
            return False
        if self.path.is_dir() and not big_vision_files.locate(self.path):
            return has_files(self.path)
        if self.path.is_file() and not is_npz(self.path):
            return self.path.suffix != ".npz"  # the reader of archives reports a damaged one
        return family_of(self.file) in ("own", "dcmha_vit")

    @functools.cached_property
    def holds_weights(self) -> bool:
        """True for weights in any format, also without description, unless the path is or has a checkpoint of a run."""
        if not isinstance(self.path, Path) or self.is_checkpoint:
            return False
        return self.is_described or big_vision_files.locate(self.path) is not None

    @functools.cached_property
    def weights(self) -> Weights | None:
        """The weights that describe their model, opened; None if there are none.

        Raises:
          CheckpointError: see `dcvit.weights.families.open_weights`.
        """
        return recognized(self.file) if self.is_described else None

    def open_weights(self) -> Weights:
        """Return the weights at the path, which describe their model; raise an error where `weights` is None.

        Raises:
          CheckpointError: there are none, or they are damaged or unsupported; see `dcvit.weights.families`.
        """
        try:
            return self.weights or recognized(self.file)
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
    """Return the `ModelSource` of a name: of a path, of a model of the package, or of a repository, downloaded."""
    return ModelSource(expand(pretrained.resolve(name)))


def open_parameters(source: ModelSource) -> Tensors:
    """Open the parameters of a model by their paths, as single or stacked layers; a tensor is read on demand.

    Args:
      source: a workdir (its latest checkpoint), one of its checkpoints, or weights of any format.

    Raises:
      CheckpointError: the source is missing, damaged, or of an unknown format.
    """
    if source.weights:
        return source.weights.params
    path = source.path
    if isinstance(path, Path) and not source.is_checkpoint:
        if big_vision_files.locate(path):
            return source.file.tensors
        if not path.exists():
            big_vision_files.check_named(str(path))
    arrays = restoring.open_params(path)
    return {name: restoring.as_tensor(array, f"{name} of {path}") for name, array in arrays.items()}


def load_params(
    source: ModelSource,
    make_like: Callable[[Tensors], Params],
    convert: Callable[[Tensors], Tensors] | None = None,
) -> Params:
    """Load the parameters of a model from a source of `open_parameters`.

    Args:
      source: see `open_parameters`.
      make_like: function from the source's tensors to the model's parameters, `jax.ShapeDtypeStruct` with shardings.
        Layers may be stacked in one and single in the other.
      convert: function from the tensors of the source to those of the model, applied before `make_like`.

    Raises:
      CheckpointError: see `open_parameters`; or the parameters are not those of the model.
    """
    if source.is_checkpoint:
        source = ModelSource(steps.step_folder(source.path))  # a running training may save a later one meanwhile
    tensors = open_parameters(source)
    tensors = convert(tensors) if convert else tensors
    like = make_like(tensors)
    same_layout = not convert and {name: tensor.shape for name, tensor in tensors.items()} == shapes_of(like)
    if same_layout and source.is_checkpoint:
        params = restoring.restore_params(source.path, like)  # each process reads its part only
        check_finite(params, str(source))
        return params
    return place_params(tensors, like, str(source.weights.path if source.weights else source))


def load_params_into(
    init_params: Params,
    init_file: str,
    dont_load: Sequence[str],
    convert: Callable[[Tensors], Tensors],
    upcycle: bool = False,
) -> dict[str, Any]:
    """Return `init_params` with the values of a checkpoint, in their layout and on their devices, read one at a time.

    Args:
      init_params: parameters of the model, or their shapes.
      init_file: a checkpoint of this project or of big_vision, weights of another library, or the name of a model of
        the package.
      dont_load: regexes; parameters whose name matches one keep their initial value.
      convert: function from the tensors of the checkpoint to those of the model.
      upcycle: compositions that the checkpoint lacks start as the identity.

    Raises:
      dcvit.errors.CheckpointError: the file is unreadable, names or shapes differ (both sides are listed), or the model
        cannot be upcycled.
    """
    tensors = convert(open_parameters(find(init_file)))
    names = in_layout(tensors, shapes_of(init_params))
    if upcycle:
        gained = "|".join(map(re.escape, gained_compositions(names, init_params, init_file)))
        return place_params(tensors, identity_compositions(init_params), init_file, [*dont_load, gained])
    try:
        return place_params(tensors, init_params, init_file, dont_load)
    except CheckpointError as e:
        hint = "" if has_compositions(names) or not has_compositions(shapes_of(init_params)) else f"; {UPCYCLE_HINT}"
        raise CheckpointError(f"{e}{hint}") from None


def init_config(name: str) -> dict[str, Any]:
    """Return the config of a run, or the keys that follow from weights of another library; {} for other names.

    `input.pp` is the preprocessing of training, with an inception crop if the model has only that of prediction.

    Raises:
      ConfigError: the config or the weights are damaged or unsupported.
    """
    if not name:
        return {}
    found, source = values.run_config(name), find(name)
    try:
        if not found and source.path.exists() and not (source.path / steps.ABOUT).is_dir():
            found = source.open_weights().config()
            if huggingface.is_name(name) and (data := found.get("input", {}).get("data", {})).get("tokenizer"):
                data["tokenizer"] = name  # the path of the cache is another one on another machine
        if found.get("pp_predict") and "pp" not in found.get("input", {}):
            found["input"] = {**found.get("input", {}), **preprocessing.training(found["pp_predict"])}
    except CheckpointError as e:
        raise ConfigError(f"init={name}: {e}") from None
    return found
