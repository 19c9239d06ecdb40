"""Checkpoints as initial parameters, and conversion between the trees of scanned and unrolled layers.

A scan stacks the parameters of its layers along a new first axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from dcvit.errors import CheckpointError
from dcvit.models import Params
from dcvit.models.upcycling import gained_compositions, has_compositions, identity_compositions
from input_pipeline.files import expand

if TYPE_CHECKING:
    from dcvit.weights.big_vision_files import Tensors

UPCYCLE_HINT = "to start its compositions as the identity: --config.model_load.upcycle=True"


@runtime_checkable
class ModelFields(Protocol):
    """Fields of a model by name: a dict, or a part of an ml_collections config, which is no Mapping."""

    def get(self, key: str, /) -> object:
        """Return the value of a field, None if it is not given."""


def stack(layers: Sequence[Params]) -> Params:
    """Return the parameters of several layers as one tree, stacked along a new first axis."""
    stacked: Params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return stacked


def unstack(stacked: Params) -> list[Params]:
    """Return the parameters of each layer of a stacked tree."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(len(jax.tree.leaves(stacked)[0]))]


def pop_blocks(transformer: dict[str, Any], prefix: str, multiple_of: int = 1) -> list[Params]:
    """Remove the blocks `prefix`0, `prefix`1, … from a tree and return them.

    Blocks beyond the largest multiple of `multiple_of` stay in the tree.
    """
    count = 0
    while f"{prefix}{count}" in transformer:
        count += 1
    return [transformer.pop(f"{prefix}{i}") for i in range(count // multiple_of * multiple_of)]


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
      init_file: a checkpoint of this project or of big_vision, or weights of another library.
      dont_load: regexes; parameters whose name matches one keep their initial value.
      convert: function from the tensors of the checkpoint to those of the model.
      upcycle: compositions that the checkpoint lacks start as the identity.

    Raises:
      dcvit.errors.CheckpointError: the file is unreadable, names or shapes differ (both sides are listed), or the model
        cannot be upcycled.
    """
    from dcvit.models.trees import shapes_of  # late: the models import where Orbax is not installed
    from dcvit.weights.placement import in_layout, place_params

    tensors = convert(_open(init_file))
    names = in_layout(tensors, shapes_of(init_params))
    if upcycle:
        gained = "|".join(map(re.escape, gained_compositions(names, init_params, init_file)))
        return place_params(tensors, identity_compositions(init_params), init_file, [*dont_load, gained])
    try:
        return place_params(tensors, init_params, init_file, dont_load)
    except CheckpointError as e:
        hint = "" if has_compositions(names) or not has_compositions(shapes_of(init_params)) else f"; {UPCYCLE_HINT}"
        raise CheckpointError(f"{e}{hint}") from None


def _open(init_file: str) -> Tensors:
    """Open a checkpoint of this project or of big_vision, or weights of another library as unrolled layers."""
    from dcvit.runs.checkpointer import as_tensor, open_params
    from dcvit.weights import big_vision_files as big_vision
    from dcvit.weights.families import is_weights, open_weights

    path = expand(init_file)
    if is_weights(path):
        return open_weights(path).parameters()
    if located := big_vision.locate(path):
        return big_vision.open_arrays(located)
    if not path.exists():
        big_vision.check_named(init_file)
    return {name: as_tensor(array, f"{name} of {path}") for name, array in open_params(path).items()}
