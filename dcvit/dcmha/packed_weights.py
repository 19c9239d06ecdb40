"""Dynamic weights of all composes of a layer, computed as columns of one array for each side (queries, keys).

`dcvit.dcmha.compose.dynamic_projection` and `dynamic_gate` state the same computation (Eqn 5-6) for one compose and one
side. Here it is arranged for speed: TPUs store the last axis of an array in multiples of 128 numbers, so that arrays of
a few heads waste memory, and concatenating them is a copy. One product reads the inputs for all hidden layers and gates
(`active_columns`), and the weights of a side are columns of one array in the order in which the TPU kernels read them
(`columns_of`, `dcvit.dcmha.backends.tpu.packing`). If 128 columns hold both sides, they share the array. The compiler
then moves neither weights nor their gradients.

CPUs move columns faster than they multiply with the zeros of the joined second layers, so that each compose and side
has products of its own there. On two CPU cores, output and gradients of 64 × 16 tokens of width 64 with 4 heads then
take 0.63 of the time, of 16 × 128 tokens of width 128 with 8 heads 0.54, and of 8 × 196 tokens of width 384 with 6
heads 0.68 (processor time, shortest of 15 rounds).

Letters are those of `dcvit.dcmha.compose`; in addition, C is the number of composes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha import device
from dcvit.dcmha.compose import RMS_EPSILON
from dcvit.dcmha.numerics import statistics_dtype
from dcvit.dcmha.shapes import Array, Float

REGISTER = 128  # columns of a register of a TPU, in multiples of which it stores the last axis of an array


class Columns(NamedTuple):
    """Neighboring columns of the packed weights of the queries or of the keys: one field of one `ComposeWeights`."""

    compose_name: str
    field: str
    width: int

    @property
    def is_gate(self) -> bool:
        return self.field.endswith("g")


def columns_of(params: Mapping[str, Mapping[str, Array]], side: str, heads: int) -> list[Columns]:
    """Return the columns of `side`, "q" or "k": down projections of all composes, then up projections, then gates."""
    return [
        Columns(name, f"{side}{end}", heads if end == "g" else some[f"{side}1"][0].size // 2)
        for end in "12g"
        for name, some in params.items()
        if f"{side}{end}" in some
    ]


class ActiveColumns(NamedTuple):
    """Columns of one side (queries or keys) in the product that reads the inputs: of hidden layers and of gates."""

    hidden: slice
    gates: slice


def active_columns(params: Mapping[str, Mapping[str, Array]], sides: Sequence[str], heads: int) -> list[ActiveColumns]:
    """Return the columns of each side in the product that reads the inputs: all hidden layers, then all gates."""
    widths = [columns_of(params, side, heads) for side in sides]
    hidden = [sum(c.width for c in columns if not c.is_gate) for columns in widths]
    gates = [sum(c.width for c in columns if c.is_gate) for columns in widths]
    ends = np.cumsum([*hidden, *gates]).tolist()
    slices = [slice(end - width, end) for end, width in zip(ends, (*hidden, *gates), strict=True)]
    return [ActiveColumns(*pair) for pair in zip(slices[: len(sides)], slices[len(sides) :], strict=True)]


def dynamic_weights(
    x: Float[Array, "B N M"],
    params: Mapping[str, Mapping[str, Array]],
    *,
    sides: str,
    heads: int,
    gelu: str = "tanh",
) -> dict[str, dict[str, Array]]:
    """Return the dynamic weights of Eqn 5-6 for all composes of a layer.

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
    found: dict[str, dict[str, Array]] = {name: {} for name in params}
    present = [side for side in sides if columns_of(params, side, heads)]
    if not present:
        return found

    def kernels(end: str, sides: Sequence[str]) -> list[Array]:
        return [some[side + end].astype(x.dtype) for side in sides for some in params.values() if side + end in some]

    hidden, gates = kernels("1", present), kernels("g", present)
    joined = jnp.concatenate([w.reshape(w.shape[0], -1) for w in (*hidden, *gates)], axis=1)
    layout = active_columns(params, present, heads)
    if device.platform() == "cpu":
        return _separate_weights(x @ joined, params, dict(zip(present, layout, strict=True)), heads=heads, gelu=gelu)
    pre_activations = x @ _padded(joined)
    active = jnp.tanh(pre_activations)
    if hidden:
        column = jax.lax.broadcasted_iota(jnp.int32, (1, 1, pre_activations.shape[2]), 2)
        is_hidden = column < layout[-1].hidden.stop
        active = jnp.where(is_hidden, jax.nn.gelu(pre_activations, approximate=gelu == "tanh"), active)
    by_side = {side: columns_of(params, side, heads) for side in present}
    fits = sum(c.width for columns in by_side.values() for c in columns) <= REGISTER
    for sides_of_array in [present] if fits else [[side] for side in present]:
        where = [some for side, some in zip(present, layout, strict=True) if side in sides_of_array]
        if hidden:
            packed = _projections(active, [kernels("2", side) for side in sides_of_array], where, heads)
        else:
            packed = jax.lax.slice_in_dim(active, where[0].gates.start, where[-1].gates.stop, axis=2)
        columns = [c for side in sides_of_array for c in by_side[side]]
        pieces = jnp.split(packed, np.cumsum([c.width for c in columns]), axis=2)[:-1]
        for c, w in zip(columns, pieces, strict=True):
            found[c.compose_name][c.field] = w if c.is_gate else w.reshape(*x.shape[:2], -1, heads)
    return found


def _separate_weights(
    pre_activations: Float[Array, "B N columns"],
    params: Mapping[str, Mapping[str, Array]],
    layout: Mapping[str, ActiveColumns],
    *,
    heads: int,
    gelu: str,
) -> dict[str, dict[str, Array]]:
    """Return the results of `dynamic_weights`, computed by separate products for each compose and side.

    Args:
      pre_activations: the product that reads the inputs, before GELU and tanh, for all composes and sides.
      params, heads, gelu: see `dynamic_weights`.
      layout: the columns of each side in `pre_activations`.
    """
    found: dict[str, dict[str, Array]] = {name: {} for name in params}
    for side, where in layout.items():
        at, at_gate = where.hidden.start, where.gates.start
        for name, some in params.items():
            if f"{side}2" in some:
                w_2 = some[f"{side}2"].astype(pre_activations.dtype)
                end = at + w_2.shape[0] * w_2.shape[1]
                hidden = jax.nn.gelu(pre_activations[:, :, at:end], approximate=gelu == "tanh")
                pair = _projection(hidden, w_2, heads)
                found[name] |= dict(zip((f"{side}1", f"{side}2"), pair, strict=True))
                at = end
            if f"{side}g" in some:
                found[name][f"{side}g"] = jnp.tanh(pre_activations[:, :, at_gate : at_gate + heads])
                at_gate += heads
    return found


def _projection(
    hidden: Float[Array, "B N GI"], w_2: Float[Array, "G I I"], heads: int
) -> tuple[Float[Array, "B N R H"], Float[Array, "B N R H"]]:
    """Return the normalized down projection and the up projection of one compose and side from its hidden layer."""
    groups, inner = w_2.shape[:2]
    per_group = heads // groups
    both = hidden @ _second_layer(w_2[None], inner // (2 * per_group))
    downs = both.shape[2] // 2
    down, up = both[:, :, :downs], both[:, :, downs:]
    square = jnp.square(down.astype(statistics_dtype(down.dtype)))
    mean = _mean_of_runs(downs, per_group).astype(square.dtype)
    scale = jax.lax.rsqrt(jnp.matmul(square, mean, precision=_precision_of_means()) + RMS_EPSILON)
    shape = (*both.shape[:2], -1, heads)
    return (down * scale.astype(down.dtype)).reshape(shape), up.reshape(shape)


def _precision_of_means() -> jax.lax.Precision | None:
    """Return HIGH, 16 bits of the operands on TPUs, or None where the user sets another precision above the lowest."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return jax.lax.Precision.HIGH if precision in (None, "default", "fastest", "bfloat16") else None


def _mean_of_runs(columns: int, run: int) -> np.ndarray:
    """Return the matrix that, as a factor from the right, replaces each `run` neighboring columns by their mean."""
    return np.kron(np.eye(columns // run), np.full((run, run), 1 / run))


def _projections(
    active: Float[Array, "B N rows"],
    w_2: Sequence[Sequence[Float[Array, "G I I"]]],
    where: Sequence[ActiveColumns],
    heads: int,
) -> Float[Array, "B N width"]:
    """Return the weights of one or more sides as columns (`columns_of`), from hidden layers and gates.

    Args:
      active: the product that reads the inputs, after GELU and tanh: the hidden layers of all sides, then their gates.
      w_2: for each side to compute, the second layer of each compose.
      where: the columns in `active` of each side to compute.
      heads: the number of heads H.
    """
    groups, inner = w_2[0][0].shape[:2]
    per_group = heads // groups
    layers, is_down = [], []
    for some, own in zip(w_2, where, strict=True):
        layer = _second_layer(jnp.stack(some), inner // (2 * per_group))
        columns, gates = layer.shape[1], own.gates.stop - own.gates.start
        layer = jnp.pad(layer, ((own.hidden.start, active.shape[2] - own.hidden.stop), (0, gates)))
        kept = np.zeros(layer.shape, np.float32)  # the gates pass through the product
        kept[np.arange(own.gates.start, own.gates.stop), np.arange(columns, columns + gates)] = 1
        layers.append(layer + kept.astype(layer.dtype) if gates else layer)
        is_down += [True] * (columns // 2) + [False] * (columns - columns // 2 + gates)
    both = active @ _padded(jnp.concatenate(layers, axis=1))
    # The mean over the heads of a group, for each down projection of a head, as a product of all columns: a slice would
    # cost TPUs a relayout of its gradient.
    mean = _mean_of_runs(len(is_down), per_group)
    missing = both.shape[2] - len(is_down)
    mean, is_down = np.pad(np.where(is_down, mean, 0), (0, missing)), [*is_down, *[False] * missing]
    square = jnp.square(both.astype(statistics_dtype(both.dtype)))
    means = jnp.matmul(square, mean.astype(square.dtype), precision=_precision_of_means())
    scale = jax.lax.rsqrt(means + RMS_EPSILON)
    return both * jnp.where(np.array(is_down), scale, 1).astype(both.dtype)


def _second_layer(w_2: Float[Array, "C G I I"], rank: int) -> Float[Array, "CGI CGI"]:
    """Return the second layers of Eqn 5, one for each compose of a side, as one matrix that is block-diagonal.

    Its rows are ordered by layer, group and input; its columns by down and up, layer, rank, group and head.
    """
    count, groups, inner, _ = w_2.shape
    # Two products of five axes: jaxlib 0.10.2 and 0.11 crash in fused sums of seven axes or more on CPUs.
    split = w_2.reshape(count * groups, inner, 2 * rank, 1, -1)
    group = jnp.tile(jnp.eye(groups, dtype=w_2.dtype), (count, 1)).reshape(count * groups, 1, 1, groups, 1)
    by_layer = (split * group).reshape(count, groups * inner, 2, 1, -1)
    layer = jnp.eye(count, dtype=w_2.dtype).reshape(count, 1, 1, count, 1)
    return (by_layer * layer).reshape(count * groups * inner, -1)


def _padded(w: Float[Array, "I columns"]) -> Float[Array, "I padded"]:
    """Return `w` with zero columns up to a multiple of 128, if the padding is at most an eighth of the result.

    TPUs then keep the last axis of a product along lanes, as the kernels read it, with little more memory.
    """
    missing = -w.shape[1] % REGISTER
    return jnp.pad(w, ((0, 0), (0, missing))) if 8 * missing <= w.shape[1] + missing else w
