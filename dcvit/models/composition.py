"""Parameters of DCMHA's composition, and the dynamic weights computed from them (Section 3, Eqn 5-6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
from jax.typing import DTypeLike

from dcvit.dcmha.compose import ComposeWeights, dynamic_gates, dynamic_projections
from dcvit.dcmha.device import splits_heads
from dcvit.dcmha.inputs import Composition
from dcvit.dcmha.packed_weights import dynamic_weights
from dcvit.dcmha.shapes import Array, Float
from dcvit.parallel.mesh import BATCH, constrain


class ComposeParams(nn.Module):
    """Parameters θ = {W_q1, W_q2, W_qg, W_k1, W_k2, W_kg, W_b} of one compose, that of scores or that of weights.

    Fields:
      composition: the settings of both composes of a layer.
      num_heads: H.
    """

    composition: Composition
    num_heads: int

    @nn.compact
    def __call__(self, width: int) -> dict[str, Array]:
        """Return the parameters that exist, named as in `ComposeWeights`, for inputs of M = `width`."""
        parameters = self.composition.parameters(self.num_heads, width)
        return {
            name: self.param("w_b" if name == "static" else f"w_{name}", init, shape)
            for name, (shape, init) in parameters.items()
        }


class ComposeInput(NamedTuple):
    """An attention input in two copies, from which dynamic weights are computed.

    On a mesh with the axis "tensor", the gradient that flows to an input from a device's own heads is a partial sum;
    that from projections of all heads is replicated. Separate copies keep them apart, so that one all-reduce is enough.
    """

    x: Float[Array, "B _ M"]
    replicated: Float[Array, "B _ M"]


def compose_inputs(x_q: Float[Array, "B T M"], x_kv: Float[Array, "B S M"], *, groups: int) -> dict[str, ComposeInput]:
    """Return the inputs of dynamic weights: "q" of queries and "k" of keys, or "qk" if these are the same array.

    With one group (`groups`), one copy is replicated. Call this before any other use of the inputs.
    """
    inputs = {"qk": x_q} if x_q is x_kv else {"q": x_q, "k": x_kv}
    replicated = {sides: constrain(x, BATCH, "context", None) if groups == 1 else x for sides, x in inputs.items()}
    return {sides: ComposeInput(x, replicated[sides]) for sides, x in inputs.items()}


def compose_weights(
    composition: Composition,
    params: Mapping[str, Mapping[str, Array]],
    inputs: Mapping[str, ComposeInput],
    *,
    num_heads: int,
    dtype: DTypeLike | None,
) -> dict[str, ComposeWeights]:
    """Compute the weights of a layer's pre- and post-compose; each input is multiplied once, by the parameters of both.

    Args:
      composition: the composition of the layer.
      params: for each compose, "pre" or "post", the parameters returned by `ComposeParams`.
      inputs: returned by `compose_inputs`.
      num_heads: H.
      dtype: dtype of the computation; None means that of the inputs.

    Returns:
      The weights of "pre" and "post", as far as `params` has them.
    """
    weights = {name: {"static": some["static"]} if "static" in some else {} for name, some in params.items()}
    for sides, (x, replicated) in inputs.items():
        x, replicated = (copy.astype(dtype or copy.dtype) for copy in (x, replicated))
        if splits_heads():
            both = ComposeInput(x, replicated)
            found = _split_weights(params, both, sides, num_heads=num_heads, gelu=composition.gelu)
        else:
            found = dynamic_weights(replicated, params, sides=sides, heads=num_heads, gelu=composition.gelu)
        for name, some in found.items():
            weights[name] |= some
    return {name: ComposeWeights(**some) for name, some in weights.items()}


def _split_weights(
    params: Mapping[str, Mapping[str, Array]], inputs: ComposeInput, sides: str, *, num_heads: int, gelu: str
) -> dict[str, dict[str, Array]]:
    """Return dynamic weights of `sides` ("q", "k", "qk") for "pre" and "post" by name; the mesh splits the heads."""
    weights: dict[str, dict[str, Array]] = {name: {} for name in params}

    def kernels(end: str) -> dict[tuple[str, str], Array]:
        """Return the parameters named side + `end`, such as "q1", by ("pre" or "post", side)."""
        names = [(name, side) for side in sides for name in params if f"{side}{end}" in params[name]]
        return {(name, side): params[name][f"{side}{end}"].astype(inputs.x.dtype) for name, side in names}

    if down := kernels("1"):
        up = kernels("2")
        # Groups are split like their heads. A single group composes all heads on every device.
        axis = "tensor" if next(iter(up.values())).shape[0] > 1 else None
        x = inputs.replicated
        pairs = dynamic_projections(x, list(down.values()), list(up.values()), heads=num_heads, gelu=gelu)
        for (name, side), pair in zip(down, pairs, strict=True):
            for i, w in enumerate(pair, start=1):
                weights[name][f"{side}{i}"] = constrain(w, BATCH, "context", None, axis)
    if gate := kernels("g"):
        for (name, side), w in zip(gate, dynamic_gates(inputs.x, list(gate.values())), strict=True):
            weights[name][f"{side}g"] = constrain(w, BATCH, "context", "tensor")
    return weights
