"""Parameters from anywhere: a run, a checkpoint of big_vision, or weights of another library, into a model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dcvit.errors import CheckpointError
from dcvit.models import Params
from dcvit.models.lora import is_adapter
from dcvit.models.trees import Tensors, shapes_of
from dcvit.models.upcycling import gained_compositions, has_compositions, identity_compositions
from dcvit.runs import restoring, steps
from dcvit.runs.files import Folder, absolute
from dcvit.weights import adapters, big_vision_files, pretrained
from dcvit.weights.families import Weights, is_weights, open_weights
from dcvit.weights.placement import check_finite, in_layout, place_params
from dcvit.weights.tensors import Json, open_file
from input_pipeline.files import expand

BASE_PATH = "base_path"  # in the description of a checkpoint of adapters
UPCYCLE_HINT = "to start its compositions as the identity: --config.model_load.upcycle=True"


def holds_weights(path: Folder) -> bool:
    """Return True for weights of another library or in a format of big_vision, unless a checkpoint is there."""
    if not isinstance(path, Path) or restoring.is_checkpoint(path):
        return False
    return is_weights(path) or big_vision_files.locate(path) is not None


def open_described(source: Folder) -> Weights | None:
    """Open weights that describe their model; None for a run, even with such weights in its folder, and for others.

    Raises:
      CheckpointError: see `dcvit.weights.families.open_weights`.
    """
    is_described = isinstance(source, Path) and not restoring.is_checkpoint(source) and is_weights(source)
    return open_weights(source) if is_described else None


def open_parameters(source: Folder | Weights, adapted_by: Sequence[Folder] = ()) -> Tensors:
    """Open the parameters of a model by their paths, as single or stacked layers; a tensor is read on demand.

    Args:
      source: a workdir (its latest checkpoint) or a checkpoint of this project, or a file or folder that
        `dcvit.weights.families.open_weights` reads, or has read.
      adapted_by: the checkpoints of adapters whose base this is, directly or through another one.

    Raises:
      CheckpointError: the source is missing, damaged, or of an unknown format; or adapters have no base but themselves.
    """
    if isinstance(source, Weights):
        return source.params
    if weights := open_described(source):
        return weights.params
    if isinstance(source, Path) and not restoring.is_checkpoint(source):
        if big_vision_files.locate(source):
            return open_file(source).tensors
        if not source.exists():
            big_vision_files.check_named(str(source))
    arrays = restoring.open_params(source)
    tensors = {name: restoring.as_tensor(array, f"{name} of {source}") for name, array in arrays.items()}
    if not is_adapter(tensors):
        return tensors
    about = steps.about(checkpoint := steps.step_folder(source))
    _, init = adapters.described(about, str(source))
    if (checkpoint := absolute(checkpoint)) in adapted_by:
        raise CheckpointError(f"{checkpoint} is its own base")
    try:
        base = open_parameters(adapted_model(checkpoint, about, init), (*adapted_by, checkpoint))
    except CheckpointError as e:
        raise CheckpointError(f"{source} adapts config.model_init={init!r}: {e}") from None
    return adapters.merged(base, tensors, about, str(source))


def adapted_model(checkpoint: Folder, about: Json, init: str) -> Path:
    """Return the path of the `model_init` that a checkpoint of adapters adapts.

    The description has a relative one as the path from the workdir; that of an older version has none.
    """
    if path := about.get(BASE_PATH):
        moved = Path(absolute(checkpoint).parent.parent, path).resolve()
        if moved.exists():
            return moved
    return expand(pretrained.resolve(init))


def path_from(workdir: Folder, init: str) -> dict[str, str]:
    """Return the entry of `about` with the path of a relative `model_init` from the workdir; {} for others."""
    path = expand(pretrained.resolve(init))
    if path.is_absolute() or not isinstance(workdir, Path):
        return {}
    return {BASE_PATH: os.path.relpath(path.resolve(), workdir.resolve())}


def load_params(
    source: Folder | Weights,
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
    checkpoint = None
    if not isinstance(source, Weights) and restoring.is_checkpoint(source):
        source = checkpoint = steps.step_folder(source)  # a running training may save a later one meanwhile
    tensors = open_parameters(source)
    tensors = convert(tensors) if convert else tensors
    like = make_like(tensors)
    same_layout = not convert and {name: tensor.shape for name, tensor in tensors.items()} == shapes_of(like)
    if same_layout and checkpoint is not None and not steps.about(checkpoint).get("base"):
        params = restoring.restore_params(checkpoint, like)  # each process reads its part only
        check_finite(params, str(checkpoint))
        return params
    return place_params(tensors, like, str(source.path if isinstance(source, Weights) else source))


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
    tensors = convert(open_parameters(expand(pretrained.resolve(init_file))))
    names = in_layout(tensors, shapes_of(init_params))
    if upcycle:
        gained = "|".join(map(re.escape, gained_compositions(names, init_params, init_file)))
        return place_params(tensors, identity_compositions(init_params), init_file, [*dont_load, gained])
    try:
        return place_params(tensors, init_params, init_file, dont_load)
    except CheckpointError as e:
        hint = "" if has_compositions(names) or not has_compositions(shapes_of(init_params)) else f"; {UPCYCLE_HINT}"
        raise CheckpointError(f"{e}{hint}") from None
