"""Parameters of DCMHA's composition, and the dynamic weights computed from them (Section 3, Eqn 5-6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
from jax.typing import DTypeLike

from dcvit.dcmha.compose import (
    ComposeWeights,
    dynamic_gates,
    dynamic_projections,
    gate_init,
    hidden_init,
    projection_init,
    static_init,
)
from dcvit.dcmha.packed_weights import dynamic_weights
from dcvit.dcmha.partition import splits_heads
from dcvit.dcmha.shapes import Array, Float
from dcvit.models.fields import BranchFields
from dcvit.parallel.mesh import BATCH, constrain


class ComposeParams(BranchFields):
    """The parameters of one composition, θ = {W_q1, W_q2, W_qg, W_k1, W_k2, W_kg, W_b}.

    Fields:
      num_heads: H.
    """

    num_heads: int

    @nn.compact
    def __call__(self, width: int) -> dict[str, Array]:
        """Return the parameters that exist, named as in `ComposeWeights`, for inputs of M = `width`."""
        per_group = self.num_heads // self.groups
        inner = 2 * self.rank * per_group
        params: dict[str, Array] = {}
        for side in [side for side in "qk" if side in self.branches]:
            if self.projection:
                one, two = hidden_init(width, inner), projection_init(self.rank, per_group)
                params[f"{side}1"] = self.param(f"w_{side}1", one, (width, self.groups, inner))
                params[f"{side}2"] = self.param(f"w_{side}2", two, (self.groups, inner, inner))
            if self.gate:
                params[f"{side}g"] = self.param(f"w_{side}g", gate_init(width, per_group), (width, self.num_heads))
        if self.static:
            shape = (self.groups, per_group, per_group)
            params["static"] = self.param("w_b", static_init(per_group), shape)
        return params


class ComposeInput(NamedTuple):
    """An attention input in two copies, from which dynamic weights are computed.

    The gradient of the projections of all heads is replicated over the mesh axis "tensor", that of a device's own heads
    is a partial sum. Separate copies keep the two apart, so that one exchange adds up the partial sums.
    """

    x: Float[Array, "B _ M"]
    replicated: Float[Array, "B _ M"]


def compose_inputs(x_q: Float[Array, "B T M"], x_kv: Float[Array, "B S M"], *, groups: int) -> dict[str, ComposeInput]:
    """Return the inputs of the dynamic weights by side: "q" and "k", or "qk" if both sides have the same input.

    Call this before any other use of the inputs.
    """
    inputs = {"qk": x_q} if x_q is x_kv else {"q": x_q, "k": x_kv}
    replicated = {sides: constrain(x, BATCH, None, None) if groups == 1 else x for sides, x in inputs.items()}
    return {sides: ComposeInput(x, replicated[sides]) for sides, x in inputs.items()}


def compose_weights(
    params: Mapping[str, Mapping[str, Array]],
    inputs: Mapping[str, ComposeInput],
    *,
    num_heads: int,
    gelu: str,
    dtype: DTypeLike | None,
) -> dict[str, ComposeWeights]:
    """Compute the weights of the compositions of an attention layer; one product reads an input for all of them.

    Args:
      params: for each composition, "pre" or "post", the parameters returned by `ComposeParams`.
      inputs: returned by `compose_inputs`.
      num_heads: H.
      gelu: see `BranchFields.compose_gelu`.
      dtype: dtype of the computation; None means that of the inputs.

    Returns:
      The weights by composition.
    """
    weights = {where: {"static": some["static"]} if "static" in some else {} for where, some in params.items()}
    for sides, (x, replicated) in inputs.items():
        x, replicated = (copy.astype(dtype or copy.dtype) for copy in (x, replicated))
        if splits_heads():
            found = _split_weights(params, ComposeInput(x, replicated), sides, num_heads=num_heads, gelu=gelu)
        else:
            found = dynamic_weights(replicated, params, sides=sides, heads=num_heads, gelu=gelu)
        for where, some in found.items():
            weights[where] |= some
    return {where: ComposeWeights(**some) for where, some in weights.items()}


def _split_weights(
    params: Mapping[str, Mapping[str, Array]], inputs: ComposeInput, sides: str, *, num_heads: int, gelu: str
) -> dict[str, dict[str, Array]]:
    """Return the dynamic weights of each composition by name, on a mesh that splits heads over devices."""
    weights: dict[str, dict[str, Array]] = {where: {} for where in params}

    def kernels(end: str) -> dict[tuple[str, str], Array]:
        """The kernels that end so, by composition and side."""
        names = [(where, side) for side in sides for where in params if f"{side}{end}" in params[where]]
        return {(where, side): params[where][f"{side}{end}"].astype(inputs.x.dtype) for where, side in names}

    if down := kernels("1"):
        up = kernels("2")
        # Groups are split like their heads. A single group composes all heads on every device.
        axis = "tensor" if next(iter(up.values())).shape[0] > 1 else None
        x = inputs.replicated
        pairs = dynamic_projections(x, list(down.values()), list(up.values()), heads=num_heads, gelu=gelu)
        for (where, side), pair in zip(down, pairs, strict=True):
            for i, w in enumerate(pair, start=1):
                weights[where][f"{side}{i}"] = constrain(w, BATCH, None, None, axis)
    if gate := kernels("g"):
        for (where, side), w in zip(gate, dynamic_gates(inputs.x, list(gate.values())), strict=True):
            weights[where][f"{side}g"] = constrain(w, BATCH, None, "tensor")
    return weights
