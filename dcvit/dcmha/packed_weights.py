"""Dynamic weights of all composes of a layer, computed as columns of one array for each side.

TPUs store the last axis of an array in multiples of 128 numbers: arrays of a few heads waste memory, and joining them
copies them. Here, one product reads the inputs for all hidden layers and gates, and the weights of a side are columns
of one array in the order in which the TPU kernels read them (`dcvit.dcmha.pallas_tpu.packing`): the down projections of
all composes, their up projections, their gates. The compiler then moves neither weights nor their gradients.

Letters are those of `dcvit.dcmha.compose`; in addition, C is the number of composes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha.compose import RMS_EPSILON
from dcvit.dcmha.numerics import statistics_dtype
from dcvit.dcmha.shapes import Array, Float


def dynamic_weights(
    x: Float[Array, "B N M"],
    params: Mapping[str, Mapping[str, Array]],
    *,
    sides: str,
    heads: int,
    gelu: str = "tanh",
) -> dict[str, dict[str, Array]]:
    """Compute the dynamic weights of Eqn 5-6 for all composes of a layer.

    On TPUs, default precision rounds the gates to bfloat16, as it rounds all operands of products.

    Args:
      x: inputs of N tokens.
      params: for each compose, the parameters by the names of their weights in `ComposeWeights`: "q1" is W_q1 (M G I),
        "q2" W_q2 (G I I), "qg" W_qg (M H). All composes have the same branches and sizes.
      sides: the sides whose weights depend on `x`: "q", "k" or "qk".
      heads: the number of heads H.
      gelu: the activation of the dynamic projections: "tanh", GELU's approximation, or "exact".

    Returns:
      The dynamic weights of each compose by name, as in `ComposeWeights`.
    """
    found: dict[str, dict[str, Array]] = {where: {} for where in params}
    names = next(iter(params.values())).keys()
    sides = "".join(side for side in sides if names & {f"{side}1", f"{side}g"})
    if not sides:
        return found

    def all_of(end: str, sides: str) -> list[Array]:
        return [some[side + end].astype(x.dtype) for side in sides for some in params.values() if side + end in some]

    hidden, gates = all_of("1", sides), all_of("g", sides)
    first = x @ jnp.concatenate([w.reshape(w.shape[0], -1) for w in (*hidden, *gates)], axis=1)
    active = jnp.tanh(first)
    if hidden:
        is_hidden = _column(first) < sum(w.shape[1] * w.shape[2] for w in hidden)
        active = jnp.where(is_hidden, jax.nn.gelu(first, approximate=gelu == "tanh"), active)
    for n, side in enumerate(sides):
        ends = [end for end in "12g" if side + end in names]
        widths = [heads if end == "g" else params[where][f"{side}1"][0].size // 2 for end in ends for where in params]
        packed = _projections(active, all_of("2", side), (n, len(sides)), sum(widths), heads) if hidden else None
        if packed is None:
            packed = jax.lax.slice_in_dim(active, n * sum(widths), (n + 1) * sum(widths), axis=2)
        pieces = iter(jnp.split(packed, np.cumsum(widths)[:-1], axis=2))
        for end in ends:
            for where in params:
                w = next(pieces)
                found[where][side + end] = w if end == "g" else w.reshape(*x.shape[:2], -1, heads)
    return found


def _projections(
    active: Float[Array, "B N rows"],
    w_2: Sequence[Float[Array, "G I I"]],
    side: tuple[int, int],
    width: int,
    heads: int,
) -> Float[Array, "B N width"]:
    """Apply the second layers of one side, normalize the down projections and keep the gates.

    Args:
      active: the hidden layers of all sides, then their gates.
      w_2: the second layer of each compose.
      side: the number of the side, and of sides.
      width: the number of columns of the side's weights.
      heads: the number of heads H.
    """
    groups, inner = w_2[0].shape[:2]
    per_group = heads // groups
    layer = _second_layer(jnp.stack(w_2), inner // (2 * per_group))
    rows, columns = layer.shape
    gates, (n, sides) = width - columns, side
    layer = jnp.pad(layer, ((n * rows, active.shape[2] - (n + 1) * rows), (0, gates)))
    kept = np.zeros(layer.shape, np.float32)  # the gates pass through the product
    kept[sides * rows + n * gates + np.arange(gates), columns + np.arange(gates)] = 1
    both = active @ (layer + kept.astype(layer.dtype) if gates else layer)
    # The mean over the heads of a group, for each down projection of a head, as a product of all columns: a slice would
    # cost TPUs a relayout of its gradient. On TPUs, with 16 bits of the operands.
    downs = columns // 2
    mean = np.zeros((width, width))
    mean[:downs, :downs] = np.kron(np.eye(downs // per_group), np.full((per_group, per_group), 1 / per_group))
    square = jnp.square(both.astype(statistics_dtype(both.dtype)))
    scale = jax.lax.rsqrt(jnp.matmul(square, mean.astype(square.dtype), precision=jax.lax.Precision.HIGH) + RMS_EPSILON)
    return both * jnp.where(_column(both) < downs, scale, 1).astype(both.dtype)


def _second_layer(w_2: Float[Array, "C G I I"], rank: int) -> Float[Array, "CGI CGI"]:
    """Return the second layers of Eqn 5 as one matrix.

    Its rows are ordered by layer, group and input; its columns by down and up, layer, rank, group and head.
    """
    count, groups, inner, _ = w_2.shape
    # Two products of five axes: jaxlib 0.10.2 and 0.11 crash in fused sums of seven axes or more on CPUs.
    split = w_2.reshape(count * groups, inner, 2 * rank, 1, -1)
    group = jnp.tile(jnp.eye(groups, dtype=w_2.dtype), (count, 1)).reshape(count * groups, 1, 1, groups, 1)
    by_layer = (split * group).reshape(count, groups * inner, 2, 1, -1)
    layer = jnp.eye(count, dtype=w_2.dtype).reshape(count, 1, 1, count, 1)
    return (by_layer * layer).reshape(count * groups * inner, -1)


def _column(x: Float[Array, "B N columns"]) -> Array:
    """Return the number of each column."""
    return jax.lax.broadcasted_iota(jnp.int32, (1, 1, x.shape[2]), 2)
