"""Upcycling: a model with plain attention becomes a composed one that computes the same function.

The added compositions start as the identity, A' = A: their up projections, gates and W_b are zero; their other
parameters keep their initial values. In the first step only the zeroed parameters have nonzero gradients, later all do;
if both down and up projection were zero, neither would ever have one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable

import flax.linen as nn
import jax
import jax.numpy as jnp

from dcvit.dcmha.shapes import Array
from dcvit.errors import CheckpointError
from dcvit.models import Params
from dcvit.models.fields import TRAINING_ONLY_FIELDS, AttentionFields
from dcvit.parallel.trees import by_name, names_of

COMPOSITION = re.compile(r"(?:.*/)?(?:pre|post)/(w_(?:[qk][12g]|b))")  # name of a parameter of a composition
QK_NORM = re.compile(r"(?:.*/)?(?:query|key)_norm/.*")
# Fields in which a composed model may differ from the plain one that it starts from.
FREE_FIELDS = {
    *(field.name for field in dataclasses.fields(AttentionFields) if field.name != "qk_norm"),
    *("num_classes", "vocab_size", "context"),  # follow from the data
    # These show in the names and shapes of parameters.
    *("width", "depth", "mlp_dim", "num_heads", "num_key_heads", "patch_size", "rep_size", "layer_scale"),
    "compose_layers",
    *(*TRAINING_ONLY_FIELDS, "parent", "name"),
}


def identity_compositions(params: Params) -> Params:
    """Return parameters, of unrolled or scanned layers, with their compositions set to the identity.

    Leaves that are shapes instead of arrays are returned unchanged.
    """

    def identity(name: str, leaf: Array | jax.ShapeDtypeStruct) -> Array | jax.ShapeDtypeStruct:
        found = COMPOSITION.fullmatch(name)
        if not found or isinstance(leaf, jax.ShapeDtypeStruct) or found[1] in ("w_q1", "w_k1"):
            return leaf
        if found[1] in ("w_q2", "w_k2"):  # outputs: the down projections of a group, then its up projections
            return jnp.asarray(leaf).at[..., leaf.shape[-1] // 2 :].set(0)
        return jnp.zeros_like(leaf)

    identities: Params = jax.tree.map(identity, names_of(params), params)
    return identities


def has_compositions(names: Iterable[str]) -> bool:
    """Return True if names of parameters include those of a composition."""
    return any(COMPOSITION.fullmatch(name) for name in names)


def gained_compositions(loaded: Collection[str], model: Params, file: str) -> list[str]:
    """Return the names of the parameters of compositions that a model has and a checkpoint lacks.

    Args:
      loaded: names of the checkpoint's parameters, in the layout of the model.
      model: parameters of the model, or their shapes.
      file: name of the checkpoint in messages.

    Raises:
      CheckpointError: the checkpoint lacks no composition, or the model has a QK-norm that the checkpoint lacks.
    """
    names = by_name(model)
    lacked = [name for name in names if name not in loaded]
    gained = [name for name in lacked if COMPOSITION.fullmatch(name)]
    if not has_compositions(names):
        raise CheckpointError("the model composes nothing, so upcycle has no effect: set --config.model.compose=both")
    if not gained:
        raise CheckpointError(f"{file} has all compositions of the model: remove --config.model_load.upcycle")
    if any(QK_NORM.fullmatch(name) for name in lacked):
        raise CheckpointError(
            f"{file} has no QK-norm, which would change the function of the model: set --config.model.qk_norm=None"
        )
    return gained


def fields_that_change_the_function(plain: nn.Module, composed: nn.Module) -> dict[str, tuple[object, object]]:
    """Return the fields, except of compositions, that make the functions differ: name -> (plain's, composed's value).

    Fields that change names or shapes of parameters are omitted.
    """
    names = {field.name for field in dataclasses.fields(plain)} - FREE_FIELDS
    if {getattr(net, "window_pattern", None) for net in (plain, composed)} == {"none"}:
        names -= {"window", "prefill_window"}  # unused
    if getattr(plain, "compose", None) is not None:  # it has compositions, of the same function
        names |= {"compose_gelu", "compose_window"}
    values = {name: (getattr(plain, name), getattr(composed, name)) for name in sorted(names)}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}
