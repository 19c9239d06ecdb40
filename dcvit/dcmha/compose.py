"""Compose function of DCMHA (Xiao et al., ICML 2024, Section 3, Eqn 5-8) on plain arrays.

Letters: B batch, T query length, S key length, M model width (the paper's D_m), H heads, R rank of the dynamic
projections, G groups of heads (a compose combines heads of the same group only), I = 2·R·H/G.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import Initializer, normal
from jax.scipy.linalg import block_diag
from jax.typing import DTypeLike

from dcvit.dcmha import device
from dcvit.dcmha.numerics import is_float, product, statistics_dtype
from dcvit.dcmha.shapes import Array, Float, Shaped

RMS_EPSILON = 1e-6
ONE_TILE = 256  # most tokens of an example whose scores TPU kernels hold at once; these kernels take `HiddenWeights`
REGISTER = 128  # columns of a register of a TPU, in multiples of which it stores the last axis of an array


class ComposeWeights(NamedTuple):
    """Weights of one compose: the function `compose`, which mixes attention scores or weights across the H heads.

    Branches are added to the skip connection; None is an absent one. `q…` belong to the T queries, `k…` to the S keys:
    `q1` and `q2`, `k1` and `k2` project down to rank R and up (give both or neither), `qg` and `kg` are gates. `static`
    is a J×J matrix for each of G groups of J = H/G heads.
    """

    q1: Float[Array, "B T R H"] | None = None  # query-wise dynamic projection, down (RMS-normed over H)
    q2: Float[Array, "B T R H"] | None = None  # query-wise dynamic projection, up
    qg: Float[Array, "B T H"] | None = None  # query-wise dynamic gate, after tanh
    k1: Float[Array, "B S R H"] | None = None  # key-wise, as above
    k2: Float[Array, "B S R H"] | None = None
    kg: Float[Array, "B S H"] | None = None
    static: Float[Array, "G J J"] | None = None  # static projection W_b, J = H/G


class Columns(NamedTuple):
    """Neighboring columns of an array of dynamic weights: one field of one `ComposeWeights`."""

    compose_name: str
    field: str
    width: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class HiddenLayout:
    """Static properties of `HiddenWeights`.

    Fields:
      columns: the results, in order.
      heads, groups: H and G.
      gelu: see `dynamic_weights`.
    """

    columns: tuple[Columns, ...]
    heads: int
    groups: int
    gelu: str

    def ends(self, count: int) -> np.ndarray:
        """Return "1", "2" or "g", the last letter of its field, for each of `count` columns; "" for padding."""
        found = [c.field[1] for c in self.columns for _ in range(c.width)]
        return np.array(found + [""] * (count - len(found)))


class HiddenWeights(NamedTuple):
    """Dynamic weights of a layer before their second layer, from which `weights` or a kernel computes them."""

    before: Float[Array, "B N C"]  # x·W_1 and x·W_g; the columns of gates are those of the results, zeros may follow
    second: Float[Array, "C C"]  # W_2 of all composes and sides, with zeros in the rows and columns of gates
    layout: HiddenLayout

    def weights(self) -> dict[str, dict[str, Array]]:
        """Return the dynamic weights as `dynamic_weights` does, as slices of one array."""
        columns, ends = self.layout.columns, self.layout.ends(self.before.shape[2])
        widths = [c.width for c in columns]
        packed = jnp.tanh(self.before)
        if "1" in ends:
            both = jax.nn.gelu(self.before, approximate=self.layout.gelu == "tanh") @ self.second
            normed = _normed(both, ends == "1", self.layout.heads // self.layout.groups)
            packed = jnp.where(ends == "g", packed, normed)
        parts = jnp.split(packed, np.cumsum(widths), axis=2)[: len(widths)]
        return _by_name(columns, parts, self.layout.heads)


def dynamic_weights(
    x: Float[Array, "B N M"],
    params: Mapping[str, Mapping[str, Array]],
    *,
    sides: str = "qk",
    heads: int,
    gelu: str = "tanh",
) -> dict[str, dict[str, Array]]:
    """Return the dynamic weights of Eqn 5-6 for all composes of a layer.

    For each compose, side and group of heads, [w_1, w_2] = GELU(x·W_1)·W_2, where w_1 is then divided by its root mean
    square over the heads of the group, and w_g = tanh(x·W_g). All products, also those of the norms, have JAX's
    precision (`jax.default_matmul_precision`).

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
    params = {name: {field: w.astype(x.dtype) for field, w in some.items()} for name, some in params.items()}
    columns = _columns(params, sides, heads)
    if not columns:
        return {name: {} for name in params}
    if (arrange := {"cpu": _separate_weights, "gpu": _transposed_weights}.get(device.platform())) is None:
        weights = hidden_weights(x, params, sides=sides, heads=heads, gelu=gelu).weights()
    else:
        weights = _by_name(columns, arrange(x, params, columns, heads=heads, gelu=gelu), heads)
    return {name: weights.get(name, {}) for name in params}


def _by_name(
    columns: Sequence[Columns], weights: Sequence[Float[Array, "B N _"]], heads: int
) -> dict[str, dict[str, Array]]:
    """Return the arrays of `columns` by compose and field, in the shapes of `ComposeWeights`."""
    found: dict[str, dict[str, Array]] = {}
    for c, w in zip(columns, weights, strict=True):
        named = found.setdefault(c.compose_name, {})
        named[c.field] = w if c.field.endswith("g") else w.reshape(*w.shape[:2], -1, heads)
    return found


def _columns(params: Mapping[str, Mapping[str, Array]], sides: str, heads: int) -> list[Columns]:
    """Return the columns of each side: down projections of all composes, then up projections, then gates.

    The TPU kernels read the weights in this order (`dcvit.dcmha.backends.tpu.packing`), so that packing moves none.
    """
    in_order = sorted(params, key=lambda name: name != "pre")  # JAX sorts the keys of a dict
    return [
        Columns(name, f"{side}{end}", heads if end == "g" else params[name][f"{side}1"][0].size // 2)
        for side in sides
        for end in "12g"
        for name in in_order
        if f"{side}{end}" in params[name]
    ]


def hidden_weights(
    x: Float[Array, "B N M"], params: Mapping[str, Mapping[str, Array]], *, sides: str, heads: int, gelu: str
) -> HiddenWeights:
    """Return the dynamic weights before their second layer; the arguments are those of `dynamic_weights`.

    TPUs store the last axis of an array in multiples of 128 numbers: arrays of a few heads would waste memory, and a
    concatenation or slice of columns is a copy. So nothing moves: a side has as many hidden units as projection
    weights, and the product that reads the inputs has them, and the gates, in the columns of the results. The second
    layers of both sides of all composes are one block-diagonal matrix: products for each side take 1.18 times the
    cycles (405M on v5e with gradients, the TPU compiler's estimate).
    """
    params = {name: {field: w.astype(x.dtype) for field, w in some.items()} for name, some in params.items()}
    columns = _columns(params, sides, heads)
    missing = _padding(columns)
    before = x @ jnp.pad(_first_layer(params, columns), ((0, 0), (0, missing)))
    layers = [params[c.compose_name][c.field] for c in columns if c.field.endswith("2")]
    count, groups = before.shape[2], layers[0].shape[0] if layers else 1
    second = _joined_second_layers(layers, columns, heads, count) if layers else jnp.zeros((count, count), x.dtype)
    return HiddenWeights(before, second, HiddenLayout(tuple(columns), heads, groups, gelu))


def _separate_weights(
    x: Float[Array, "B N M"],
    params: Mapping[str, Mapping[str, Array]],
    columns: Sequence[Columns],
    *,
    heads: int,
    gelu: str,
) -> list[Float[Array, "B N _"]]:
    """Return the dynamic weights of `columns`; each compose and side has a second layer of its own.

    CPUs move columns faster than they multiply with the zeros of joined layers, which take 1.02 to 1.38 times as long
    (processor time with gradients, from 64 × 16 tokens of width 64 to 1,024 tokens of width 1,024).
    """
    found: dict[tuple[str, str], Array] = {}
    parts = [c for c in columns if not c.field.endswith("2")]
    widths = [c.width if c.field.endswith("g") else 2 * c.width for c in parts]
    pre_activations = jnp.split(product(x, _first_layer(params, columns)), np.cumsum(widths), axis=2)[: len(parts)]
    for (name, field, width), before in zip(parts, pre_activations, strict=True):
        if field.endswith("g"):
            found[name, field] = jnp.tanh(before)
        else:
            w_2 = params[name][f"{field[0]}2"]
            both = product(jax.nn.gelu(before, approximate=gelu == "tanh"), _second_layer(w_2, heads))
            down, found[name, f"{field[0]}2"] = jnp.split(both, 2, axis=2)
            found[name, field] = _normed(down, np.full(width, True), heads // w_2.shape[0])
    return [found[c.compose_name, c.field] for c in columns]


def _transposed_weights(
    x: Float[Array, "B N M"],
    params: Mapping[str, Mapping[str, Array]],
    columns: Sequence[Columns],
    *,
    heads: int,
    gelu: str,
) -> list[Float[Array, "B N _"]]:
    """Return the dynamic weights of `columns`, computed with the tokens as the last axis, as the GPU kernels read them.

    The second layers are one batched product of P matrices: those of each side, compose and group. The sum over the
    heads adds rows of tokens, so that XLA fuses the rest with the packing of the kernels, and transposes nothing.
    """
    found: dict[tuple[str, str], Array] = {}
    hidden, gates = ([c for c in columns if c.field.endswith(end)] for end in "1g")
    pre_activations = jnp.einsum("MC,BNM->CBN", _first_layer(params, [*hidden, *gates]), x)
    if hidden:
        w_2 = jnp.concatenate([params[c.compose_name][f"{c.field[0]}2"] for c in hidden])
        count, inner = w_2.shape[:2]
        units = jax.nn.gelu(pre_activations[: count * inner], approximate=gelu == "tanh")
        both = jnp.einsum("PIO,PIBN->POBN", w_2, units.reshape(count, inner, *x.shape[:2]))
        down, up = jnp.moveaxis(both.reshape(count, 2, -1, heads * len(hidden) // count, *x.shape[:2]), 1, 0)
        square = jnp.square(down.astype(statistics_dtype(down.dtype)))
        down *= jax.lax.rsqrt(jnp.mean(square, axis=2, keepdims=True) + RMS_EPSILON).astype(down.dtype)
        for end, w in (("1", down), ("2", up)):
            for c, part in zip(hidden, jnp.split(w, len(hidden)), strict=True):  # G R J B N
                found[c.compose_name, c.field[0] + end] = jnp.transpose(part, (3, 4, 1, 0, 2)).reshape(*x.shape[:2], -1)
    if gates:
        for c, w in zip(gates, jnp.split(jnp.tanh(pre_activations[-heads * len(gates) :]), len(gates)), strict=True):
            found[c.compose_name, c.field] = jnp.moveaxis(w, 0, 2)
    return [found[c.compose_name, c.field] for c in columns]


def _padding(columns: Sequence[Columns]) -> int:
    """Return the columns missing to a multiple of 128, or 0 if they would be more than an eighth of the array.

    With complete registers, TPUs keep the columns of a product along lanes, as the kernels read them.
    """
    width = sum(c.width for c in columns)
    missing = -width % REGISTER
    return missing if 8 * missing <= width + missing else 0


def _first_layer(params: Mapping[str, Mapping[str, Array]], columns: Sequence[Columns]) -> Float[Array, "M _"]:
    """Return the matrix with which the inputs are multiplied for the hidden units and gates of `columns`."""
    parts = [params[c.compose_name][c.field] for c in columns if not c.field.endswith("2")]
    return jnp.concatenate([w.reshape(w.shape[0], -1) for w in parts], axis=1)


def _joined_second_layers(
    w_2: Sequence[Float[Array, "G I I"]], columns: Sequence[Columns], heads: int, count: int
) -> Float[Array, "C C"]:
    """Return the second layers of the composes and sides of `columns`, in their order, as one C×C matrix, C = `count`.

    The hidden units of a side have its columns of projections, by compose, group and unit. Products with constant
    matrices move the blocks to their rows and columns: transpositions of their short axes are slow on TPUs.
    """
    groups, inner = w_2[0].shape[:2]
    per_group = heads // groups
    ends = np.cumsum([c.width for c in columns])
    starts = {(c.compose_name, c.field): end - c.width for c, end in zip(columns, ends, strict=True)}
    rows, outs = [], []
    for side in dict.fromkeys(c.field[0] for c in columns):
        names = [c.compose_name for c in columns if c.field == f"{side}2"]
        first = starts[names[0], f"{side}1"]
        for n, name in enumerate(names):
            rows.append(first + n * groups * inner + np.arange(groups * inner).reshape(groups, inner))
            down, up = (starts[name, f"{side}{end}"] for end in "12")
            ranks, group = heads * np.arange(inner // (2 * per_group))[:, None], np.arange(heads).reshape(groups, 1, -1)
            outs.append(np.concatenate([(start + ranks + group).reshape(groups, -1) for start in (down, up)], axis=1))
    row, out = (jnp.asarray(np.eye(count)[np.concatenate(places)], w_2[0].dtype) for places in (rows, outs))
    found: Array = jnp.einsum("PIR,PIO,POC->RC", row, jnp.concatenate(w_2), out)
    return found


def _second_layer(w_2: Float[Array, "G I I"], heads: int) -> Float[Array, "GI GI"]:
    """Return the second layer of a compose, W_2 of Eqn 5, as one matrix that is block-diagonal.

    Its rows are ordered by group and input; its columns by down and up, rank, group and head.
    """
    layer, groups = block_diag(*w_2), len(w_2)
    split = layer.reshape(len(layer), groups, 2, -1, heads // groups)
    return jnp.transpose(split, (0, 2, 3, 1, 4)).reshape(layer.shape)


def _normed(w: Float[Array, "B N _"], is_down: np.ndarray, run: int) -> Float[Array, "B N _"]:
    """Return `w` with each `run` neighboring columns divided by their root mean square, where `is_down` is True.

    The means are a product of all columns: a sum over runs would cost TPUs a relayout.
    """
    square = jnp.square(w.astype(statistics_dtype(w.dtype)))
    scale = jax.lax.rsqrt(square @ mean_matrix(is_down, run).astype(square.dtype) + RMS_EPSILON)
    return w * jnp.where(is_down, scale, 1).astype(w.dtype)


def mean_matrix(is_down: np.ndarray, run: int) -> np.ndarray:
    """Return the matrix by which a row becomes the means of each `run` neighboring columns, where `is_down` is True."""
    whole = len(is_down) // run * run
    mean = np.kron(np.diag(is_down[:whole:run]), np.full((run, run), 1 / run))
    return np.pad(mean, (0, len(is_down) - whole))


def compose(a: Float[Array, "B H T S"], w: ComposeWeights, *, groups: int = 1) -> Float[Array, "B H T S"]:
    """Compose attention scores or weights across heads (Eqn 7).

    For all query-key pairs, A' = A + A·W_b + A·w_q1·w_q2 + A⊗w_qg + A·w_k1·w_k2 + A⊗w_kg.

    Args:
      a: attention scores or weights A of H heads.
      w: weights of the compose.
      groups: the number of equal groups of heads; each group is composed separately (Section 3.2).

    Returns:
      A' in the dtype of `a`.

    Raises:
      ValueError: `groups` does not divide the heads, or a weight's shape does not fit `a`.
    """
    batch, heads, queries, keys = a.shape
    check_weights(w, batch=batch, heads=heads, queries=queries, keys=keys, groups=groups)
    grouped = a.reshape(batch, groups, heads // groups, queries, keys)

    def split(x: Array) -> Array:  # (…, H) -> (…, G, H/G), in a's dtype
        return x.astype(a.dtype).reshape(*x.shape[:-1], groups, heads // groups)

    out = grouped
    if w.static is not None:
        out = out + jnp.einsum("bghts,ghn->bgnts", grouped, w.static.astype(a.dtype))
    if w.q1 is not None and w.q2 is not None:
        hidden = jnp.einsum("bghts,btrgh->bgrts", grouped, split(w.q1))
        out = out + jnp.einsum("bgrts,btrgh->bghts", hidden, split(w.q2))
    if w.k1 is not None and w.k2 is not None:
        hidden = jnp.einsum("bghts,bsrgh->bgrts", grouped, split(w.k1))
        out = out + jnp.einsum("bgrts,bsrgh->bghts", hidden, split(w.k2))
    if w.qg is not None:
        out = out + grouped * jnp.einsum("btgh->bght", split(w.qg))[..., None]
    if w.kg is not None:
        out = out + grouped * jnp.einsum("bsgh->bghs", split(w.kg))[..., None, :]
    return out.reshape(a.shape)


def query_map(
    w: ComposeWeights, *, batch: int, length: int, heads: int, groups: int, dtype: DTypeLike
) -> Float[Array, "#B #T G J J"]:
    """Return I + W_b + w_q1·w_q2 + diag(w_qg) for each query and group, J = H/G.

    A compose without its key-wise branches multiplies the scores or weights of the heads of a group, as a row vector,
    by this matrix. The axes B and T have length 1 if no branch is dynamic.
    """
    per_group = heads // groups
    one = jnp.eye(per_group, dtype=dtype)[None, None, None]
    out = jnp.broadcast_to(one, (1, 1, groups, per_group, per_group))
    if w.static is not None:
        out = out + w.static.astype(dtype)[None, None]
    if w.q1 is not None and w.q2 is not None:
        down, up = (x.astype(dtype).reshape(batch, length, -1, groups, per_group) for x in (w.q1, w.q2))
        for rank in range(down.shape[2]):
            out = out + down[:, :, rank, :, :, None] * up[:, :, rank, :, None]
    if w.qg is not None:
        out = out + one * w.qg.astype(dtype).reshape(batch, length, groups, 1, per_group)
    return out


def check_floating(arrays: Mapping[str, Shaped[Array, "..."] | None]) -> None:
    """Raise ValueError with the name of an array that does not have floating-point numbers."""
    for name, x in arrays.items():
        if x is not None and not is_float(x):
            raise ValueError(f"{name} has dtype {x.dtype}, expected floating-point numbers")


def check_weights(w: ComposeWeights, *, batch: int, heads: int, queries: int, keys: int, groups: int) -> None:
    """Raise ValueError with the name of the weight if `w` does not fit attention of the given sizes."""
    if groups < 1 or heads % groups:
        raise ValueError(f"groups={groups} does not divide {heads} heads")
    for side, length, down, up, gate in (("q", queries, w.q1, w.q2, w.qg), ("k", keys, w.k1, w.k2, w.kg)):
        if (down is None) != (up is None):
            raise ValueError(f"{side}1 and {side}2 must be given together: give both or neither")
        for name, x in ((f"{side}1", down), (f"{side}2", up)):
            if x is not None and (
                x.ndim != 4 or (*x.shape[:2], x.shape[3]) != (batch, length, heads) or not x.shape[2]
            ):
                raise ValueError(f"{name} has shape {x.shape}, expected ({batch}, {length}, rank, {heads})")
        if down is not None and up is not None and down.shape != up.shape:
            raise ValueError(f"{side}1 and {side}2 must have the same shape, found {down.shape} and {up.shape}")
        if gate is not None and gate.shape != (batch, length, heads):
            raise ValueError(f"{side}g has shape {gate.shape}, expected {(batch, length, heads)}")
    check_floating(w._asdict())
    per_group = heads // groups
    if w.static is not None and w.static.shape != (groups, per_group, per_group):
        raise ValueError(f"static has shape {w.static.shape}, expected {(groups, per_group, per_group)}")


def hidden_init(width: int, inner: int) -> Initializer:
    """Return the Xavier normal initializer of W_q1 and W_k1: standard deviation sqrt(2/(`width` + `inner`))."""
    return normal(math.sqrt(2 / (width + inner)))


def projection_init(rank: int, heads_per_group: int) -> Initializer:
    """Return the normal initializer of W_q2 and W_k2 (Section 4 of the paper).

    The standard deviation is 0.02/(sqrt(2HR)·(H+R)), where H is the number of heads of one group.
    """
    return normal(0.02 / (math.sqrt(2 * heads_per_group * rank) * (heads_per_group + rank)))


def gate_init(width: int, heads_per_group: int) -> Initializer:
    """Return the normal initializer of W_qg and W_kg (Section 4 of the paper).

    The standard deviation is 0.05·sqrt(2/(M+H)), where M is `width` and H is the number of heads of one group.
    """
    return normal(0.05 * math.sqrt(2 / (width + heads_per_group)))


def static_init(heads_per_group: int) -> Initializer:
    """Return the normal initializer of W_b, which is added to the skip connection.

    The standard deviation is 0.1·sqrt(1/H), as in the authors' code, where H is the number of heads of one group.
    """
    return normal(0.1 * math.sqrt(1 / heads_per_group))
