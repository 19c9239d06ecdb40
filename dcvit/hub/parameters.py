"""Parameters from anywhere: a run, a checkpoint of big_vision, or weights of another library, into a model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dcvit.errors import CheckpointError
from dcvit.hub.source import ModelSource, find
from dcvit.models import Params
from dcvit.models.lora import is_adapter
from dcvit.models.trees import Tensors, shapes_of
from dcvit.models.upcycling import gained_compositions, has_compositions, identity_compositions
from dcvit.runs import restoring, steps
from dcvit.runs.files import Folder, absolute
from dcvit.weights import adapters, big_vision_files
from dcvit.weights.placement import check_finite, in_layout, place_params
from dcvit.weights.tensors import Json, open_file

BASE_PATH = "base_path"  # in the description of a checkpoint of adapters
UPCYCLE_HINT = "to start its compositions as the identity: --config.model_load.upcycle=True"


def open_parameters(source: ModelSource, adapted_by: Sequence[Folder] = ()) -> Tensors:
    """Open the parameters of a model by their paths, as single or stacked layers; a tensor is read on demand.

    Args:
      source: a workdir (its latest checkpoint), one of its checkpoints, or weights of any format.
      adapted_by: the checkpoints of adapters whose base this is, directly or through another one.

    Raises:
      CheckpointError: the source is missing, damaged, or of an unknown format; or adapters have no base but themselves.
    """
    if source.weights:
        return source.weights.params
    path = source.path
    if isinstance(path, Path) and not source.is_checkpoint:
        if big_vision_files.locate(path):
            return open_file(path).tensors
        if not path.exists():
            big_vision_files.check_named(str(path))
    arrays = restoring.open_params(path)
    tensors = {name: restoring.as_tensor(array, f"{name} of {path}") for name, array in arrays.items()}
    if not is_adapter(tensors):
        return tensors
    about = steps.about(checkpoint := steps.step_folder(path))
    _, init = adapters.described(about, str(path))
    if (checkpoint := absolute(checkpoint)) in adapted_by:
        raise CheckpointError(f"{checkpoint} is its own base")
    try:
        base = open_parameters(adapted(checkpoint, about, init), (*adapted_by, checkpoint))
    except CheckpointError as e:
        raise CheckpointError(f"{path} adapts config.model_init={init!r}: {e}") from None
    return adapters.merged(base, tensors, about, str(path))


def adapted(checkpoint: Folder, about: Json, init: str) -> ModelSource:
    """Return the `model_init` that a checkpoint of adapters adapts.

    The description has a relative one as the path from the workdir; that of an older version has none.
    """
    if path := about.get(BASE_PATH):
        moved = Path(absolute(checkpoint).parent.parent, path).resolve()
        if moved.exists():
            return ModelSource(moved)
    return find(init)


def path_from(workdir: Folder, init: str) -> dict[str, str]:
    """Return the entry of `about` with the path of a relative `model_init` from the workdir; {} for others."""
    path = find(init).path
    if path.is_absolute() or not isinstance(workdir, Path):
        return {}
    return {BASE_PATH: os.path.relpath(path.resolve(), workdir.resolve())}


def load_params(
    source: ModelSource,
    make_like: Callable[[Tensors], Params],
    convert: Callable[[Tensors], Tensors] | None = None,
) -> Params:
    """Load the parameters of a model from a source of `open_parameters`.

    Args:
      source: see `open_parameters`.
      make_like: returns the model's parameters as `jax.ShapeDtypeStruct` with shardings, given the source's tensors.
        Layers may be stacked in one and single in the other.
      convert: function from the tensors of the source to those of the model, which precedes `make_like`.

    Raises:
      CheckpointError: see `open_parameters`; or the parameters are not those of the model.
    """
    if source.is_checkpoint:
        source = ModelSource(steps.step_folder(source.path))  # a running training may save a later one meanwhile
    tensors = open_parameters(source)
    tensors = convert(tensors) if convert else tensors
    like = make_like(tensors)
    same_layout = not convert and {name: tensor.shape for name, tensor in tensors.items()} == shapes_of(like)
    if same_layout and source.is_checkpoint and not steps.about(source.path).get("base"):
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
