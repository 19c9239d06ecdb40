"""Sources of parameters: what is at a place that a user names, with its tensors, and the start of a run from them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dcvit.config import values
from dcvit.errors import CheckpointError, ConfigError
from dcvit.hub import pretrained
from dcvit.models import Params
from dcvit.models.upcycling import gained_compositions, has_compositions, identity_compositions
from dcvit.parallel.trees import Tensors, shapes_of
from dcvit.runs import restoring, steps, workdir
from dcvit.runs.files import Folder, folder
from dcvit.weights import preprocessing
from dcvit.weights.families import Weights, recognized, stated
from dcvit.weights.placement import in_layout, place_params
from dcvit.weights.tensors import WeightsFile, locate, open_file
from input_pipeline import huggingface

UPCYCLE_HINT = "to start its compositions as the identity: --config.model_load.upcycle=True"


class Source(NamedTuple):
    """Parameters that `find` found; `str` returns the name of their place.

    Fields:
      place: the folder or file that was named: of a run, the workdir or the checkpoint.
      path: the folder of the checkpoint, or the file or folder of the weights.
      params: the parameters by path, as single or stacked layers; each is read on demand.
      stated: the model that the weights state; None for a checkpoint, and for weights that state none.
      file: the weights, opened; None for a checkpoint.
    """

    place: Folder
    path: Folder
    params: Tensors
    stated: Weights | None = None
    file: WeightsFile | None = None

    def __str__(self) -> str:
        return str(huggingface.cached(self.place) or self.place)

    def weights(self) -> Weights:
        """Return the weights with the model that they state, or else with one that is inferred from their tensors.

        Raises:
          CheckpointError: the tensors are those of no known model; see `dcvit.weights.families.recognized`.
        """
        assert self.file is not None, "a checkpoint has the config of its run"
        return self.stated or recognized(self.file)


def located(place: str | Folder) -> Folder:
    """Return the folder or file of a place: a name (see `dcvit.hub.pretrained.resolve`), a path or a URL.

    Raises:
      CheckpointError: a repository of the Hugging Face Hub cannot be downloaded.
      ConfigError: the name is invalid.
    """
    if not isinstance(place, str) and not huggingface.is_name(place):
        return place
    name = pretrained.resolve(str(place))
    try:
        return folder(name)
    except ValueError as e:
        raise ConfigError(str(e)) from None


def find(place: str | Folder) -> Source:
    """Open the parameters at a place: a run (its latest checkpoint), a checkpoint, or weights of any format.

    Raises:
      CheckpointError: there are none, they are damaged or of an unknown format, or the checkpoint is of another run
        than its workdir.
      ConfigError: see `located`.
    """
    path = located(place)
    if workdir.find(path) is not None:
        workdir.check_checkpoint(path)
        checkpoint = steps.step_folder(path)  # once: a running training may save a later one meanwhile
        arrays = restoring.open_params(checkpoint)
        params = {name: restoring.as_tensor(array, f"{name} of {checkpoint}") for name, array in arrays.items()}
        return Source(path, checkpoint, params)
    if not isinstance(path, Path):
        raise CheckpointError(f"{path} is no run; copy weights of other libraries to a local folder, to read them")
    try:
        file = open_file(path)
    except CheckpointError as e:
        with contextlib.suppress(ConfigError):  # a damaged config.json of weights
            if values.run_config(str(path)):
                raise CheckpointError(f"no checkpoint in {path}") from None
        is_absent = not path.exists() and not locate(path)
        raise CheckpointError(f"{e}{pretrained.hint(path)}" if is_absent else str(e)) from None
    found = stated(file)
    return Source(path, path, found.params if found else file.tensors, found, file)


def load_params_into(
    init_params: Params,
    init_file: object,
    dont_load: Sequence[str],
    convert: Callable[[Tensors], Tensors],
    upcycle: bool = False,
) -> dict[str, Any]:
    """Return `init_params` with the values of a source, in their layout and on their devices, read one at a time.

    Args:
      init_params: parameters of the model, or their shapes.
      init_file: a place that `find` opens, or what it found there.
      dont_load: regexes; parameters whose name matches one keep their initial value.
      convert: function from the tensors of the source to those of the model.
      upcycle: compositions that the source lacks start as the identity.

    Raises:
      dcvit.errors.CheckpointError: the file is unreadable, names or shapes differ (both sides are listed), or the model
        cannot be upcycled.
    """
    source = init_file if isinstance(init_file, Source) else find(str(init_file))
    tensors = convert(source.params)
    names = in_layout(tensors, shapes_of(init_params))
    if upcycle:
        gained = "|".join(map(re.escape, gained_compositions(names, init_params, str(source))))
        return place_params(tensors, identity_compositions(init_params), str(source), [*dont_load, gained])
    try:
        return place_params(tensors, init_params, str(source), dont_load)
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
    found, path = values.run_config(name), located(name)
    try:
        if not found and path.exists() and workdir.find(path) is None:
            found = find(path).weights().config()
            if huggingface.is_name(name) and (data := found.get("input", {}).get("data", {})).get("tokenizer"):
                data["tokenizer"] = name  # the path of the cache is another one on another machine
        if found.get("pp_predict") and "pp" not in found.get("input", {}):
            found["input"] = {**found.get("input", {}), **preprocessing.training(found["pp_predict"])}
    except CheckpointError as e:
        raise ConfigError(f"init={name}: {e}") from None
    return found
