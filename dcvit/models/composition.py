"""Parameters of DCMHA's composition, and the dynamic weights computed from them (Section 3, Eqn 5-6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dcvit.dcmha import device
from dcvit.dcmha.compose import ONE_TILE, ComposeWeights, HiddenWeights, dynamic_weights, hidden_weights
from dcvit.dcmha.device import splits_heads
from dcvit.dcmha.inputs import Composition
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


class LayerWeights(NamedTuple):
    """Weights of the composes of a layer; `hidden` has the dynamic ones once more, for TPU kernels."""

    pre: ComposeWeights | None = None
    post: ComposeWeights | None = None
    hidden: HiddenWeights | None = None


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
) -> LayerWeights:
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
    hidden = None
    weights = {name: {"static": some["static"]} if "static" in some else {} for name, some in params.items()}
    for sides, (x, replicated) in inputs.items():
        x, replicated = (copy.astype(dtype or copy.dtype) for copy in (x, replicated))
        if splits_heads():
            found = _split_weights(composition, params, ComposeInput(x, replicated), sides, num_heads)
        elif sides == "qk" and composition.projection and device.platform() == "tpu" and x.shape[1] <= ONE_TILE:
            hidden = hidden_weights(replicated, params, sides=sides, heads=num_heads, gelu=composition.gelu)
            found = hidden.weights()
        else:
            found = dynamic_weights(replicated, params, sides=sides, heads=num_heads, gelu=composition.gelu)
        for name, some in found.items():
            weights[name] |= some
    return LayerWeights(hidden=hidden, **{name: ComposeWeights(**some) for name, some in weights.items()})


def _split_weights(
    composition: Composition, params: Mapping[str, Mapping[str, Array]], inputs: ComposeInput, sides: str, heads: int
) -> dict[str, dict[str, Array]]:
    """Return the results of `dynamic_weights` on a mesh that splits the heads.

    Groups are split like their heads. A single group composes all heads on every device, but each device has the gates
    of its own heads.
    """
    devices = jax.sharding.get_abstract_mesh().shape["tensor"]
    parts_of_gates = devices if heads % devices == 0 else 1
    weights: dict[str, dict[str, Array]] = {name: {} for name in params}
    for x, ends, parts in ((inputs.replicated, "12", composition.groups), (inputs.x, "g", parts_of_gates)):
        chosen = {name: {field: w for field, w in some.items() if field[1:] in ends} for name, some in params.items()}
        if not any(chosen.values()):
            continue
        found = _in_parts(x, chosen, parts, sides=sides, heads=heads, gelu=composition.gelu)
        axis = "tensor" if parts > 1 else None
        for name, some in found.items():
            for field, w in some.items():
                weights[name][field] = constrain(w, BATCH, "context", *[None] * (w.ndim - 3), axis)
    return weights


def _in_parts(
    x: Array, params: Mapping[str, Mapping[str, Array]], parts: int, *, sides: str, heads: int, gelu: str
) -> dict[str, dict[str, Array]]:
    """Return the results of `dynamic_weights`, whose heads consist of equal parts that do not depend on each other.

    The parts have an axis of their own in all products, which the compiler can split over devices. They are the groups
    of projections, or any part of the gates.
    """

    def split(field: str, w: Array) -> Array:
        if field.endswith("g"):
            return jnp.moveaxis(w.reshape(w.shape[0], parts, -1), 1, 0)
        return jnp.moveaxis(w[:, :, None], 1, 0) if field.endswith("1") else w[:, None]  # the parts have one group

    own = {name: {field: split(field, w) for field, w in some.items()} for name, some in params.items()}
    found = jax.vmap(lambda own: dynamic_weights(x, own, sides=sides, heads=heads // parts, gelu=gelu))(own)
    joined: dict[str, dict[str, Array]] = jax.tree.map(
        lambda w: jnp.moveaxis(w, 0, -2).reshape(*w.shape[1:-1], heads), found
    )
    return joined
